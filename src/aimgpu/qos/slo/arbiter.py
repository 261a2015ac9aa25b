"""Promises and pressure, in one place: how much neighbours of a model may use, and how hard low work is held back per GPU.

Two means keep a promise: the launch gate, by the pace of tokens (four times a second), and pressure on low work, by the rate
at which error budgets burn (once a second). A model whose promise the gate keeps presses on no other: else both would take from
low work what the promise leaves free. Measurements are passed in.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from aimgpu.domain import Deployment, Sharing
from aimgpu.qos.slo.objectives import targets_of
from aimgpu.qos.slo.pressure import NO_PRESSURE, Pressure, adjust_pressure
from aimgpu.qos.slo.sharing import PromiseController


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """How fast the high work of a model spends its error budget, and the GPUs that it runs on."""

    model: str
    rate: float
    devices: frozenset[str]


@dataclass(slots=True)
class Arbiter:
    """Lives on the gateway's event loop; `note_gated` may be called from any thread."""

    pressure: dict[str, Pressure] = field(default_factory=dict)  # by GPU, if there is any
    _promised: dict[str, tuple[Deployment, PromiseController]] = field(default_factory=dict)
    _gated: frozenset[str] = frozenset()

    def follow(self, promised: Mapping[str, Deployment], samples: Mapping[str, Mapping[str, list[float]]]) -> None:
        """One step of each model that shares by its promise, by the token times measured since the last."""
        self._promised = {name: known for name, known in self._promised.items() if name in promised}
        for name, deployment in promised.items():
            self._controller(deployment).step(samples.get(name, {}))

    def note_gated(self, models: Collection[str]) -> None:
        """Models of which a share was written at a gate."""
        self._gated = frozenset(models)

    def promise_of(self, model: str) -> PromiseController | None:
        """What is known of its promise; None where it does not share by one."""
        known = self._promised.get(model)
        return None if known is None else known[1]

    def share(self, deployment: Deployment) -> float:
        """The part of the GPU that neighbours may use while this model works."""
        if deployment.sharing is Sharing.FAIR:
            return 1.0
        known = self.promise_of(deployment.name)
        return known.share if deployment.sharing is Sharing.PROMISE and known is not None else 0.0

    def steers(self, model: str) -> bool:
        """Whether its promises are kept by way of the gate; no longer once it is shut and they break all the same."""
        known = self.promise_of(model)
        return known is not None and model in self._gated and not known.is_exhausted

    def press(self, burns: Iterable[Burn]) -> dict[str, Pressure]:
        """One step for each GPU, by the worst burn there; the pressures that changed."""
        worst: dict[str, tuple[str | None, float]] = dict.fromkeys(self.pressure, (None, 0.0))
        for burn in burns:
            if self.steers(burn.model):
                continue
            for device in burn.devices:
                if device not in worst or burn.rate > worst[device][1]:
                    worst[device] = (burn.model, burn.rate)
        changed = {}
        for device, (model, rate) in worst.items():
            before = self.pressure.get(device, NO_PRESSURE)
            after = adjust_pressure(before, model, rate)
            if after != before:
                changed[device] = after
        self.pressure |= changed
        self.pressure = {device: one for device, one in self.pressure.items() if one != NO_PRESSURE}
        return changed

    def _controller(self, deployment: Deployment) -> PromiseController:
        known = self._promised.get(deployment.name)
        if known is not None and known[0].objective == deployment.objective:
            return known[1]
        promised = deployment.objective.of_class(deployment.ask.priority) if deployment.objective else None
        made = PromiseController(targets_of(promised))
        self._promised[deployment.name] = (deployment, made)
        return made
