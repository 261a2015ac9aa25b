"""Keeps the gateway's route table equal to what the controller runs: refreshed in a thread whenever an instance changes."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from aimgpu.control.controller import Controller
from aimgpu.control.instance.run_folder import read_api_key
from aimgpu.daemon.model_cards import ModelCards
from aimgpu.domain import Adapter, Deployment, Instance, InstanceState
from aimgpu.engines.ownership import EngineOwner, check_peer
from aimgpu.engines.protocols import Engine, ModelStore, ServerEngine
from aimgpu.errors import EngineUnreachable, StrangerListens
from aimgpu.gateway.routes import Arrival, Backend, RequestSignal, RouteTable, ServedModel

log = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 1.0
_LEAST_PAUSE_SECONDS = 0.02  # between two refreshes: many instances that change together are one refresh
_PAUSE_SHARE = 4  # a pause is this many times as long as a refresh, which leaves the processor to requests
_LONGEST_PAUSE_SECONDS = 0.1  # well below `Timing.quiet_seconds`: an engine sleeps once requests go elsewhere
_SAME_SECONDS = 0.05  # times that are read from two clocks differ by a little at each look
_ORDER = (
    InstanceState.READY,
    InstanceState.LOADING,
    InstanceState.QUEUED,
    InstanceState.SLEEPING,
    InstanceState.DRAINING,
    InstanceState.FAILED,
)

# By engine, the field of a request that keeps its prefix cache apart from that of others.
_CACHE_FIELDS = {"vllm": "cache_salt", "llamacpp": "cache_prompt"}

_SCALES_ADAPTERS = "llamacpp"  # by request; others know an adapter by its name

FindSignals = Callable[[Iterable[str]], Mapping[str, Sequence[RequestSignal]]]  # by instance id
FindArrival = Callable[[Deployment, Sequence[Instance]], Arrival | None]


@dataclass(frozen=True, slots=True)
class _RouteInputs:
    """Everything of a deployment that its route is made from, but for when it will be up."""

    deployment: Deployment
    instances: tuple[Instance, ...]
    keys: tuple[str | None, ...]  # by instance; None: not ready
    signals: tuple[tuple[RequestSignal, ...], ...]
    waiting: str | None
    simulated: bool


class EngineOwners:
    """By address, which instance must be there: asked by the gateway's client for each new connection."""

    def __init__(self) -> None:
        self._owners: Mapping[str, EngineOwner] = {}

    def replace(self, ready: Iterable[Instance]) -> None:
        self._owners = {one.endpoint: owner for one in ready if one.endpoint and (owner := EngineOwner.of(one))}

    def check(self, origin: str, ours: tuple[str, int], theirs: tuple[str, int]) -> None:
        """Raises StrangerListens or EngineUnreachable."""
        owner = self._owners.get(origin)
        if owner is None:
            raise EngineUnreachable("no engine runs at this address any more")
        try:
            check_peer(owner, ours, theirs)
        except ConnectionResetError as error:
            raise EngineUnreachable(str(error)) from error
        except StrangerListens as error:
            log.error("engine.stranger", extra={"data": {"instance": owner.instance_id, "reason": error.message}})  # noqa: TRY400
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSources:
    """What routes are made from."""

    controller: Controller
    engines: Mapping[str, Engine]
    models: ModelStore
    runs: Path
    owners: EngineOwners = field(default_factory=EngineOwners)


class ControllerRoutes:
    """Writes `routes`; requests read them. `find_arrival` is asked for models without a ready instance."""

    def __init__(
        self, sources: RouteSources, routes: RouteTable, find_arrival: FindArrival, find_signals: FindSignals = lambda _: {}
    ) -> None:
        self._controller = sources.controller
        self._sources = sources
        self._cards = ModelCards(sources.models)
        self._routes = routes
        self._find_arrival = find_arrival
        self._find_signals = find_signals
        self._created = int(time.time())
        self._keys: dict[str, str] = {}
        self._made: dict[str, tuple[_RouteInputs, ServedModel]] = {}
        self._expected: Mapping[int, Sequence[Deployment]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="routes", daemon=True)

    def start(self) -> None:
        """Fill the table, and follow the controller from now on."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """Follow it no longer; the table stays as it is."""
        self._stopped.set()
        self._controller.changes.notify()
        self._thread.join()

    @contextmanager
    def expect(self, deployments: Sequence[Deployment]) -> Iterator[None]:
        """Callers of these are held, though they are still being sized or fetched and the controller does not know them yet."""
        with self._lock:
            self._expected = {**self._expected, id(deployments): deployments}
        self._controller.changes.notify()
        try:
            yield
        finally:
            with self._lock:
                self._expected = {key: each for key, each in self._expected.items() if key != id(deployments)}
            self._controller.changes.notify()

    def refresh(self) -> None:
        """Replace the table; only what changed is made again, so that a change costs the same whatever the number of models."""
        simulated = any(device.simulated for device in self._controller.devices())
        instances = self._controller.instances()
        ready = [instance for instance in instances if instance.state is InstanceState.READY and instance.endpoint]
        signals = self._find_signals(instance.id for instance in ready)
        self._sources.owners.replace(ready)
        self._keys = {instance.id: self._keys.get(instance.id) or self._read_key(instance) for instance in ready}
        by_deployment: dict[str, list[Instance]] = {}
        for instance in instances:
            by_deployment.setdefault(instance.deployment, []).append(instance)
        waiting = {item.deployment: item.reason for item in self._controller.waiting()}
        made: dict[str, tuple[_RouteInputs, ServedModel]] = {}
        for item in (one for one in self._controller.deployments() if one.overrides.program is None):
            mine = tuple(by_deployment.get(item.name, ()))
            keys = tuple(self._keys.get(instance.id) for instance in mine)
            each = tuple(tuple(signals.get(instance.id, ())) for instance in mine)
            made[item.name] = self._make(_RouteInputs(item, mine, keys, each, waiting.get(item.name), simulated))
        self._made = made
        served = [(inputs.deployment, route) for inputs, route in made.values()]
        expected = {item.name: item for each in self._expected.values() for item in each if item.name not in made}
        served += [(item, self._coming(item, simulated=simulated)) for item in expected.values()]
        self._routes.replace(each for item, route in served for each in _with_adapters(item, route))

    def _coming(self, deployment: Deployment, *, simulated: bool) -> ServedModel:
        served = self._served(_RouteInputs(deployment, (), (), (), "it is being prepared", simulated))
        return replace(served, arrival=Arrival(slots=deployment.concurrency or 1, seconds=None))

    def _follow(self) -> None:
        seen = self._controller.changes.version
        while not self._stopped.is_set():
            seen = self._controller.changes.wait(seen, _LONGEST_WAIT_SECONDS)
            if not self._stopped.is_set():
                began = time.thread_time()
                self._refresh_or_log()
                pause = _PAUSE_SHARE * (time.thread_time() - began)
                self._stopped.wait(min(max(pause, _LEAST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))

    def _refresh_or_log(self) -> None:
        """What was known stays known while the ledger or the devices cannot be read; the next attempt comes in any case."""
        try:
            self.refresh()
        except Exception:
            log.exception("routes.failed")

    def _make(self, inputs: _RouteInputs) -> tuple[_RouteInputs, ServedModel]:
        known = self._made.get(inputs.deployment.name)
        same = known is not None and known[0] == inputs
        served = known[1] if known is not None and same else self._served(inputs)
        if not served.backends or not same:  # once also where it serves now: that ends what was noted while it did not
            arrival = self._find_arrival(inputs.deployment, inputs.instances)
            arrival = None if served.backends else arrival
            served = served if _is_same(arrival, served.arrival) else replace(served, arrival=arrival)
        return inputs, served

    def _served(self, inputs: _RouteInputs) -> ServedModel:
        deployment, instances = inputs.deployment, inputs.instances
        backends = tuple(
            self._backend(deployment, instance, signals)
            for instance, signals in zip(instances, inputs.signals, strict=True)
            if instance.id in self._keys
        )
        states = [instance.state for instance in instances]
        state = next((state for state in _ORDER if state in states), InstanceState.QUEUED)
        reason = next((instance.reason for instance in instances if instance.reason), None)
        others = tuple(dict.fromkeys(name for backend in backends for name in backend.other_names))
        return ServedModel(
            name=deployment.name,
            model=deployment.model,
            state=state.value,
            reason=reason if instances else inputs.waiting,
            simulated=inputs.simulated,
            backends=backends,
            created=self._created,
            priority=deployment.ask.priority,
            objective=deployment.objective,
            card=self._cards.make(deployment, instances),
            aliases=(*deployment.aliases, *others),
            default=deployment.default,
            names_more=not backends and isinstance(self._sources.engines.get(deployment.engine or ""), ServerEngine),
        )

    def _backend(self, deployment: Deployment, instance: Instance, signals: Sequence[RequestSignal]) -> Backend:
        engine = self._sources.engines.get(instance.engine)
        # The deployment's own, unless its server was asked or said how it calls its models.
        said = engine.served_models(self._sources.runs / instance.id) if isinstance(engine, ServerEngine) else ()
        names: tuple[str, ...] = said or (deployment.name,)
        return Backend(
            instance_id=instance.id,
            url=instance.endpoint or "",
            api_key=self._keys[instance.id],
            slots=instance.concurrency or deployment.concurrency or 1,
            device_id=instance.grants[0].device_id if instance.grants else None,
            takes_priority=engine is not None and engine.takes_priority,
            cache_field=_CACHE_FIELDS.get(instance.engine),
            signals=tuple(signals),
            name=names[0],
            other_names={f"{deployment.name}:{name}": name for name in names[1:]},
        )

    def _read_key(self, instance: Instance) -> str:
        return read_api_key(self._sources.runs, instance.id) or ""


def _with_adapters(deployment: Deployment, route: ServedModel) -> list[ServedModel]:
    """The model, and each adapter of it as a model of its own. llama.cpp is told in every request which of them it uses."""
    adapters = deployment.overrides.adapters
    if not adapters:
        return [route]

    def fields(chosen: Adapter | None) -> dict[str, object]:
        if route.card.engine != _SCALES_ADAPTERS:
            return {}
        return {"lora": [{"id": number, "scale": float(each is chosen)} for number, each in enumerate(adapters)]}

    return [
        replace(route, backends=tuple(replace(one, fields=fields(None)) for one in route.backends)),
        *(
            replace(
                route,
                backends=tuple(replace(one, name=each.name, fields=fields(each)) for one in route.backends),
                name=each.name,
                aliases=(),
                default=False,
                priority=each.priority or route.priority,
                objective=each.objective,
                deployment=deployment.name,
            )
            for each in adapters
        ),
    ]


def _is_same(one: Arrival | None, other: Arrival | None) -> bool:
    if one is None or other is None or one.retry_at is None or other.retry_at is None:
        return one == other
    return abs(one.retry_at - other.retry_at) < _SAME_SECONDS and one == replace(other, retry_at=one.retry_at)
