import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.hardware_nvidia.conftest import Connect
from tests.hardware_nvidia.fake_nvml import GPU_IS_LOST, IN_USE, INSUFFICIENT_RESOURCES, FakeLibrary, Fault, nvml_over
from tests.hardware_nvidia.gpus import FakeGpu, FakeProcess, a100, h200, l4

from aimgpu.domain.slices import parse_layout
from aimgpu.errors import (
    AimGpuError,
    HardwareUnavailable,
    LayoutNotApplied,
    NotAllowed,
    PartitionBusy,
    UnknownDevice,
    UnknownLayout,
)
from aimgpu.hardware.nvidia.hardware import NvidiaHardware

MADE = "1g.18gb@0+1g.18gb@1+3g.71gb@4"
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
FILL = "nvmlGpuInstanceCreateComputeInstance"
DESTROY = "nvmlGpuInstanceDestroy"
EMPTY_OUT = "nvmlComputeInstanceDestroy"


def made_h200() -> FakeGpu:
    gpu = h200(mig_on=True)
    for kind, start in (("1g.18gb", 0), ("1g.18gb", 1), ("3g.71gb", 4)):
        gpu.make(kind, start)
    return gpu


def layout_of(hardware: NvidiaHardware) -> str:
    (device,) = hardware.read_devices()
    return device.layout.name


def test_a_whole_gpu_is_cut_and_made_whole_again(connect: Connect) -> None:
    gpu = h200()
    hardware = connect(FakeLibrary([gpu]))
    cut = hardware.apply_layout(gpu.uuid, "3g.71gb@4+1g.18gb@0")
    assert cut.layout.name == "1g.18gb@0+3g.71gb@4"
    assert [(part.memory_bytes >> 20, part.compute_units) for part in cut.layout.partitions] == [(16384, 16), (71424, 60)]
    whole = hardware.apply_layout(gpu.uuid, "whole")
    assert whole.layout.name == "whole"
    assert (gpu.mig_on, gpu.instances) == (False, [])


def test_what_stays_is_not_touched_even_while_it_is_used(connect: Connect) -> None:
    gpu = made_h200()
    kept = gpu.instances[0]
    gpu.processes = [FakeProcess(os.getpid(), 1, instance=kept.id)]
    device = connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "1g.18gb@0+2g.35gb@2+3g.71gb@4")
    assert device.layout.name == "1g.18gb@0+2g.35gb@2+3g.71gb@4"
    assert kept in gpu.instances


def test_applying_the_same_layout_changes_nothing(connect: Connect) -> None:
    gpu = made_h200()
    library = FakeLibrary([gpu])
    connect(library).apply_layout(gpu.uuid, MADE)
    assert not {CREATE, DESTROY, FILL, EMPTY_OUT} & set(library.calls)


@pytest.mark.parametrize("wanted", ["1g.18gb@1+3g.71gb@4", "7g.141gb@0", "whole"])
def test_a_process_in_what_must_go_is_named_and_nothing_changes(connect: Connect, wanted: str) -> None:
    gpu = made_h200()
    gpu.processes = [FakeProcess(os.getpid(), 1, instance=gpu.instances[0].id)]
    hardware = connect(FakeLibrary([gpu]))
    with pytest.raises(PartitionBusy, match=rf"pid {os.getpid()} \("):
        hardware.apply_layout(gpu.uuid, wanted)
    assert layout_of(hardware) == MADE


def test_a_process_on_the_whole_gpu_keeps_mig_off(connect: Connect) -> None:
    gpu = h200(processes=[FakeProcess(4321, 1)])
    with pytest.raises(PartitionBusy, match="pid 4321"):
        connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "7g.141gb@0")
    assert not gpu.mig_on


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("1g.5gb@0", "no profile 1g.5gb"),
        ("3g.71gb@2", "cannot start at slice 2"),
        ("3g.71gb@0+2g.35gb@2", "overlap"),
        ("1g.18gb+me@0+1g.18gb+me@1", "at most 1"),
        ("3g.71gb@0+", "not a MIG layout"),
        ("", "not a MIG layout"),
        ("CPX/NPS4", "not a MIG layout"),
    ],
)
def test_a_layout_that_the_device_cannot_have_is_refused_before_anything_is_touched(
    connect: Connect, wanted: str, why: str
) -> None:
    gpu = made_h200()
    hardware = connect(FakeLibrary([gpu]))
    with pytest.raises(UnknownLayout, match=why) as caught:
        hardware.apply_layout(gpu.uuid, wanted)
    assert caught.value.hint
    assert layout_of(hardware) == MADE


def test_a_layout_that_only_turns_out_impossible_with_mig_on_leaves_mig_off(connect: Connect) -> None:
    gpu = h200(tells_profiles=False)
    with pytest.raises(UnknownLayout):
        connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "3g.71gb@2")
    assert not gpu.mig_on


def test_media_variants_are_made_when_asked_for_by_name(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    device = connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "1g.18gb@0+1g.18gb+me@1")
    assert device.layout.name == "1g.18gb@0+1g.18gb+me@1"


def test_a_gpu_without_mig_or_without_a_place_in_the_list_is_said(connect: Connect) -> None:
    hardware = connect(FakeLibrary([l4()]))
    with pytest.raises(UnknownLayout, match="has no MIG"):
        hardware.apply_layout(l4().uuid, "1g.18gb@0")
    assert hardware.apply_layout(l4().uuid, "whole").layout.name == "whole"
    with pytest.raises(UnknownDevice, match="GPU-none"):
        hardware.apply_layout("GPU-none", "whole")


def test_a_mode_that_waits_for_a_reset_is_taken_back_and_said(connect: Connect) -> None:
    gpu = a100(mode_needs_reset=True)
    with pytest.raises(LayoutNotApplied, match="before the GPU is reset"):
        connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "7g.40gb@0")
    assert (gpu.mig_on, gpu.mig_pending) == (False, None)


def test_a_pending_mode_is_a_finding(connect: Connect) -> None:
    hardware = connect(FakeLibrary([a100(mig_pending=True, tells_placements_when_off=True)]))
    assert [finding.code for finding in hardware.inspect()] == ["mig-pending"]


def test_without_rights_it_is_not_allowed_and_nothing_changes(connect: Connect) -> None:
    for gpu in (made_h200(), h200()):
        with pytest.raises(NotAllowed):
            connect(FakeLibrary([gpu], privileged=False)).apply_layout(gpu.uuid, "7g.141gb@0")
        assert len(gpu.instances) == (3 if gpu.mig_on else 0)


@pytest.mark.parametrize("function", [CREATE, FILL, DESTROY, EMPTY_OUT])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("code", [INSUFFICIENT_RESOURCES, IN_USE, 999])
def test_a_failure_at_any_step_puts_everything_back(connect: Connect, function: str, at: int, code: int) -> None:
    gpu = made_h200()
    hardware = connect(FakeLibrary([gpu], faults=[Fault(function, code, at=at)]))
    with pytest.raises((LayoutNotApplied, PartitionBusy)):
        hardware.apply_layout(gpu.uuid, "2g.35gb@0+2g.35gb@2+2g.35gb@4")
    assert layout_of(hardware) == MADE


def test_what_cannot_be_put_back_is_reported_as_it_was_read(connect: Connect) -> None:
    gpu = made_h200()
    hardware = connect(FakeLibrary([gpu], faults=[Fault(CREATE, 999, times=None)]))
    with pytest.raises(LayoutNotApplied, match="It is mig-empty now, what was before is not back: "):
        hardware.apply_layout(gpu.uuid, "7g.141gb@0")
    assert layout_of(hardware) == "mig-empty"


def test_a_change_that_is_accepted_and_does_not_happen_is_a_failure(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    library = FakeLibrary([gpu])
    hardware = connect(library)

    def someone_else(function: str) -> None:
        if library.calls.count(FILL) == 1 and gpu.instances and function == "nvmlDeviceGetMaxMigDeviceCount":
            gpu.instances.clear()

    library.on_call = someone_else
    with pytest.raises(LayoutNotApplied, match="and is mig-empty"):
        hardware.apply_layout(gpu.uuid, "7g.141gb@0")


def test_a_gpu_that_is_lost_in_the_middle_is_said(connect: Connect) -> None:
    gpu = made_h200()
    library = FakeLibrary([gpu])

    def vanish(function: str) -> None:
        gpu.lost = gpu.lost or function == CREATE

    library.on_call = vanish
    with pytest.raises((HardwareUnavailable, LayoutNotApplied), match=r"unreadable|lost"):
        connect(library).apply_layout(gpu.uuid, "7g.141gb@0")


def test_in_use_without_a_process_says_who_else_may_hold_it(connect: Connect) -> None:
    gpu = h200()
    hardware = connect(FakeLibrary([gpu], faults=[Fault("nvmlDeviceSetMigMode", IN_USE)]))
    with pytest.raises(PartitionBusy, match="dcgm"):
        hardware.apply_layout(gpu.uuid, "7g.141gb@0")


def test_someone_elses_cut_up_instance_gives_way_to_a_layout(connect: Connect) -> None:
    gpu = h200(mig_on=True)
    cut = gpu.make("3g.71gb", 0)
    cut.computes.clear()
    cut.add_compute(1)
    assert connect(FakeLibrary([gpu])).apply_layout(gpu.uuid, "3g.71gb@0").layout.name == "3g.71gb@0"


@settings(max_examples=examples(20))
@given(data=st.data())
def test_any_walk_through_layouts_with_faults_ends_where_the_device_says(data: st.DataObject) -> None:
    """After every step the layout is the wanted one or the one before, whatever failed and wherever."""
    gpu = h200(tells_placements_when_off=True)
    library = FakeLibrary([gpu])
    hardware = NvidiaHardware(nvml_over(library))
    names = [layout.name for layout in hardware.read_devices()[0].layouts]
    for _ in range(data.draw(st.integers(1, 3))):
        wanted, before = data.draw(st.sampled_from(names)), layout_of(hardware)
        function = data.draw(st.sampled_from([CREATE, FILL, DESTROY, EMPTY_OUT, "nvmlDeviceSetMigMode"]))
        fault = Fault(function, data.draw(st.sampled_from([IN_USE, 999])), at=data.draw(st.integers(1, 8)))
        library.calls.clear()
        library.faults = [fault]
        try:
            after = hardware.apply_layout(gpu.uuid, wanted).layout.name
            assert after == wanted
        except AimGpuError:
            library.faults = []
            assert layout_of(hardware) == before
        library.faults = []


@given(
    st.lists(
        st.tuples(st.sampled_from(["1g.18gb", "1g.18gb+me", "2g.35gb", "1g.24gb-me"]), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    )
)
def test_a_layouts_name_reads_back_the_same(parts: list[tuple[str, int]]) -> None:
    name = "+".join(f"{kind}@{start}" for kind, start in parts)
    assert sorted(parse_layout(name)) == sorted(parts)


def test_gpu_lost_is_a_failure_of_its_own() -> None:
    gpu = h200()
    hardware = NvidiaHardware(nvml_over(FakeLibrary([gpu], faults=[Fault("nvmlDeviceSetMigMode", GPU_IS_LOST)])))
    with pytest.raises(HardwareUnavailable, match="nvmlDeviceSetMigMode"):
        hardware.apply_layout(gpu.uuid, "7g.141gb@0")
