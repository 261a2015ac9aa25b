"""Every operation with each of its effects failing, one at a time: nothing is half-done, and the ledger equals the truth."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.control.faults import Faults, boot_failing
from tests.control.world import Machine, boot, check_ledger, deployment, resident

from aimgpu.control import controller as control
from aimgpu.control.controller import Controller
from aimgpu.domain import Deployment, InstanceState, Priority
from aimgpu.errors import AimGpuError

GPU = "sim-mi300x-0"


def ranked(item: Deployment, priority: Priority) -> Deployment:
    return replace(item, ask=replace(item.ask, priority=priority))


@dataclass(frozen=True)
class Scenario:
    """What runs first, and the operation that meets a fault."""

    before: tuple[Deployment, ...]
    act: Callable[[Controller], object]
    asleep: tuple[str, ...] = ()  # put to sleep before


def stop_first(controller: Controller) -> None:
    controller.stop_instance(controller.instances()[0].id, restart=True)


CHAT, SLEEPER = deployment("chat", 10), deployment("nap", 20, keep_seconds=60, engine="sleeper")
SCENARIOS = {
    "deploy two": Scenario((), lambda it: it.apply([CHAT, deployment("code", 20, replicas=2)])),
    "replace beside the old one": Scenario((CHAT,), lambda it: it.apply([deployment("chat", 20)])),
    "replace after the old one": Scenario((deployment("chat", 120),), lambda it: it.apply([deployment("chat", 130)])),
    "prune": Scenario((CHAT, deployment("old", 5)), lambda it: it.apply([CHAT], prune=True)),
    "make room": Scenario(
        (ranked(deployment("batch", 150), Priority.LOW),),
        lambda it: it.apply([ranked(deployment("urgent", 150), Priority.HIGH)], make_room=True),
    ),
    "release": Scenario((CHAT, deployment("code", 20)), lambda it: it.release(["chat"])),
    "sleep in place": Scenario((SLEEPER,), lambda it: it.sleep("nap")),
    "sleep by stopping": Scenario((deployment("chat", 10, keep_seconds=60),), lambda it: it.sleep("chat")),
    "wake in place": Scenario((SLEEPER,), lambda it: it.wake("nap"), asleep=("nap",)),
    "wake and unload another": Scenario(
        (deployment("nap", 120, keep_seconds=60), deployment("chat", 120, keep_seconds=60)),
        lambda it: it.wake("nap", [resident("chat")]),
        asleep=("nap",),
    ),
    "change the layout": Scenario((CHAT,), lambda it: it.change_layout(GPU, "CPX")),
    "stop one and start it again": Scenario((CHAT,), stop_first),
}


# Those whose writes are not a part of another's.
LARGER = (
    "deploy two",
    "replace after the old one",
    "make room",
    "sleep in place",
    "wake and unload another",
    "change the layout",
)


@contextlib.contextmanager
def world_of(scenario: Scenario, root: Path, faults: Faults) -> Iterator[tuple[Machine, Controller]]:
    """One GPU, what ran before, and the faults armed."""
    root.mkdir()
    machine = Machine(root=root, gpus=1)
    controller = boot_failing(machine, faults)
    for item in scenario.before:
        if item.name not in scenario.asleep:
            continue
        controller.apply([item])
        assert controller.sleep(item.name)
    controller.apply([item for item in scenario.before if item.name not in scenario.asleep])
    faults.armed = True
    try:
        yield machine, controller
    finally:
        faults.armed = False
        with contextlib.suppress(AimGpuError):
            controller.close()


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of each operation, where nothing fails."""
    found = {}
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        faults = Faults()
        with world_of(scenario, tmp_path_factory.mktemp("whole") / str(number), faults) as (_, controller):
            scenario.act(controller)
        found[name] = faults.sites
    return found


def first_of_each(sites: list[str]) -> list[int]:
    """The first effect of each kind: later ones differ in nothing but the replica."""
    return sorted({site: number for number, site in reversed(list(enumerate(sites)))}.values())


def runs(controller: Controller) -> dict[str, str]:
    return {one.deployment: one.state.value for one in controller.instances()}


def settle(controller: Controller) -> None:
    """As the daemon does once a second: two looks that find the same, and one that sees what came of it."""
    for _ in range(4):
        controller.supervise(wait=True)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_DIVERGED_SECONDS", 0.0)


@pytest.mark.parametrize("name", LARGER)
def test_where_a_write_of_the_ledger_fails_the_next_daemon_makes_ledger_and_machine_agree(
    name: str, effects: dict[str, list[str]], tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    sites = effects[name]
    writes = [number for number in first_of_each(sites) if sites[number].startswith("ledger.")]
    assert writes
    for number in writes:
        faults, site = Faults(fails_at=number), sites[number]
        with world_of(scenario, tmp_path / str(number), faults) as (machine, controller):
            with contextlib.suppress(AimGpuError):
                scenario.act(controller)
            assert faults.struck, site
        again = boot(machine)
        again.reconcile()
        check_ledger(machine, again)
        assert again._dependencies.ledger.operations() == (), site
        assert {one.deployment for one in again.instances()} <= {item.name for item in again.deployments()}, site
        again.release()
        check_ledger(machine, again, names=[])
        again.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_of_the_machine_is_settled_by_the_same_daemon(name: str, effects: dict[str, list[str]], tmp_path: Path) -> None:
    """A start, a stop, a sleep or a layout that fails, with a ledger that can be written."""
    scenario = SCENARIOS[name]
    sites = effects[name]
    for number in first_of_each(sites):
        faults, site = Faults(fails_at=number), sites[number]
        if site.startswith("ledger."):
            continue
        with world_of(scenario, tmp_path / str(number), faults) as (machine, controller):
            with contextlib.suppress(AimGpuError):
                scenario.act(controller)
            faults.armed = False
            settle(controller)
            check_ledger(machine, controller)
            assert controller._dependencies.ledger.operations() == (), site
            assert "draining" not in runs(controller).values(), site
            controller.release()
            controller.change_layout(GPU, "SPX")
            assert not controller.apply([deployment("all", 190)]).plan.refusals, f"{site}: everything was given back"


@pytest.mark.parametrize(
    "name", ["deploy two", "replace beside the old one", "replace after the old one", "make room", "prune"]
)
def test_a_stack_that_cannot_be_recorded_is_refused_whole(name: str, effects: dict[str, list[str]], tmp_path: Path) -> None:
    """Up to the charge nothing was done: the same models are wanted and serve as before."""
    scenario = SCENARIOS[name]
    sites = effects[name]
    before_effects = next(number for number, site in enumerate(sites) if not site.startswith("ledger."))
    for number, site in enumerate(sites[: min(before_effects, 3)]):
        faults = Faults(fails_at=number)
        with world_of(scenario, tmp_path / str(number), faults) as (machine, controller):
            wanted, running = set(controller.deployments()), runs(controller)
            live = set(machine.live())
            with pytest.raises(AimGpuError, match="as told"):
                scenario.act(controller)
            assert set(controller.deployments()) == wanted, site
            assert runs(controller) == running, site
            assert set(machine.live()) == live, site
            faults.armed = False
            check_ledger(machine, controller)


def test_what_failed_once_works_when_it_is_tried_again(tmp_path: Path) -> None:
    """No reservation, claim or lock is left behind by a fault."""
    for name, scenario in SCENARIOS.items():
        faults = Faults(fails_at=0)
        with world_of(scenario, tmp_path / name.replace(" ", "-"), faults) as (machine, controller):
            with contextlib.suppress(AimGpuError):
                scenario.act(controller)
            faults.armed = False
            scenario.act(controller)
            check_ledger(machine, controller)
            failed = [one.id for one in controller.instances() if one.state is InstanceState.FAILED]
            assert failed == [], name
