import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.errors import InvalidLayout, NotInitialized, UnknownModel, UnknownProduct
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home
from aimgpu.runtime import (
    ComputeLimits,
    ComputePartitionMode,
    MemoryPartitionMode,
    ModelScheduler,
    ModelSizingConfig,
    ModelStatus,
    ResourceIsolator,
    ROCmPartitioner,
    ROCmPartitionerReal,
)

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QWEN = "Qwen/Qwen2.5-7B-Instruct"
GB = 10**9


def make_scheduler(sizes: list[float] | None = None) -> ModelScheduler:
    partitioner = ROCmPartitioner(gpu_id=0, min_partition_gb=0)
    partitioner.initialize("MI300X", sizes or [40.0, 40.0, 40.0, 40.0])
    return ModelScheduler(partitioner)


def test_the_example_of_the_design_runs_as_it_stands() -> None:
    partitioner = ROCmPartitioner(gpu_id=0)
    partitioner.initialize("MI300X", [40.0, 40.0, 40.0, 40.0])
    scheduler = ModelScheduler(partitioner)
    success, partition_id, error = scheduler.schedule_model("meta-llama/Llama-3.1-8B-Instruct")
    assert (success, error) == (True, None)
    assert partition_id in range(4)
    assert scheduler.get_model_status(LLAMA) is ModelStatus.SCHEDULED


def test_int4_is_charged_and_released_as_int4() -> None:
    scheduler = make_scheduler()
    needed = ModelSizingConfig().get_model_size(LLAMA, "int4").memory_bytes
    assert needed < ModelSizingConfig().get_model_size(LLAMA, "fp16").memory_bytes
    success, partition_id, _ = scheduler.schedule_model(LLAMA, precision="int4")
    assert success
    assert sum(part.allocated_bytes for part in scheduler.partitions()) == needed
    assert scheduler.partitions()[partition_id or 0].models == (LLAMA,)
    assert scheduler.unschedule_model(LLAMA) == (True, None)
    assert all(part.allocated_bytes == 0 for part in scheduler.partitions())


def test_a_failed_placement_changes_nothing_and_says_why() -> None:
    scheduler = make_scheduler([10.0, 10.0])
    before = scheduler.partitions()
    success, partition_id, error = scheduler.schedule_model(LLAMA, precision="fp16")
    assert (success, partition_id) == (False, None)
    assert error
    assert scheduler.partitions() == before
    assert scheduler.list_models() == ()


def test_a_model_scheduled_twice_is_charged_once() -> None:
    scheduler = make_scheduler()
    first = scheduler.schedule_model(LLAMA)
    charged = scheduler.partitions()
    assert scheduler.schedule_model(LLAMA) == first
    assert scheduler.partitions() == charged


def test_a_model_that_runs_in_another_precision_is_not_quietly_the_same() -> None:
    scheduler = make_scheduler()
    scheduler.schedule_model(LLAMA, precision="int4")
    success, _, error = scheduler.schedule_model(LLAMA, precision="fp16")
    assert not success
    assert "int4" in (error or "")


def test_eight_threads_at_once_never_charge_twice() -> None:
    scheduler = make_scheduler()
    results = []
    gate = threading.Barrier(8)

    def schedule(model: str) -> None:
        gate.wait()
        results.append(scheduler.schedule_model(model))

    threads = [threading.Thread(target=schedule, args=(LLAMA if n % 2 else QWEN,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(success for success, _, _ in results)
    assert len(scheduler.list_models()) == 2
    charged = sum(part.allocated_bytes for part in scheduler.partitions())
    assert charged == sum(model.memory_bytes for model in scheduler.list_models())


@pytest.mark.parametrize(
    "sizes",
    [[], [-1.0], [0.0], [40.0, -40.0], [500.0], [100.0, 107.0], [1.0] * 9, [float("nan")], [float("inf")], [True], ["40"]],
)
def test_layouts_that_cannot_be_are_refused(sizes: list[float]) -> None:
    partitioner = ROCmPartitioner(gpu_id=0)
    with pytest.raises(InvalidLayout):
        partitioner.initialize("MI300X", sizes)
    with pytest.raises(NotInitialized):
        partitioner.device()


def test_a_refused_layout_leaves_the_earlier_one() -> None:
    partitioner = ROCmPartitioner()
    assert partitioner.initialize("AMD Instinct MI300X", [96.0, 96.0])
    with pytest.raises(ValueError, match="cannot be made"):
        partitioner.initialize("MI300X", [-5.0])
    assert [part.memory_bytes for part in partitioner.device().layout.partitions] == [96 * GB] * 2


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownProduct) as caught:
        ROCmPartitioner().initialize("MI999", [1.0])
    assert "MI300X" in (caught.value.hint or "") + str(caught.value)


def test_an_unknown_model_is_never_guessed() -> None:
    scheduler = make_scheduler()
    success, _, error = scheduler.schedule_model("nobody/unknown-7B")
    assert not success
    assert "unknown-7B" in (error or "")
    with pytest.raises(UnknownModel):
        ModelSizingConfig().get_model_size("nobody/unknown-7B")


def test_a_preferred_partition_is_taken_and_one_that_is_not_there_is_an_error() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule_model(LLAMA, preferred_partition=2) == (True, 2, None)
    success, _, error = scheduler.schedule_model(QWEN, preferred_partition=7)
    assert not success
    assert "no partition 7" in (error or "")


def test_unscheduling_what_is_not_there_says_so() -> None:
    assert make_scheduler().unschedule_model(LLAMA) == (False, f"{LLAMA} is not scheduled")


MODELS = st.sampled_from([LLAMA, QWEN, "HuggingFaceTB/SmolLM2-135M-Instruct", "nobody/unknown"])
STEPS = st.lists(st.tuples(st.booleans(), MODELS, st.sampled_from(["fp16", "int8", "int4", None])), max_size=25)


@given(steps=STEPS, sizes=st.lists(st.floats(1, 60), min_size=1, max_size=3))
@settings(max_examples=examples(60))
def test_no_partition_is_ever_over_its_size_and_everything_charged_is_given_back(
    steps: list[tuple[bool, str, str | None]], sizes: list[float]
) -> None:
    scheduler = make_scheduler(sizes)
    for add, model, precision in steps:
        if add:
            scheduler.schedule_model(model, precision)
        else:
            scheduler.unschedule_model(model)
        for part in scheduler.partitions():
            assert 0 <= part.allocated_bytes <= part.size_bytes
            assert 0 <= part.utilization <= 1
    for instance in scheduler.list_models():
        scheduler.unschedule_model(instance.model_id)
    assert all(part.available_bytes == part.size_bytes for part in scheduler.partitions())


def test_the_real_partitioner_reads_modes_and_changes_them_through_the_hardware(tmp_path: Path) -> None:
    hardware = SimulatedHardware([("MI300X", 2)])
    partitioner = ROCmPartitionerReal(gpu_id=1, hardware=hardware, home=Home(tmp_path))
    with pytest.raises(NotInitialized):
        partitioner.device()
    assert partitioner.initialize()
    assert partitioner.device().layout.name == "SPX/NPS1"
    assert partitioner.initialize(ComputePartitionMode.CPX)
    assert len(partitioner.device().layout.partitions) == 8
    assert partitioner.initialize(ComputePartitionMode.CPX, MemoryPartitionMode.NPS4, reload_driver=True)
    assert partitioner.device().layout.name == "CPX/NPS4"
    assert partitioner.environment(3)["AIM_XCD_ID"] == "3"
    with ModelScheduler(partitioner) as scheduler:
        assert scheduler.schedule_model(LLAMA, precision="int4")[0]


def test_compute_limits_are_validated_at_once_and_kept_whole_or_not_at_all() -> None:
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [40.0] * 4)
    isolator = ResourceIsolator(partitioner)
    equal = isolator.divide_equally()
    assert {(limit.floor_ppm, limit.ceiling_ppm) for limit in equal.values()} == {(250_000, 250_000)}
    with pytest.raises(InvalidLayout, match="add up"):
        isolator.set_limits({0: ComputeLimits(floor_ppm=600_000, ceiling_ppm=700_000)})
    assert isolator.limits() == equal
    with pytest.raises(InvalidLayout):
        ComputeLimits(floor_ppm=500_000, ceiling_ppm=400_000)
    with pytest.raises(InvalidLayout, match="no partition 9"):
        isolator.set_limits({9: ComputeLimits(floor_ppm=0, ceiling_ppm=1)})
