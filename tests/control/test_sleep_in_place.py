"""What the books do while an engine sleeps in place."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import Machine, boot, check_ledger, deployment, resident, size_by_name

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.plan.asleep import sleep_footprint_of
from aimgpu.control.plan.steps import StepKind
from aimgpu.domain import (
    Deployment,
    Device,
    DeviceUsage,
    ForeignProcess,
    Grant,
    Instance,
    InstanceState,
    Partition,
    Priority,
    SleepFootprint,
    Whole,
)
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.errors import ShareInUse
from aimgpu.hardware.protocols import Hardware
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.protocols import Enforcement
from aimgpu.units import GIB


def sleeper(name: str, gib: int = 150, **given: object) -> Deployment:
    return deployment(name, gib, keep_seconds=60, engine="sleeper", **given)  # type: ignore[arg-type]


def of(controller: Controller, name: str) -> Instance:
    return next(instance for instance in controller.instances() if instance.deployment == name)


def held(controller: Controller, name: str) -> list[int]:
    return [grant.memory_bytes // GIB for grant in of(controller, name).grants]


def test_it_gives_back_what_it_frees_and_wakes_as_the_same_process(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("chat")])
    before = of(controller, "chat")
    assert before.sleep_footprint == SleepFootprint(device_bytes=GIB)
    assert controller.sleep("chat")
    asleep = of(controller, "chat")
    assert (asleep.state, asleep.process, held(controller, "chat")) == (InstanceState.SLEEPING, before.process, [1])
    check_ledger(machine, controller, names=["chat"])
    outcome = controller.wake("chat")
    assert [step.kind for step in outcome.plan.steps] == [StepKind.WAKE]
    awake = of(controller, "chat")
    assert awake.wake_ms is not None
    assert replace(awake, wake_ms=None) == before
    check_ledger(machine, controller, names=["chat"])


def test_its_memory_goes_to_others_and_a_wake_in_vain_changes_nothing(machine: Machine, controller: Controller) -> None:
    for name in ("a", "b"):
        controller.apply([sleeper(name)])
        controller.sleep(name)
    controller.apply([deployment("x", 180), deployment("y", 180)])
    assert [of(controller, name).state.value for name in ("x", "y")] == ["ready", "ready"]
    check_ledger(machine, controller)
    assert controller.wake("a").plan.refusals
    assert (of(controller, "a").state, held(controller, "a")) == (InstanceState.SLEEPING, [1])
    controller.release(["x"])
    assert not controller.wake("a").plan.refusals
    assert held(controller, "a") == [150]
    check_ledger(machine, controller, names=["a", "b", "y"])


def test_it_wakes_elsewhere_before_anyone_is_unloaded_for_it(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("a")])
    place = of(controller, "a").grants[0].device_id
    controller.sleep("a")
    controller.apply([sleeper("b", 180)])
    assert of(controller, "b").grants[0].device_id == place, "beside the sleeper, where it leaves the least"
    outcome = controller.wake("a", [resident("b")])
    assert [step.kind for step in outcome.plan.steps] == [StepKind.RELEASE, StepKind.DEPLOY]
    assert of(controller, "a").grants[0].device_id != place
    assert of(controller, "b").state is InstanceState.READY
    check_ledger(machine, controller, names=["a", "b"])


def test_who_is_unloaded_for_it_sleeps_in_place_too(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("a"), sleeper("b"), sleeper("c")])
    assert of(controller, "c").state is InstanceState.SLEEPING
    controller.wake("c", [resident("a", expected_seconds=10.0), resident("b")])
    assert {i.deployment: i.sleeps_in_place for i in controller.instances()} == {"a": False, "b": True, "c": False}
    controller.wake("b", [resident("a", expected_seconds=10.0), resident("c")])
    assert {i.deployment: i.sleeps_in_place for i in controller.instances()} == {"a": False, "b": False, "c": True}
    check_ledger(machine, controller, names=["a", "b", "c"])


def test_what_a_sleeper_still_holds_is_taken_where_it_is_needed_and_it_sleeps_on(
    machine: Machine, controller: Controller
) -> None:
    for name in ("a", "b"):
        controller.apply([sleeper(name)])
        controller.sleep(name)
    everything = [deployment("x", want=Whole(), gib=10), deployment("y", want=Whole(), gib=10)]
    shown = controller.apply(everything, dry_run=True).plan
    assert [step.kind for step in shown.steps] == [StepKind.UNLOAD, StepKind.UNLOAD, StepKind.DEPLOY, StepKind.DEPLOY]
    assert of(controller, "a").process is not None, "nothing happens in a dry run"
    controller.apply(everything)
    assert {i.deployment: (i.state.value, bool(i.process)) for i in controller.instances()} == {
        "a": ("sleeping", False),
        "b": ("sleeping", False),
        "x": ("ready", True),
        "y": ("ready", True),
    }
    check_ledger(machine, controller, names=["a", "b", "x", "y"])
    controller.release(["x"])
    assert not controller.wake("a").plan.refusals
    check_ledger(machine, controller)


def test_only_as_many_sleepers_are_stopped_as_needed_those_of_low_priority_first(
    machine: Machine, controller: Controller
) -> None:
    low, high = sleeper("low"), sleeper("high")
    low, high = (
        replace(low, ask=replace(low.ask, priority=Priority.LOW)),
        replace(high, ask=replace(high.ask, priority=Priority.HIGH)),
    )
    controller.apply([low, high])
    assert controller.sleep("low")
    assert controller.sleep("high")
    controller.apply([deployment("x", want=Whole(), gib=10)])
    assert {i.deployment: i.sleeps_in_place for i in controller.instances()} == {"low": False, "high": True, "x": False}


def test_making_room_stops_sleepers_where_nothing_else_helps(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("a")])
    controller.sleep("a")
    controller.apply([deployment("x", want=Whole(count=2), gib=10)], make_room=True)
    assert {i.deployment: (i.state.value, bool(i.process)) for i in controller.instances()} == {
        "a": ("sleeping", False),
        "x": ("ready", True),
    }
    check_ledger(machine, controller)


def test_a_layout_change_stops_a_sleeper_and_it_sleeps_on(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("a", 10)])
    controller.sleep("a")
    controller.change_layout(of(controller, "a").grants[0].device_id, "CPX/NPS1")
    assert (of(controller, "a").state, of(controller, "a").grants) == (InstanceState.SLEEPING, ())
    check_ledger(machine, controller, names=["a"])
    assert not controller.wake("a").plan.refusals


def test_a_partition_of_its_own_stays_its_own_in_its_sleep(machine: Machine, controller: Controller) -> None:
    controller.apply([sleeper("a", 10, want=Whole())])
    before = of(controller, "a").grants
    controller.sleep("a")
    assert of(controller, "a").grants == before
    assert before[0].exclusive
    assert not controller.wake("a").plan.refusals
    check_ledger(machine, controller, names=["a"])


def test_its_compute_is_free_for_others_in_its_sleep_and_counts_again_to_wake(machine: Machine, controller: Controller) -> None:
    def with_compute(item: Deployment) -> Deployment:
        return replace(item, ask=replace(item.ask, compute_ppm=600_000))

    controller.apply([with_compute(sleeper("a", 10)), with_compute(sleeper("b", 10))])
    controller.sleep("a")
    place = of(controller, "a").grants[0].partition_id
    controller.apply([with_compute(deployment("x", 10, keep_seconds=60))])
    assert of(controller, "x").grants[0].partition_id == place
    assert controller.wake("a").plan.refusals, "60 % and 60 % are more than there is"
    controller.release(["x"])
    controller.wake("a")
    assert [grant.compute_ppm for grant in of(controller, "a").grants] == [600_000]


def test_one_that_is_kept_always_or_told_to_stop_never_sleeps_in_place() -> None:
    engine = VllmEngine()
    footprint = size_by_name(deployment("chat", 10), "vllm", None, "amd")
    kept = deployment("chat", keep_seconds=60)
    assert sleep_footprint_of(engine, kept, footprint) == SleepFootprint(device_bytes=GIB, host_bytes=9 * GIB)
    assert sleep_footprint_of(engine, replace(kept, keep_seconds=None), footprint) is None
    assert sleep_footprint_of(engine, replace(kept, sleeps_in_place=False), footprint) is None
    assert sleep_footprint_of(OllamaEngine(), kept, footprint) == SleepFootprint(device_bytes=1 << 20), (
        "its runner ends; the server stays"
    )


def test_an_engine_that_cannot_sleep_here_is_stopped_instead_and_the_plan_gives_the_reason(
    machine: Machine, controller: Controller
) -> None:
    machine.no_sleep = "it has no sleep mode on the CPU"
    texts: list[str] = []
    controller.apply([sleeper("a")], emit=lambda event: texts.append(event.text))
    assert "a: it has no sleep mode on the CPU: when it is idle it is stopped, and a request starts it again" in texts
    assert of(controller, "a").sleep_footprint is None
    assert controller.sleep("a")
    assert (of(controller, "a").process, held(controller, "a")) == (None, [])
    controller.wake("a")
    assert of(controller, "a").state is InstanceState.READY
    texts.clear()
    controller.apply([deployment("b", engine="sleeper")], emit=lambda event: texts.append(event.text))
    assert not any("sleep mode" in text for text in texts), "one that is always kept is not asked"


def test_a_restart_adopts_a_sleeper_and_lost_books_are_written_anew_with_it(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    first = boot(machine)
    first.apply([sleeper("a")])
    first.sleep("a")
    first.apply([deployment("x", 180)])
    before = {i.deployment: (i.state, i.process, i.grants) for i in first.instances()}
    first.close()
    (tmp_path / "ledger.sqlite3").write_bytes(b"\0" * 100_000)
    second = boot(machine)
    second.reconcile()
    assert second._dependencies.ledger.set_aside is not None
    assert {i.deployment: (i.state, i.process, i.grants) for i in second.instances()} == before
    check_ledger(machine, second, names=["a", "x"])
    second.close()


class Measured:
    """Hardware on which the processes of `holding` are seen to hold so much."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.holding: dict[int, int] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._hardware, name)

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        seen = tuple(
            ForeignProcess(pid=pid, name="vllm", memory_bytes=size, partition_id=None) for pid, size in self.holding.items()
        )
        return tuple(replace(usage, processes=seen) for usage in self._hardware.read_usage()[:1])


def with_parts(controller: Controller, **parts: object) -> Controller:
    """Another controller on the same machine and books."""
    given: dict[str, object] = {name: getattr(controller._dependencies, name) for name in Dependencies.__dataclass_fields__}
    return Controller(Dependencies(**{**given, **parts}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("seen_gib", "booked"), [(0, [1]), (5, [5]), (100, [])])
def test_what_is_measured_counts_where_it_is_more_and_one_that_frees_too_little_is_stopped(
    machine: Machine, controller: Controller, seen_gib: int, booked: list[int]
) -> None:
    measured = Measured(machine.hardware)
    watched = with_parts(controller, hardware=measured)
    watched.apply([sleeper("a")])
    process = of(watched, "a").process
    assert process is not None
    measured.holding = {process.pid: seen_gib * GIB}
    watched.sleep("a")
    assert held(watched, "a") == booked
    assert of(watched, "a").state is InstanceState.SLEEPING
    assert bool(of(watched, "a").process) == bool(booked)


class CappedIsolator(MechanismChooser):
    """Remembers every cap; refuses one below `in_use`."""

    def __init__(self, in_use: int) -> None:
        super().__init__()
        self.in_use = in_use
        self.caps: list[int] = []

    def resize(self, grant: Grant, memory_bytes: int) -> None:
        if memory_bytes < self.in_use:
            raise ShareInUse(f"{grant.id} uses more")
        self.caps.append(memory_bytes // GIB)


@pytest.mark.parametrize(("in_use", "caps"), [(0, [1, 150]), (3 * GIB, [4, 150])])
def test_its_cap_falls_and_rises_with_what_the_books_hold(
    machine: Machine, controller: Controller, in_use: int, caps: list[int]
) -> None:
    isolator = CappedIsolator(in_use)
    capped = with_parts(controller, isolator=isolator)
    capped.apply([sleeper("a")])
    capped.sleep("a")
    assert held(capped, "a") == caps[:1], "no more than its cap lets it take"
    capped.wake("a")
    assert isolator.caps == caps


class Unsimulated(MechanismChooser):
    """Holds simulated Devices with the interposer's own regions, as it would real ones."""

    def enforce(self, grant: Grant, device: Device, partition: Partition, *, grouped: bool = False) -> Enforcement:
        return super().enforce(grant, replace(device, simulated=False), partition, grouped=grouped)


def test_the_cap_in_the_interposers_region_follows_sleep_and_wake(
    machine: Machine, controller: Controller, tmp_path: Path
) -> None:
    library = tmp_path / "library.so"
    library.touch()
    interposer = Interposer(tmp_path / "regions", find_library=lambda: library, why_not=lambda: None)
    capped = with_parts(controller, isolator=Unsimulated([interposer]))
    capped.apply([sleeper("a")])

    def cap() -> int:
        (use,) = interposer.read_tenants(of(capped, "a").grants[0].partition_id).values()
        return use.cap_bytes // GIB

    assert cap() == 150
    capped.sleep("a")
    assert cap() == 1
    capped.wake("a")
    assert cap() == 150
    capped.release(["a"])
    assert interposer.regions()[0].read_use() == ()
