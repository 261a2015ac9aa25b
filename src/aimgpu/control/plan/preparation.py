"""Before a plan: choose the engine, find or bring the model, size it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.plan.asleep import is_to_sleep
from aimgpu.control.plan.prepared import Prepared
from aimgpu.control.sizing_inputs.model_names import Readers, is_short_name, published_formats, unfetchable, unreadable
from aimgpu.control.stack.server import COMMAND
from aimgpu.domain import PROGRAM, Ask, Deployment, Device, Vendor
from aimgpu.engines.models.hub import GGUF
from aimgpu.engines.overrides import check_overrides
from aimgpu.engines.protocols import Availability, Engine, LocalModel, ServerEngine, Sleeper
from aimgpu.errors import EngineUnavailable, InvalidInput, UnknownModel


def prepare(dependencies: Dependencies, deployment: Deployment, emit: Emit, *, may_fetch: bool) -> Prepared:
    """Raises EngineUnavailable, ModelUnavailable or UnknownModel, each with what to do.

    What could not be started at all is refused here, before anything that runs is stopped for it.
    """
    if deployment.launcher not in dependencies.launchers:
        known = ", ".join(dependencies.launchers)
        raise InvalidInput(f"{deployment.name}: no launcher {deployment.launcher!r} here", hint=f"Known: {known}.")
    if may_fetch:  # else it is a plan only, which may be made on another machine
        dependencies.launchers[deployment.launcher].check()
    devices = dependencies.hardware.read_devices()
    engine = choose_engine(dependencies, deployment, devices)
    remark = _availability(dependencies, deployment, dependencies.engines[engine]).reason
    if remark:
        emit(Event(kind=EventKind.STEP, deployment=deployment.name, text=f"{deployment.name}: {engine} {remark}"))
    check_name(dependencies, deployment, engine)
    by_itself = dependencies.engines[engine].fetches_models
    local = _find_model(dependencies, deployment, emit, may_fetch=may_fetch and not by_itself)
    vendor = vendor_for(deployment.ask, devices).value
    try:
        footprint = dependencies.size(deployment, engine, local, vendor)
    except UnknownModel:
        config = dependencies.models.find_config(deployment.model, fetch=may_fetch) if by_itself else None
        if config is None:
            raise
        footprint = dependencies.size(deployment, engine, config, vendor)
    footprint = replace(footprint, in_host_memory=remark is not None or are_simulated(devices))
    installed = not dependencies.launchers[deployment.launcher].brings_engines
    check_overrides(deployment, dependencies.engines[engine], footprint, installed=installed)
    no_sleep = _why_no_sleep(dependencies.engines[engine], deployment, devices, installed=installed)
    if no_sleep is not None:
        text = f"{deployment.name}: {no_sleep}: when it is idle it is stopped, and a request starts it again"
        emit(Event(kind=EventKind.STEP, deployment=deployment.name, text=text))
    return Prepared(deployment=deployment, engine=engine, footprint=footprint, can_sleep=no_sleep is None)


def are_simulated(devices: Collection[Device]) -> bool:
    """What runs on them is in host memory, whatever they grant."""
    return bool(devices) and all(device.simulated for device in devices)


def vendor_for(ask: Ask, devices: Sequence[Device]) -> Vendor:
    """For whose GPUs to size: one that the ask takes, of AMD before others, where a process holds more."""
    refused = ask.refused_vendor
    taken = [each for each in devices if ask.vendor in (None, each.vendor.value) and each.vendor.value != refused]
    found = {each.vendor for each in taken or devices}
    return Vendor.NVIDIA if found == {Vendor.NVIDIA} else Vendor.AMD


def choose_engine(dependencies: Dependencies, deployment: Deployment, devices: tuple[Device, ...]) -> str:
    """The engine the user named, else the best that runs here; a simulated device has no GPU to run any but llamacpp."""
    if deployment.engine is not None:
        engine = dependencies.engines.get(deployment.engine)
        if engine is None:
            known = ", ".join(dependencies.engines)
            raise InvalidInput(f"{deployment.name}: unknown engine {deployment.engine!r}", hint=f"Known engines: {known}.")
        found = _availability(dependencies, deployment, engine)
        if not found.available:
            raise EngineUnavailable(f"{deployment.name}: {engine.name} cannot run here: {found.reason}", hint=found.hint)
        check_format(engine, deployment.model, dependencies.models.find(deployment.model))
        return engine.name
    simulated = all(device.simulated for device in devices)
    local = dependencies.models.find(deployment.model)
    formats = formats_of(deployment.model, local)
    reasons = []
    others = []
    for engine in dependencies.engines.values():
        reason = _cannot_run(engine, simulated=simulated)
        if reason is None:
            found = _availability(dependencies, deployment, engine)
            reason = found.reason if not found.available else None
        if reason is None:
            if _reads(engine, deployment.model, local):
                return engine.name
            others.append(engine.name)
        if engine.name not in (COMMAND, PROGRAM):  # which nobody expects to serve a model by its name
            reasons.append(f"{engine.name}: {reason or f'does not serve {_join(formats)} files'}")
    if others and GGUF not in formats:  # engines that run here, and read other files
        raise unreadable(deployment.model, formats, f"which no engine that runs here reads ({'; '.join(reasons)})")
    raise EngineUnavailable(f"{deployment.name}: no engine can run here", hint="; ".join(reasons))


def check_name(dependencies: Dependencies, deployment: Deployment, engine: str) -> None:
    """Raises UnknownModel for a name that nobody could be asked for, before anything is planned for it."""
    brings_own = dependencies.engines[engine].fetches_models
    if not brings_own and is_short_name(deployment.model) and dependencies.models.find(deployment.model) is None:
        raise unfetchable(
            deployment.model,
            readers(dependencies.engines.values(), simulated=are_simulated(dependencies.hardware.read_devices())),
        )


def suited_engines(engines: Iterable[Engine], model: str, local: LocalModel | None, *, simulated: bool) -> list[str]:
    """Those that could serve the model if they are installed, best first."""
    return [one.name for one in engines if _cannot_run(one, simulated=simulated) is None and _reads(one, model, local)]


def formats_of(model: str, local: LocalModel | None) -> frozenset[str]:
    """Of its files on disk, else as it is published; empty: unknown."""
    return frozenset({local.format}) if local is not None else published_formats(model)


def check_format(engine: Engine, model: str, local: LocalModel | None) -> None:
    """Raises ModelUnavailable where the engine that the user named cannot read what is published."""
    if isinstance(engine, ServerEngine):
        return  # whatever its command makes of it
    if (local is None or engine.fetches_models) and not _reads(engine, model, None):
        what = f"{_join(engine.formats)} files" if engine.formats else "models of its own store and hf.co/ORG/NAME-GGUF"
        raise unreadable(model, published_formats(model), f"and {engine.name} reads {what}")


def readers(engines: Iterable[Engine], *, simulated: bool) -> Readers:
    """Those that run on this machine, best first."""
    able = (one for one in engines if _cannot_run(one, simulated=simulated) is None and one.formats)
    return {one.name: one.formats for one in able if one.availability().available}


def _cannot_run(engine: Engine, *, simulated: bool) -> str | None:
    return "needs a GPU, and this one is simulated" if simulated and not engine.runs_without_gpu else None


def _reads(engine: Engine, model: str, local: LocalModel | None) -> bool:
    """Ollama brings models by names of its own, and GGUF files of the hub by their address."""
    formats = formats_of(model, local)
    if not engine.formats and local is None:
        return not formats or "/" not in model or (model.startswith("hf.co/") and GGUF in formats)
    return not formats or bool(formats & engine.formats)


def _join(formats: Iterable[str]) -> str:
    return " and ".join(sorted(formats))


def _availability(dependencies: Dependencies, deployment: Deployment, engine: Engine) -> Availability:
    """Where the launcher brings the engine along, what is installed here does not matter; a command is checked by itself."""
    named = isinstance(engine, ServerEngine) and deployment.engine == engine.name
    if named or (dependencies.launchers[deployment.launcher].brings_engines and not isinstance(engine, ServerEngine)):
        return Availability(available=True)
    return engine.availability()


def _why_no_sleep(engine: Engine, deployment: Deployment, devices: Iterable[Device], *, installed: bool) -> str | None:
    """Why a deployment that is to sleep in place cannot; None also for one that is not to, or whose engine never can."""
    if not is_to_sleep(deployment) or not isinstance(engine, Sleeper):
        return None
    return engine.why_no_sleep(in_image=not installed, simulated=all(device.simulated for device in devices))


def _find_model(dependencies: Dependencies, deployment: Deployment, emit: Emit, *, may_fetch: bool) -> LocalModel | None:
    if not may_fetch:
        return dependencies.models.find(deployment.model)

    def progress(what: str, done: int, total: int | None) -> None:
        data = {"what": what, "done_bytes": done, "total_bytes": total}
        emit(Event(kind=EventKind.PROGRESS, deployment=deployment.name, text=what, data=data))

    return dependencies.models.fetch(deployment.model, progress)
