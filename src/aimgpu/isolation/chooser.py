"""Chooses the strongest mechanism that can make a Grant true, and says at which Level it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Grant, Level, Partition
from aimgpu.errors import NotAllowed
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.protocols import Enforcement, Mechanism, Offer, Resizer

NOTHING = Enforcement(level=Level.NONE, mechanism="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One mechanism's answer for one Partition, for `explain`."""

    mechanism: str
    offer: Offer


class MechanismChooser:
    """An Isolator over a list of mechanisms; of two with the same Level the earlier one wins.

    Companions are added to whatever was chosen, where they can be had: they limit what it does not (compute, turns), and
    never raise the Level that is told.
    """

    def __init__(
        self,
        mechanisms: Sequence[Mechanism] = (HardwareBoundary(), EngineFlags()),
        companions: Sequence[Mechanism] = (),
    ) -> None:
        self._mechanisms = tuple(mechanisms)
        self._companions = tuple(companions)

    def available_levels(self, device: Device, partition: Partition, *, exclusive: bool) -> frozenset[Level]:
        offers = (choice.offer.level for choice in self.explain(device, partition, exclusive=exclusive))
        return frozenset({Level.NONE, *(level for level in offers if level is not None)})

    def explain(self, device: Device, partition: Partition, *, exclusive: bool) -> tuple[Choice, ...]:
        """Every mechanism with what it gives here, or why it gives nothing."""
        return tuple(
            Choice(mechanism=mechanism.name, offer=mechanism.offer(device, partition, exclusive=exclusive))
            for mechanism in self._mechanisms
        )

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        """The strongest there is; `grant.level` is the least that was promised."""
        mechanism = self._strongest(device, partition, exclusive=grant.exclusive)
        enforcement = NOTHING if mechanism is None else mechanism.enforce(grant, device, partition)
        if enforcement.level.rank < grant.level.rank:
            if mechanism is not None:
                mechanism.release(grant)
            raise self._too_weak(grant, device, partition, enforcement)
        return self._with_companions(enforcement, mechanism, grant, device, partition)

    def release(self, grant: Grant) -> None:
        for mechanism in dict.fromkeys((*self._mechanisms, *self._companions)):
            mechanism.release(grant)

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        for mechanism in self._mechanisms:
            if isinstance(mechanism, Resizer):
                mechanism.resize(grant, memory_bytes)

    def _with_companions(
        self, chosen: Enforcement, by: Mechanism | None, grant: Grant, device: Device, partition: Partition
    ) -> Enforcement:
        for companion in self._companions:
            if companion is by or companion.offer(device, partition, exclusive=grant.exclusive).level is None:
                continue
            more = companion.enforce(grant, device, partition)
            if more.environment:
                chosen = replace(
                    chosen,
                    mechanism=f"{chosen.mechanism} + {more.mechanism}",
                    environment={**more.environment, **chosen.environment},
                )
        return chosen

    def _strongest(self, device: Device, partition: Partition, *, exclusive: bool) -> Mechanism | None:
        best: tuple[int, Mechanism] | None = None
        for mechanism in self._mechanisms:
            level = mechanism.offer(device, partition, exclusive=exclusive).level
            if level is not None and (best is None or level.rank > best[0]):
                best = (level.rank, mechanism)
        return None if best is None else best[1]

    def _too_weak(self, grant: Grant, device: Device, partition: Partition, best: Enforcement) -> NotAllowed:
        reasons = [
            f"{choice.mechanism}: {choice.offer.reason}"
            for choice in self.explain(device, partition, exclusive=grant.exclusive)
            if choice.offer.reason is not None
        ]
        return NotAllowed(
            f"{grant.partition_id} can be enforced at level {best.level} at most, {grant.level} was promised"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
            hint="Ask for a weaker isolation, or for a partition of its own.",
        )
