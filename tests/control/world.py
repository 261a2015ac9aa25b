"""A machine in memory: processes that outlive a controller, engines that obey a script, and crashes at chosen moments."""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.control.plan.eviction import Resident
from aimgpu.daemon.status import StatusSources
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Exactness,
    Footprint,
    Instance,
    Memory,
    Priority,
    ProcessIdentity,
    Term,
    Want,
)
from aimgpu.engines.protocols import (
    Availability,
    Command,
    Health,
    HealthState,
    LaunchRequest,
    LocalModel,
    Progress,
)
from aimgpu.errors import EngineFailed, LedgerFull
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger
from aimgpu.units import GIB

BOOT = "boot"
SERVING = ("ready", "cannot-sleep", "cannot-wake", "sleeps-for-ever")


class Crashed(BaseException):
    """The controller's process died here."""


@dataclass
class FakeProcess:
    identity: ProcessIdentity
    instance_id: str
    behaviour: str
    alive: bool = True
    asleep: bool = False


@dataclass
class Machine:
    """What a crash of the controller does not touch."""

    root: Path
    processes: list[FakeProcess] = field(default_factory=list)
    behaviours: dict[str, str] = field(default_factory=dict)  # deployment -> ready | never | mute | dies | broken | no-space
    # | cannot-sleep | cannot-wake | sleeps-for-ever
    questions: int = 0  # that a mute engine was asked
    disk_is_full: bool = False  # nothing can be charged; giving back works
    crash_in: int | None = None  # side effects until the controller dies
    lock: threading.Lock = field(default_factory=threading.Lock)
    gpus: int = 2
    no_sleep: str | None = None  # why sleepers cannot sleep here

    def __post_init__(self) -> None:
        self.hardware = SimulatedHardware([("MI300X", self.gpus)], self.root / "simulated.json")

    def tick(self) -> None:
        """Called before and after every side effect: a crash may come between any two."""
        with self.lock:
            if self.crash_in is None:
                return
            self.crash_in -= 1
            if self.crash_in < 0:
                raise Crashed

    def live(self) -> dict[str, FakeProcess]:
        return {process.instance_id: process for process in self.processes if process.alive}


class CrashingLedger:
    """A ledger whose process may die before or after any write."""

    def __init__(self, ledger: Ledger, machine: Machine) -> None:
        self._ledger = ledger
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ledger, name)
        if name not in (
            "want",
            "unwant",
            "update",
            "charge",
            "rebook",
            "resize",
            "note_enforcement",
            "release",
            "begin",
            "finish",
        ):
            return target

        def around(*args: Any, **kwargs: Any) -> Any:
            self._machine.tick()
            if name == "charge" and self._machine.disk_is_full:
                raise LedgerFull("the ledger cannot be written")
            result = target(*args, **kwargs)
            self._machine.tick()
            return result

        return around


class FakeLauncher:
    name = "process"
    brings_engines = False
    joins_groups = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def check(self) -> None:
        return None

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        self._machine.tick()
        with self._machine.lock:
            number = len(self._machine.processes) + 1
            identity = ProcessIdentity(pid=number, start_ticks=number, boot_id=BOOT)
            behaviour = self._machine.behaviours.get(command.environment["DEPLOYMENT"], "ready")
            alive = behaviour != "dies"
            process = FakeProcess(identity=identity, instance_id=instance_id, behaviour=behaviour, alive=alive)
            self._machine.processes.append(process)
        self._machine.tick()
        return identity

    def is_running(self, process: ProcessIdentity) -> bool:
        return any(found.alive and found.identity == process for found in self._machine.processes)

    def how_it_ended(self, process: ProcessIdentity) -> str | None:
        return None

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        self._machine.tick()
        for found in self._machine.processes:
            if found.identity == process:
                found.alive = False
        self._machine.tick()

    def find_started(self) -> Mapping[str, ProcessIdentity]:
        return {name: process.identity for name, process in self._machine.live().items()}

    def last_lines(self, run_directory: Path, count: int = 20) -> tuple[str, ...]:
        return ("the last line",)


class FakeEngine:
    name = "llamacpp"
    runs_without_gpu = True
    takes_priority = False
    starts_alone = False
    fetches_models = False
    formats = frozenset({"gguf"})

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def availability(self) -> Availability:
        return Availability(available=True, version="0")

    def command(self, request: LaunchRequest) -> Command:
        if self._machine.behaviours.get(request.instance.deployment) == "no-space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "settings.json")
        return Command(argv=("engine",), environment={**request.environment, "DEPLOYMENT": request.instance.deployment})

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        process = self._machine.live().get(run_directory.name)
        behaviour = process.behaviour if process else "never"
        if process is not None and behaviour == "dies-when-asked":
            process.alive = False
        if behaviour in SERVING:
            return Health(state=HealthState.READY, endpoint="http://127.0.0.1:1")
        if behaviour == "mute":  # a question that nobody answers takes its time
            self._machine.questions += 1
            time.sleep(0.1)
        if behaviour == "broken":
            return Health(state=HealthState.BROKEN, reason="out of memory")
        return Health(state=HealthState.LOADING, percent=10)

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        return last_lines[-1] if last_lines else None


class FakeSleeper(FakeEngine):
    """Gives the weights back and keeps its context of 1 GiB."""

    name = "sleeper"
    formats = frozenset({"safetensors"})  # never chosen for the models of this world, unless by name
    gives_back = frozenset({"weights"})
    keeps_on_host: frozenset[str] = frozenset()

    def why_no_sleep(self, *, in_image: bool, simulated: bool) -> str | None:
        return self._machine.no_sleep

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        process = self._machine.live().get(run_directory.name)
        if process is not None and process.asleep:
            return Health(state=HealthState.SLEEPING, endpoint="http://127.0.0.1:1")
        return super().check_health(run_directory, api_key)

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:
        self._change(run_directory, "cannot-sleep", asleep=True)

    def wake(self, run_directory: Path, api_key: str) -> None:
        process = self._machine.live().get(run_directory.name)
        if process is not None and process.behaviour == "sleeps-for-ever":
            return
        self._change(run_directory, "cannot-wake", asleep=False)

    def _change(self, run_directory: Path, unwilling: str, *, asleep: bool) -> None:
        self._machine.tick()
        process = self._machine.live().get(run_directory.name)
        if process is None or process.behaviour == unwilling:
            raise EngineFailed("it answered 500")
        process.asleep = asleep
        self._machine.tick()


class FakeStore:
    def find_config(self, model: str, *, fetch: bool) -> LocalModel | None:
        return None

    def find(self, model: str) -> LocalModel | None:
        return LocalModel(name=model, path=Path("/nowhere/model.gguf"), format="gguf")

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        progress(f"model {model}", 1, 1)
        return LocalModel(name=model, path=Path("/nowhere/model.gguf"), format="gguf")


def size_by_name(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
    """Models named "<n>gib" need n GiB, 1 GiB of it for the context."""
    gib = int(deployment.model.removesuffix("gib"))
    terms = tuple(
        Term(name=name, memory_bytes=size * GIB, exactness=Exactness.EXACT, formula="by name")
        for name, size in (("weights", gib - 1), ("context", 1))
    )
    return Footprint(model=deployment.model, engine=engine, precision="fp16", context_tokens=1, concurrency=1, terms=terms)


FAST = Timing(
    load_timeout_seconds=0.05,
    wake_timeout_seconds=300.0,
    poll_seconds=0.01,
    drain_seconds=0.05,
    quiet_seconds=0.0,
    grace_seconds=0.1,
    ask_seconds=0.0,
    restart_delay_seconds=0.0,
    restart_jitter=0.0,
    close_seconds=5.0,
)


def boot(machine: Machine, *, timing: Timing = FAST, in_flight: Callable[[str], int] = lambda _: 0) -> Controller:
    """A new controller process on this machine."""
    ledger: Any = CrashingLedger(Ledger.open(machine.root / "ledger.sqlite3"), machine)
    return Controller(
        Dependencies(
            hardware=machine.hardware,
            ledger=ledger,
            isolator=MechanismChooser(),
            engines={"llamacpp": FakeEngine(machine), "sleeper": FakeSleeper(machine)},
            launchers={"process": FakeLauncher(machine)},
            models=FakeStore(),
            size=size_by_name,
            runs=machine.root / "runs",
            node="here",
            in_flight=in_flight,
            timing=timing,
        )
    )


def status_sources(controller: Controller) -> StatusSources:
    made = controller._dependencies
    return StatusSources(controller=controller, hardware=made.hardware, engines=made.engines, runs=made.runs)


def restart(controller: Controller, name: str) -> None:
    """Stop what runs of it and start it again."""
    for instance in controller.instances():
        if instance.deployment == name:
            controller.stop_instance(instance.id, restart=True)


def deployment(  # noqa: PLR0913 - what tests vary
    name: str,
    gib: int = 10,
    *,
    want: Want | None = None,
    replicas: int = 1,
    keep_seconds: int | None = None,
    engine: str | None = None,
) -> Deployment:
    ask = Ask(name=name, want=want or Auto())
    return Deployment(name=name, model=f"{gib}gib", ask=ask, replicas=replicas, keep_seconds=keep_seconds, engine=engine)


def resident(name: str, **given: Any) -> Resident:
    """Idle, unloadable, of little worth, unless told otherwise."""
    fields: dict[str, Any] = {
        "priority": Priority.MEDIUM,
        "keep_seconds": 60,
        "idle_seconds": 100.0,
        "resident_seconds": 1000.0,
        "in_flight": 0,
        "wake_seconds": 10.0,
        "expected_seconds": 600.0,
    }
    return Resident(name=name, **{**fields, **given})


def memory(gib: int) -> Memory:
    return Memory(memory_bytes=gib * GIB)


def check_ledger(machine: Machine, controller: Controller, *, names: Sequence[str] | None = None) -> None:
    """The promises: no Partition over its size, nothing negative, and the ledger equals the processes."""
    ledger = controller._dependencies.ledger
    sizes = {part.id: part.memory_bytes for device in controller.devices() for part in device.layout.partitions}
    taken: dict[str, int] = {}
    for grant in ledger.grants():
        assert grant.memory_bytes > 0
        taken[grant.partition_id] = taken.get(grant.partition_id, 0) + grant.memory_bytes
    for partition, used in taken.items():
        assert used <= sizes[partition], partition
    charged = {grant.instance_id for grant in ledger.grants()}
    assert charged == set(machine.live()), "what is charged is what runs"
    loaded = {i.id for i in ledger.instances() if i.state.value not in ("failed", "absent", "sleeping")}
    asleep = {i.id for i in ledger.instances() if i.sleeps_in_place}
    assert charged == loaded | asleep
    assert {i.id for i in ledger.instances() if i.process} == charged
    for instance in ledger.instances():
        if instance.id in charged:
            check_size(instance, asleep=machine.live()[instance.id].asleep)
    if names is not None:
        assert {item.name for item in ledger.deployments()} == set(names)


def check_size(instance: Instance, *, asleep: bool) -> None:
    """The ledger holds what the process holds: everything while it is awake, its rest while it sleeps."""
    assert asleep == instance.sleeps_in_place, f"{instance.id} is {instance.state}, and its engine says asleep: {asleep}"
    assert bool(instance.awake_slots) == asleep
    model_bytes = int(instance.model.removesuffix("gib")) * GIB
    for grant in instance.grants:
        if not asleep:
            assert grant.memory_bytes >= model_bytes
        elif not grant.exclusive:
            assert grant.memory_bytes == min(GIB, model_bytes)
