"""The machine: the fakes of `tests/control/world.py`, where each side effect may switch, fail, hang or crash."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.control.world import FakeEngine, FakeLauncher, FakeSleeper, FakeStore, Machine, size_by_name
from tests.simulation.effects import SimEffects
from tests.simulation.scheduler import Life, Scheduler

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.control.events import ignore
from aimgpu.control.loop import NotYet
from aimgpu.control.plan.eviction import Resident
from aimgpu.control.plan.preparation import prepare
from aimgpu.control.plan.prepared import Prepared
from aimgpu.control.plan.wake import plan_wake
from aimgpu.control.snapshots import Reading, read_gpus
from aimgpu.domain import Deployment, Device, DeviceUsage, ProcessIdentity
from aimgpu.engines.protocols import Health, LocalModel, Progress
from aimgpu.errors import AimGpuError, Conflict, EngineFailed, HardwareFailed, LedgerFull
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.ledger import Ledger

TIMING = Timing(
    load_timeout_seconds=30.0,
    wake_timeout_seconds=20.0,
    poll_seconds=0.5,
    drain_seconds=2.0,
    quiet_seconds=0.2,
    grace_seconds=1.0,
    ask_seconds=5.0,
    silence_seconds=30.0,
    restart_longest_seconds=20.0,
    error_retry_seconds=10.0,
    least_residency_seconds=0.0,
)
HANG_SECONDS = 40.0
WAITS_SECONDS = 30.0  # after its last question, nobody waits for a wake any more


class Violation(AssertionError):
    """Something that must always hold did not."""


@dataclass(kw_only=True)
class Fault:
    """What happens at one of the coming side effects."""

    in_effects: int
    kind: str  # fail | hang | crash


@dataclass(kw_only=True)
class SimMachine(Machine):
    scheduler: Scheduler
    life: Life = field(default_factory=Life)
    faults: list[Fault] = field(default_factory=list)
    full_until: float = 0.0  # every second charge finds the disk full

    def tick(self) -> None:
        self.effect(None)

    def effect(self, error: Callable[[], AimGpuError] | None) -> None:
        """A switching point; `error`: what the effect raises where it fails, None where it cannot.

        Inside a transaction it may only fail.
        """
        if self.scheduler.held and error is None:
            return
        self.scheduler.switch()
        fault = self._take(may_fail=error is not None)
        if fault is None:
            return
        if fault.kind == "crash":
            self.scheduler.end(self.life)
        elif fault.kind == "hang":
            self.scheduler.block(None, self.scheduler.clock + HANG_SECONDS)
        elif error is not None:
            raise error()

    def _take(self, *, may_fail: bool) -> Fault | None:
        for fault in self.faults:
            fault.in_effects -= 1
        due = [one for one in self.faults if one.in_effects <= 0 and (may_fail or one.kind != "fail")]
        due = [one for one in due if one.kind == "fail" or not self.scheduler.held]
        if due:
            self.faults.remove(due[0])
            return due[0]
        return None


class SimLedger:
    """Each write is a switching point before and after, and may find the disk full; a dead daemon writes nothing."""

    _WRITES = frozenset(
        {
            "want", "unwant", "update", "note", "charge", "rebook", "resize", "note_enforcement", "release", "forget", "begin",
            "finish", "amend", "keep_retry", "forget_retries",
        }
    )  # fmt: skip

    def __init__(self, ledger: Ledger, machine: SimMachine) -> None:
        self._ledger = ledger
        self._machine = machine
        self._life = machine.life

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ledger, name)
        if name in ("held", "together"):
            return lambda: self._transaction(target)
        if name not in self._WRITES:
            return target

        def around(*args: Any, **kwargs: Any) -> Any:
            machine = self._machine
            machine.effect((lambda: LedgerFull("the disk is full")) if name == "charge" else None)
            if name == "charge" and machine.scheduler.clock < machine.full_until and machine.scheduler.chance.random() < 0.5:
                raise LedgerFull("the disk is full")
            machine.scheduler.check_life(machine.scheduler.current)
            try:
                result = target(*args, **kwargs)
            except Conflict as error:
                if name == "charge":
                    raise machine.scheduler.fail(Violation(f"what was planned has no room: {error.message}")) from error
                raise
            if name == "charge":
                there = {part.id for device in machine.hardware.read_devices() for part in device.layout.partitions}
                gone = {grant.partition_id for one in args for grant in one.grants} - there
                if gone:
                    raise machine.scheduler.fail(Violation(f"charged on {gone}, which is not there"))
            if name == "release" and args[0] in machine.live():
                raise Violation(f"{args[0]} was freed while its process runs")
            machine.effect(None)
            return result

        return around

    @contextmanager
    def _transaction(self, target: Callable[[], Any]) -> Iterator[None]:
        self._machine.scheduler.switch()
        self._machine.scheduler.held += 1
        try:
            with target():
                yield
        finally:
            self._machine.scheduler.held -= 1


class SimLauncher(FakeLauncher):
    _machine: SimMachine

    def start(self, instance_id: str, command: Any, run_directory: Path) -> ProcessIdentity:
        self._machine.effect(lambda: EngineFailed("it could not be started"))
        process = super().start(instance_id, command, run_directory)
        self._machine.effect(lambda: EngineFailed("it started, and the answer was lost"))
        return process

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        self._machine.effect(lambda: EngineFailed("it could not be stopped"))
        super().stop(process, grace_seconds=grace_seconds)
        self._machine.effect(lambda: EngineFailed("it stopped, and the answer was lost"))

    def is_running(self, process: ProcessIdentity) -> bool:
        self._machine.effect(None)
        return super().is_running(process)


class SimEngine(FakeEngine):
    _machine: SimMachine

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        self._machine.effect(lambda: EngineFailed("it answered 500"))
        return super().check_health(run_directory, api_key)


class SimSleeper(FakeSleeper):
    _machine: SimMachine

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        self._machine.effect(lambda: EngineFailed("it answered 500"))
        return super().check_health(run_directory, api_key)

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:
        self._machine.effect(lambda: EngineFailed("it answered 500"))
        super().sleep(run_directory, api_key, deep=deep)
        self._machine.effect(lambda: EngineFailed("it fell asleep, and the answer was lost"))

    def wake(self, run_directory: Path, api_key: str) -> None:
        self._machine.effect(lambda: EngineFailed("it answered 500"))
        super().wake(run_directory, api_key)
        self._machine.effect(lambda: EngineFailed("it woke, and the answer was lost"))


class SimStore(FakeStore):
    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        self._machine.effect(lambda: EngineFailed("it could not be fetched"))
        return super().fetch(model, progress)


class SimHardware:
    """The simulated GPUs; each read and each change is an effect."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine
        self._hardware = machine.hardware

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    def read_devices(self) -> tuple[Device, ...]:
        self._machine.effect(lambda: HardwareFailed("the driver does not answer"))
        return self._hardware.read_devices()

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        self._machine.effect(lambda: HardwareFailed("the driver does not answer"))
        return self._hardware.read_usage()

    def apply_layout(self, device_id: str, layout: str, *, reload_driver: bool = False) -> Device:
        self._machine.effect(lambda: HardwareFailed("the driver refused"))
        device = self._hardware.apply_layout(device_id, layout, reload_driver=reload_driver)
        self._machine.effect(lambda: HardwareFailed("the driver gave up half-way"))
        return device


def fits_awake(controller: Controller, item: Deployment) -> bool:
    """Whether more of it would wake now."""
    prepared = prepare(controller._dependencies, item, ignore, may_fetch=False)
    plan = plan_wake(prepared, controller._placer.read_state(read_gpus(controller._dependencies)))
    return bool(plan.begins) and not plan.refusals


def watch_wakes(controller: Controller, scheduler: Scheduler) -> None:
    """Nothing wakes into the room of one that is more urgent, or asked before it, and still waits."""
    placer, waiting = controller._placer, dict[str, tuple[int, float, float, Prepared]]()  # urgency, since, last asked
    try_to_wake = placer._try_to_wake

    def fits(item: Prepared, reading: Reading) -> bool:
        return not plan_wake(item, placer.read_state(reading)).refusals

    def attempt(item: Prepared, residents: Sequence[Resident], reading: Reading) -> Any:
        now, known = scheduler.clock, waiting.get(item.name)
        since = known[1] if known is not None and now - known[2] < WAITS_SECONDS else now
        mine = (-item.deployment.ask.priority.rank, since, now, item)
        ahead = [
            one for name, one in waiting.items() if name != item.name and one[:2] < mine[:2] and now - one[2] < WAITS_SECONDS
        ]
        ahead = [
            one for one in ahead if controller._ledger.deployment(one[3].name) == one[3].deployment and fits(one[3], reading)
        ]
        found = try_to_wake(item, residents, reading)
        if isinstance(found, NotYet):
            return found
        plan, operation = found
        if plan.refusals:
            waiting[item.name] = mine
        else:
            waiting.pop(item.name, None)
        if operation is not None and ahead:
            first = min(ahead, key=lambda one: one[:2])[3]
            if not fits(first, reading):
                raise scheduler.fail(Violation(f"{item.name} woke into the room of {first.name}, which is ahead of it"))
        return found

    vars(placer)["_try_to_wake"] = attempt


def boot(machine: SimMachine) -> tuple[Controller, Ledger]:
    """A new life of the daemon on this machine."""
    machine.life = Life()
    ledger = Ledger.open(machine.root / "ledger.sqlite3")
    engines: Any = {"llamacpp": SimEngine(machine), "sleeper": SimSleeper(machine)}
    hardware, wrapped, store = SimHardware(machine), SimLedger(ledger, machine), SimStore(machine)
    given: Any = {"hardware": hardware, "ledger": wrapped, "models": store}
    controller = Controller(
        Dependencies(
            **given,
            isolator=MechanismChooser(),
            engines=engines,
            launchers={"process": SimLauncher(machine)},
            size=size_by_name,
            runs=machine.root / "runs",
            node="here",
            timing=TIMING,
            effects=SimEffects(machine.scheduler, machine.life),
        )
    )
    watch_wakes(controller, machine.scheduler)
    return controller, ledger
