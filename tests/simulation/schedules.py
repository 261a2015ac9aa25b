"""A schedule: what users do, what dies and what breaks, all drawn from one seed; and what must hold when it has settled."""

import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.control.world import check_ledger, deployment, resident
from tests.simulation.scheduler import Scheduler
from tests.simulation.world import Fault, SimMachine, Violation, boot, fits_awake

from aimgpu.control.controller import ApplyResult, Controller
from aimgpu.control.events import ignore
from aimgpu.control.waiting import Ends
from aimgpu.domain import Deployment, InstanceState, Priority
from aimgpu.errors import AimGpuError
from aimgpu.ledger import Ledger
from aimgpu.units import GIB

NAMES = [f"m{number}" for number in range(5)]
LAYOUTS = ["SPX/NPS1", "CPX/NPS1", "DPX/NPS1"]
ROUND_SECONDS = 1.0  # of supervision
LOOKS = 60
SETTLE_SECONDS = 150.0  # the longest pause, a load that never ends and a hanging effect, and then some
MOST_WAIT_SECONDS = 200.0  # for an operation after the last fault
_SETTLED = frozenset({InstanceState.READY, InstanceState.SLEEPING})
Act = Callable[[Controller], object]


@dataclass
class Outcome:
    """Of one schedule."""

    seed: int
    steps: int = 0
    trace: int = 0
    log: list[str] = field(default_factory=list)
    problem: str | None = None


def run_schedule(seed: int) -> Outcome:
    """The same for the same seed, in processes with the same PYTHONHASHSEED."""
    outcome = Outcome(seed)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder of its own below it
    folder = Path(tempfile.mkdtemp(prefix="aimgpu-simulation-", dir=base))
    scheduler = Scheduler(seed)
    try:
        scheduler.run(_Schedule(seed, scheduler, folder, outcome.log).play)
    except Exception as error:  # noqa: BLE001 - any of them is a finding
        outcome.problem = f"{type(error).__name__}: {error}"
        outcome.log += traceback.format_exception(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.steps, outcome.trace = scheduler.steps, scheduler.trace
    return outcome


@dataclass(kw_only=True, eq=False)
class _Asked:
    """One request about what is wanted, and what it came to."""

    began: int
    items: dict[str, Deployment | None]  # by name; None: not wanted any more
    ended: int | None = None
    done: bool | None = None  # None: it is not certain what is wanted after it


class _Schedule:
    def __init__(self, seed: int, scheduler: Scheduler, folder: Path, log: list[str]) -> None:
        self._chance = random.Random(f"schedule {seed}")
        self._scheduler = scheduler
        self._machine = SimMachine(root=folder, scheduler=scheduler)
        self._log = log
        self._controller: Controller
        self._ledger: Ledger
        self._under_way = 0
        self._reconciled = False
        self._asked: list[_Asked] = []

    def play(self) -> None:
        self._boot()
        for _ in range(self._chance.randint(5, 40)):
            self._pause(self._chance.choice([0.0, 0.0, 0.0, 0.2, 1.0, 5.0, 20.0]))
            self._revive()
            self._act()
        for _ in range(self._chance.randint(0, 3)):
            self._kill()
        self._settle()
        self._check()
        self._scheduler.end(self._machine.life)
        self._scheduler.wait_for_end(self._machine.life)
        self._ledger.close()

    # --- what happens ---

    def _act(self) -> None:
        act = self._chance.choices(
            [self._apply, self._release, self._sleep, self._wake, self._resize, self._partition, self._kill, self._break,
             self._crash, self._set_clock, self._restart, self._behave, self._fill_disk],
            [10, 4, 3, 4, 2, 3, 6, 5, 1, 1, 1, 2, 1],
        )[0]  # fmt: skip
        act()

    def _apply(self) -> None:
        chance = self._chance
        items = [self._random_item(name) for name in chance.sample(NAMES, chance.choice([1, 1, 2, 3]))]
        make_room, prune = chance.random() < 0.3, chance.random() < 0.15
        what = f"apply {[(one.name, one.model, one.replicas, one.keep_seconds) for one in items]} {make_room=} {prune=}"
        asked = _Asked(
            began=self._scheduler.steps, items={name: None for name in NAMES if prune} | {one.name: one for one in items}
        )

        def apply(controller: Controller) -> None:
            self._ask(asked, lambda: controller.apply(items, make_room=make_room, prune=prune))

        self._do(what, apply)

    def _random_item(self, name: str) -> Deployment:
        chance = self._chance
        item = deployment(
            name,
            chance.choice([1, 20, 60, 100]),
            replicas=chance.choice([1, 1, 1, 2, 3]),
            keep_seconds=chance.choice([None, 60]),
            engine=chance.choice([None, "sleeper"]),
        )
        return replace(item, ask=replace(item.ask, priority=chance.choice(list(Priority))))

    def _release(self) -> None:
        names = None if self._chance.random() < 0.1 else [self._chance.choice(NAMES)]
        asked = _Asked(began=self._scheduler.steps, items=dict.fromkeys(names or NAMES))

        def release(controller: Controller) -> None:
            self._ask(asked, lambda: controller.release(names))

        self._do(f"release {names}", release)

    def _ask(self, asked: _Asked, act: Callable[[], ApplyResult | None]) -> None:
        """Noted with what it came to, also where the daemon dies in the middle of it."""
        asked.began = self._scheduler.steps
        self._asked.append(asked)
        try:
            result = act()
            asked.done = result is None or not result.plan.refusals
        finally:
            asked.ended = self._scheduler.steps

    def _sleep(self) -> None:
        name = self._chance.choice(NAMES)
        self._do(f"sleep {name}", lambda controller: controller.sleep(name))

    def _wake(self) -> None:
        for name in self._chance.sample(NAMES, self._chance.choice([1, 1, 3])):
            self._wake_one(name)

    def _wake_one(self, name: str) -> None:
        others = self._chance.sample(NAMES, 2)
        tries = self._chance.choice([1, 1, 10])  # a caller that waits asks again

        def wake(controller: Controller) -> None:
            for _ in range(tries):
                if not controller.wake(name, [resident(one) for one in others]).plan.refusals:
                    return
                self._pause(ROUND_SECONDS)

        self._do(f"wake {name} {others} {tries=}", wake)

    def _resize(self) -> None:
        name, gib = self._chance.choice(NAMES), self._chance.randint(1, 120)
        self._do(f"resize {name} {gib}", lambda controller: controller.resize(name, gib * GIB))

    def _partition(self) -> None:
        device, layout = self._chance.choice(["0", "1"]), self._chance.choice(LAYOUTS)
        self._do(f"partition {device} {layout}", lambda controller: controller.change_layout(device, layout))

    def _restart(self) -> None:
        found = self._controller.instances()
        if found:
            one = self._chance.choice(sorted(found, key=lambda each: each.id))
            self._do(f"restart {one.id}", lambda controller: controller.stop_instance(one.id, restart=True))

    def _kill(self) -> None:
        live = [process for process in self._machine.processes if process.alive]
        for killed in self._chance.sample(live, min(len(live), self._chance.choice([1, 1, 1, 4]))):
            killed.alive = False
            self._log.append(f"{self._now()} kill {killed.instance_id}")

    def _fill_disk(self) -> None:
        seconds = self._chance.choice([1.0, 5.0, 20.0])
        self._machine.full_until = self._scheduler.clock + seconds
        self._log.append(f"{self._now()} the disk is full for {seconds:g} s")

    def _behave(self) -> None:
        name = self._chance.choice(NAMES)
        how = self._chance.choice(["dies", "never", "broken", "cannot-sleep", "cannot-wake", "dies-when-asked", "ready"])
        self._machine.behaviours[name] = how
        self._log.append(f"{self._now()} {name} {how}")

    def _break(self) -> None:
        fault = Fault(in_effects=self._chance.randint(1, 60), kind=self._chance.choice(["fail", "fail", "hang", "crash"]))
        self._machine.faults.append(fault)
        self._log.append(f"{self._now()} {fault}")

    def _crash(self) -> None:
        """Sometimes with some of the engines, and on a disk that stays full for the next daemon's start."""
        if self._chance.random() < 0.3:
            self._kill()
            self._fill_disk()
        self._log.append(f"{self._now()} crash")
        self._scheduler.end(self._machine.life)

    def _set_clock(self) -> None:
        self._scheduler.wall_offset += self._chance.choice([-3600.0, -30.0, 30.0, 3600.0])
        self._log.append(f"{self._now()} wall clock {self._scheduler.wall_offset:+g}")

    # --- the daemon ---

    def _boot(self) -> None:
        self._controller, self._ledger = boot(self._machine)
        controller, life = self._controller, self._machine.life
        self._log.append(f"{self._now()} boot")
        self._under_way = 0
        self._reconciled = False
        self._scheduler.spawn(lambda: self._supervise(controller), "supervision", life)

    def _revive(self) -> None:
        if not self._machine.life.dead:
            return
        self._scheduler.wait_for_end(self._machine.life)
        self._ledger.close()
        self._boot()

    def _supervise(self, controller: Controller) -> None:
        with suppress(AimGpuError):  # as the daemon: it is logged, and what comes next repairs
            controller.reconcile(wait=False)
        self._reconciled = True
        while True:
            self._pause(max(0.1, min(ROUND_SECONDS, controller.next_retry_seconds())))
            with suppress(AimGpuError):
                controller.supervise(emit=ignore)

    def _do(self, what: str, act: Act) -> None:
        controller = self._controller
        self._log.append(f"{self._now()} {what}")

        def work() -> None:
            self._under_way += 1
            life = self._machine.life
            try:
                self._scheduler.block(lambda: self._reconciled)  # as commands wait for it
                act(controller)
            except AimGpuError as error:
                self._log.append(f"{self._now()}   {what.split(' [', maxsplit=1)[0]}: {error.message[:150]}")
            finally:
                if not life.dead:
                    self._under_way -= 1

        self._scheduler.spawn(work, what.partition(" [")[0], self._machine.life)

    # --- afterwards ---

    def _settle(self) -> None:
        """Nothing breaks any more; what hangs ends, and pauses pass."""
        self._machine.faults.clear()
        self._machine.full_until = 0.0
        self._machine.behaviours.clear()
        for process in self._machine.processes:
            if process.behaviour in ("never", "broken", "dies-when-asked", "cannot-sleep", "cannot-wake"):
                process.behaviour = "ready"
        self._revive()
        self._log.append(f"{self._now()} settles")
        deadline = self._scheduler.clock + MOST_WAIT_SECONDS
        if not self._scheduler.block(lambda: not self._under_way, deadline):
            raise Violation(f"an operation does not end: {self._scheduler.left(self._machine.life)}")
        self._pause(SETTLE_SECONDS)
        left = [name for name in self._scheduler.left(self._machine.life) if name not in ("supervision", "loop")]
        if left:
            self._pause(SETTLE_SECONDS)  # a try for room that is under way now is none that hangs

    def _check(self) -> None:
        controller, ledger = self._controller, self._ledger
        try:
            check_ledger(self._machine, _Unwrapped(controller, ledger))  # type: ignore[arg-type]
        except AssertionError as error:
            raise Violation(f"ledger and machine differ: {error}; {_show(controller)}") from error
        if ledger.operations():
            raise Violation(f"operations stay open: {ledger.operations()}")
        for item in controller.deployments():
            self._check_wanted(item)
            self._check_half_asleep(item)
        self._check_asked()
        self._check_nothing_is_kept()

    def _check_half_asleep(self, item: Deployment) -> None:
        """A replica beside one that is ready sleeps only where it has no room."""
        for _ in range(LOOKS):
            states = {one.state for one in self._controller.instances() if one.deployment == item.name}
            if not {InstanceState.READY, InstanceState.SLEEPING} <= states or not fits_awake(self._controller, item):
                return
            self._pause(ROUND_SECONDS)
        raise Violation(f"{item.name} sleeps beside room: {_show(self._controller)}")

    def _check_asked(self) -> None:
        """The last request about a name that met no other one holds."""
        for name in NAMES:
            asked = [one for one in self._asked if name in one.items and one.done is not False]
            last = max(asked, key=lambda one: one.began, default=None)
            if (
                last is None
                or last.done is None
                or any(one.ended is None or one.ended > last.began for one in asked if one is not last)
            ):
                continue
            wanted, found = last.items[name], self._ledger.deployment(name)
            if replace(found, resized_bytes=None) != wanted if found and wanted else found != wanted:
                raise Violation(f"{name} was to be {wanted}, and is {found}")

    def _check_nothing_is_kept(self) -> None:
        """What operations reserve, claim and block ends with them; a try for room may be under way just now."""
        for _ in range(LOOKS):
            kept = {key: value for key, value in vars(self._controller._reservations).items() if key != "_loop" and value}
            if not (kept or self._controller._applier.is_busy or self._controller._loop._placings):
                return
            self._pause(0.37 * ROUND_SECONDS)
        raise Violation(f"kept after all operations ended: {kept}, {self._controller._loop._placings}")

    def _check_wanted(self, item: Deployment) -> None:
        """Each replica is ready, asleep, or waits for something that comes."""
        mine = [one for one in self._controller.instances() if one.deployment == item.name]
        settled = {one.replica for one in mine if one.state in _SETTLED}
        missing = [replica for replica in range(item.replicas) if replica not in settled]
        retry = self._controller.waiting_for(item.name)
        gave_up = retry is not None and retry.exhausted  # then what served before serves on beside what failed
        under_way = [one.id for one in mine if one.state not in (*_SETTLED, InstanceState.FAILED)]
        twice = len({one.replica for one in mine}) < len(mine) or any(one.replica >= item.replicas for one in mine)
        if under_way or (twice and not gave_up):
            raise Violation(f"{item.name} has what it should not: {_show(self._controller)}")
        waits = self._read_waits(item)
        if missing and (not waits or waits[0] in (Ends.LOOK, Ends.OPERATION)):
            raise Violation(f"{item.name} misses {missing} and waits for {waits} long after: {_show(self._controller)}")
        if missing and retry is not None and not retry.exhausted and self._fits(item):
            raise Violation(f"{item.name} misses {missing} although it fits, {retry}: {_show(self._controller)}")

    def _read_waits(self, item: Deployment) -> list[Ends]:
        """It may be tried just now; a try that finds no room ends soon."""
        waits: list[Ends] = []
        for _ in range(LOOKS):
            waits = [wait.ends_on for wait in self._controller.waits() if wait.deployment == item]
            if Ends.OPERATION not in waits:
                break
            self._pause(ROUND_SECONDS)
        return waits

    def _fits(self, item: Deployment) -> bool:
        with suppress(AimGpuError):
            plan = self._controller.apply([item], dry_run=True).plan
            return not plan.refusals and not plan.queued
        return False

    def _pause(self, seconds: float) -> None:
        self._scheduler.block(None, self._scheduler.clock + seconds)

    def _now(self) -> str:
        return f"{self._scheduler.clock - 1000:7.1f}"


class _Unwrapped:
    """As `check_ledger` wants it, read past the effects."""

    def __init__(self, controller: Controller, ledger: Ledger) -> None:
        self._controller = controller
        self._dependencies = self
        self.ledger = ledger

    def devices(self) -> Sequence[object]:
        return self._controller.devices()


def _show(controller: Controller) -> str:
    return "; ".join(
        f"{one.id} {one.state.value} {sum(grant.memory_bytes for grant in one.grants) // GIB}GiB ({one.reason})"
        for one in controller.instances()
    )
