"""Random deploy, release, resize, crash, restart and partition, with one GPU and with two: the ledger equals the truth."""

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.control.world import Crashed, Machine, boot, check_ledger, deployment, memory, resident
from tests.examples import examples

from aimgpu.domain import Deployment, Fraction, PartitionKind, Priority, Want, Whole
from aimgpu.errors import AimGpuError

NAMES = st.sampled_from(["a", "b", "c", "d"])
BEHAVIOURS = st.sampled_from(
    ["ready", "ready", "ready", "ready", "never", "dies", "broken", "cannot-sleep", "cannot-wake", "sleeps-for-ever"]
)
GIBS = st.sampled_from([1, 10, 20, 60, 100, 190, 300])
WANTS: st.SearchStrategy[Want | None] = st.sampled_from(
    [
        None,
        memory(24),
        memory(100),
        Fraction(ppm=500_000),
        Fraction(ppm=250_000),
        PartitionKind(kind="cpx"),
        Whole(),
        Whole(count=2),
    ]
)
ITEMS = st.builds(
    deployment,
    st.just("unnamed"),
    GIBS,
    want=WANTS,
    replicas=st.integers(1, 2),
    keep_seconds=st.sampled_from([None, 60, 60]),
    engine=st.sampled_from([None, "sleeper", "sleeper"]),
)
LAYOUTS = st.sampled_from(["SPX/NPS1", "CPX/NPS1", "DPX/NPS1", "QPX/NPS1", "CPX/NPS4", "nonsense"])
CRASH = st.none() | st.integers(min_value=0, max_value=25)


class Accounting(RuleBasedStateMachine):
    gpus = 2

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.machine = Machine(root=self.root, gpus=self.gpus)
        self.controller = boot(self.machine)
        self.acknowledged: dict[str, Deployment] = {}  # wanted for certain
        self.uncertain: set[str] = set()  # the crash came while this one was changed

    @rule(name=NAMES, item=ITEMS, behaviour=BEHAVIOURS, crash_in=CRASH)
    def deploy(self, name: str, item: Deployment, behaviour: str, crash_in: int | None) -> None:
        """Also resizes, when the name runs already."""
        self.machine.behaviours[name] = behaviour
        item = replace(item, name=name, ask=replace(item.ask, name=name))
        with self.maybe_crashing(crash_in, name):
            if not self.controller.apply([item]).plan.refusals:
                self.acknowledged[name] = item
                self.uncertain.discard(name)

    @rule(name=NAMES, item=ITEMS, priority=st.sampled_from(Priority), crash_in=CRASH)
    def deploy_making_room(self, name: str, item: Deployment, priority: Priority, crash_in: int | None) -> None:
        item = replace(item, name=name, ask=replace(item.ask, name=name, priority=priority))
        with self.maybe_crashing(crash_in, name):
            if not self.controller.apply([item], make_room=True).plan.refusals:
                self.acknowledged[name] = item
                self.uncertain.discard(name)

    @rule(name=NAMES, crash_in=CRASH)
    def release(self, name: str, crash_in: int | None) -> None:
        with self.maybe_crashing(crash_in, name), contextlib.suppress(AimGpuError):
            self.controller.release([name])
            self.acknowledged.pop(name, None)
            self.uncertain.discard(name)

    @rule(device=st.sampled_from(["0", "1", "9"]), layout=LAYOUTS, reload=st.booleans(), crash_in=CRASH)
    def partition(self, device: str, layout: str, reload: bool, crash_in: int | None) -> None:  # noqa: FBT001
        with self.maybe_crashing(crash_in, None), contextlib.suppress(AimGpuError):
            self.controller.change_layout(device, layout, reload_driver=reload)

    @rule(name=NAMES, crash_in=CRASH)
    def fall_asleep(self, name: str, crash_in: int | None) -> None:
        with self.maybe_crashing(crash_in, None):
            self.controller.sleep(name)

    @rule(name=NAMES, victims=st.lists(NAMES, max_size=3), crash_in=CRASH)
    def wake_up(self, name: str, victims: list[str], crash_in: int | None) -> None:
        with self.maybe_crashing(crash_in, None), contextlib.suppress(AimGpuError):
            self.controller.wake(name, [resident(victim) for victim in victims])

    @rule(name=NAMES)
    def an_engine_dies(self, name: str) -> None:
        for instance_id, process in self.machine.live().items():
            if instance_id.startswith(f"{name}-"):
                process.alive = False
        self.controller.supervise(wait=True)

    @rule(name=NAMES, asleep=st.booleans())
    def somebody_else_changes_an_engine(self, name: str, asleep: bool) -> None:  # noqa: FBT001
        """Whoever reaches it on loopback can: the next look makes it what the books say."""
        for instance in self.controller.instances():
            process = self.machine.live().get(instance.id)
            if instance.deployment == name and process is not None and instance.sleep_footprint is not None:
                process.asleep = asleep
        self.controller.supervise(wait=True)

    @rule()
    def restart(self) -> None:
        self.controller.close()
        self.start_again()

    @invariant()
    def the_ledger_equals_the_truth(self) -> None:
        check_ledger(self.machine, self.controller)
        names = {item.name for item in self.controller.deployments()}
        assert set(self.acknowledged) - self.uncertain <= names, "nothing acknowledged was lost"
        assert names <= set(self.acknowledged) | self.uncertain, "nothing released came back"

    def teardown(self) -> None:
        self.machine.behaviours.clear()
        self.controller.release()
        check_ledger(self.machine, self.controller, names=[])
        assert self.machine.live() == {}
        self.controller.close()
        shutil.rmtree(self.root)

    def maybe_crashing(self, crash_in: int | None, name: str | None) -> "contextlib.AbstractContextManager[None]":
        return _Crashing(self, crash_in, name)

    def start_again(self) -> None:
        self.machine.crash_in = None
        self.controller = boot(self.machine)
        self.controller.reconcile()


class _Crashing(contextlib.AbstractContextManager[None]):
    """Lets the controller's process die inside, then starts a new one, which repairs."""

    def __init__(self, accounting: Accounting, crash_in: int | None, name: str | None) -> None:
        self._accounting, self._crash_in, self._name = accounting, crash_in, name

    def __enter__(self) -> None:
        self._accounting.machine.crash_in = self._crash_in

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Crashed):
            self._accounting.machine.crash_in = None
            return False
        if self._name is not None:
            self._accounting.uncertain.add(self._name)
            self._accounting.acknowledged.pop(self._name, None)
        stale = self._accounting.controller
        with contextlib.suppress(Crashed):  # its threads die too: every side effect they try raises
            stale.close()
        self._accounting.start_again()
        return True


class AccountingOnOneGpu(Accounting):
    gpus = 1


TestAccounting = Accounting.TestCase
TestAccountingOnOneGpu = AccountingOnOneGpu.TestCase
for case in (TestAccounting, TestAccountingOnOneGpu):
    case.settings = settings(max_examples=examples(40), stateful_step_count=15)
