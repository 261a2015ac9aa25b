"""What the library promises to scripts: accounting that cannot be broken, refusals as values, one owner per GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs
from tests.runtime.measured import MeasuredHardware

from aimgpu import runtime
from aimgpu.domain import DeviceUsage, ForeignProcess, Priority
from aimgpu.errors import (
    AimGpuError,
    DriverReloadNeeded,
    HardwareUnavailable,
    InvalidInput,
    InvalidLayout,
    LedgerOwned,
    NotFound,
    PartitionBusy,
    UnknownModel,
)
from aimgpu.hardware.amd import AmdHardware
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home
from aimgpu.ledger import Owner
from aimgpu.runtime import (
    ComputeLimits,
    ModelScheduler,
    ModelSizingConfig,
    ModelStatus,
    QoSManager,
    ROCmPartitioner,
    ROCmPartitionerReal,
)

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QWEN = "Qwen/Qwen2.5-7B-Instruct"
GB = 10**9


@pytest.fixture
def simulated() -> ROCmPartitioner:
    partitioner = ROCmPartitioner(gpu_id=0)
    partitioner.initialize("MI300X", [40.0, 40.0])
    return partitioner


@pytest.fixture
def real(tmp_path: Path) -> ROCmPartitionerReal:
    partitioner = ROCmPartitionerReal(hardware=MeasuredHardware(), home=Home(tmp_path))
    partitioner.initialize()
    return partitioner


def test_a_layout_does_not_change_under_scheduled_models(simulated: ROCmPartitioner, real: ROCmPartitionerReal) -> None:
    scheduler = ModelScheduler(simulated)
    assert scheduler.schedule_model(LLAMA)[0]
    before = scheduler.partitions()
    with pytest.raises(PartitionBusy, match=LLAMA):
        simulated.initialize("MI300X", [10.0])
    assert scheduler.partitions() == before
    assert all(partition.available_gb >= 0 for partition in before)
    scheduler.unschedule_model(LLAMA)
    assert simulated.initialize("MI300X", [10.0])
    with ModelScheduler(real) as scheduler:
        assert scheduler.schedule_model(LLAMA)[0]
        with pytest.raises(PartitionBusy, match=LLAMA):
            real.initialize("CPX")
        assert real.initialize()  # nothing is changed by taking what is there
        assert real.device().layout.name == "SPX/NPS1"


def test_scheduling_before_there_is_a_layout_is_refused_and_not_raised() -> None:
    success, partition_id, error = ModelScheduler(ROCmPartitioner()).schedule_model(LLAMA)
    assert (success, partition_id) == (False, None)
    assert error == "the GPU is not partitioned yet"


def test_two_schedulers_cannot_grant_one_gpu(simulated: ROCmPartitioner) -> None:
    first = ModelScheduler(simulated)
    with pytest.raises(LedgerOwned):
        ModelScheduler(simulated)
    first.schedule_model(LLAMA)
    first.close()
    second = ModelScheduler(simulated)
    assert second.schedule_model(LLAMA)[0]
    assert first.schedule_model(QWEN) == (False, None, "another scheduler grants this GPU")


def two_partitioners(kind: str, tmp_path: Path, gpu_ids: tuple[int, int]) -> list[ROCmPartitioner | ROCmPartitionerReal]:
    if kind == "simulated":
        simulated = [ROCmPartitioner(gpu_id) for gpu_id in gpu_ids]
        for partitioner in simulated:
            partitioner.initialize("MI300X", [40.0, 40.0])
        return [*simulated]
    hardware = SimulatedHardware([("MI300X", 2)])
    real = [ROCmPartitionerReal(gpu_id, hardware=hardware, home=Home(tmp_path)) for gpu_id in gpu_ids]
    for each in real:
        each.initialize()
    return [*real]


@pytest.mark.parametrize("kind", ["simulated", "real"])
def test_a_second_partitioner_of_a_gpu_is_no_second_gpu(kind: str, tmp_path: Path) -> None:
    first, second = two_partitioners(kind, tmp_path, (0, 0))
    with ModelScheduler(first) as scheduler:
        assert scheduler.schedule_model(LLAMA)[0]
        with pytest.raises(LedgerOwned, match="another scheduler grants this GPU"):
            ModelScheduler(second)
        with pytest.raises(PartitionBusy, match=LLAMA):
            second.initialize("MI300X", [10.0]) if isinstance(second, ROCmPartitioner) else second.initialize("CPX")
        assert scheduler.validate() == ()
    with ModelScheduler(second) as scheduler:
        assert scheduler.schedule_model(LLAMA)[0]


@pytest.mark.parametrize("kind", ["simulated", "real"])
def test_two_gpus_have_a_scheduler_each(kind: str, tmp_path: Path) -> None:
    first, second = two_partitioners(kind, tmp_path, (0, 1))
    with ModelScheduler(first) as one:
        with ModelScheduler(second) as other:
            assert one.schedule_model(LLAMA)[0]
            assert other.schedule_model(LLAMA)[0]
        if kind == "real":
            with pytest.raises(LedgerOwned):  # the first still has a GPU of this machine
                Owner.acquire(tmp_path)
    Owner.acquire(tmp_path).release()


def test_a_layout_is_not_changed_under_the_daemon(tmp_path: Path) -> None:
    partitioner = ROCmPartitionerReal(hardware=SimulatedHardware([("MI300X", 1)]), home=Home(tmp_path))
    daemon = Owner.acquire(tmp_path)
    assert partitioner.initialize()  # looking is allowed
    with pytest.raises(LedgerOwned):
        partitioner.initialize("CPX")
    assert partitioner.device().layout.name == "SPX/NPS1"
    daemon.release()
    assert partitioner.initialize("CPX")
    assert partitioner.device().layout.name == "CPX/NPS1"
    Owner.acquire(tmp_path).release()


def test_a_real_gpu_has_the_lock_of_the_daemon(tmp_path: Path) -> None:
    daemon = Owner.acquire(tmp_path)
    partitioner = ROCmPartitionerReal(hardware=SimulatedHardware([("MI300X", 1)]), home=Home(tmp_path))
    with pytest.raises(LedgerOwned) as caught:
        ModelScheduler(partitioner)
    assert "--" not in (caught.value.hint or "")
    daemon.release()
    with ModelScheduler(partitioner), pytest.raises(LedgerOwned):
        Owner.acquire(tmp_path)
    Owner.acquire(tmp_path).release()


def test_memory_of_other_processes_counts(real: ROCmPartitionerReal) -> None:
    hardware = real._hardware
    assert isinstance(hardware, MeasuredHardware)
    device = real.device()
    partition = device.layout.partitions[0]
    stranger = ForeignProcess(pid=1, name="other", memory_bytes=190 * GB, partition_id=partition.id)
    hardware.usage = DeviceUsage(
        device_id=device.id,
        used_bytes=190 * GB,
        used_bytes_by_partition={partition.id: 190 * GB},
        utilization_percent=0,
        processes=(stranger,),
    )
    with ModelScheduler(real) as scheduler:
        success, _, error = scheduler.schedule_model(LLAMA)
        assert not success
        free = "12.1 of 206.1 GB available, 194 GB reserved or used by other processes"
        assert error is not None
        assert error.startswith(f"{LLAMA} needs ")
        assert error.endswith(f" GB; partition 0 has the most, {free}")
        hardware.usage = replace(hardware.usage, used_bytes=0, used_bytes_by_partition={}, processes=())
        assert scheduler.schedule_model(LLAMA)[0]
        assert scheduler.validate() == ()
        hardware.usage = replace(
            hardware.usage, used_bytes=200 * GB, used_bytes_by_partition={partition.id: 200 * GB}, processes=(stranger,)
        )
        assert any("other processes use memory" in problem for problem in scheduler.validate())


def test_a_model_that_runs_is_not_a_stranger_and_is_measured(real: ROCmPartitionerReal) -> None:
    hardware = real._hardware
    assert isinstance(hardware, MeasuredHardware)
    device = real.device()
    partition = device.layout.partitions[0]
    with ModelScheduler(real) as scheduler:
        assert scheduler.schedule_model(LLAMA)[0]
        granted = scheduler.list_models()[0].memory_bytes
        scheduler.set_status(LLAMA, "running", pid=4242)
        for used, problems in ((granted, 0), (granted + GB, 1)):
            process = ForeignProcess(pid=4242, name="vllm", memory_bytes=used, partition_id=partition.id)
            hardware.usage = DeviceUsage(
                device_id=device.id,
                used_bytes=used,
                used_bytes_by_partition={partition.id: used},
                utilization_percent=0,
                processes=(process,),
            )
            assert len(scheduler.validate()) == problems
        assert scheduler.partitions()[0].available_bytes > 150 * GB


def test_a_layout_that_someone_else_changed_is_named(tmp_path: Path) -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    partitioner = ROCmPartitionerReal(hardware=hardware, home=Home(tmp_path))
    partitioner.initialize()
    with ModelScheduler(partitioner) as scheduler:
        assert scheduler.schedule_model(LLAMA)[0]
        hardware.apply_layout(partitioner.device().id, "CPX/NPS1")
        (problem,) = scheduler.validate()
        assert LLAMA in problem
        assert "CPX/NPS1 does not have" in problem


@pytest.mark.parametrize(
    ("given", "meant"), [(1, "low"), (3, "low"), (4, "medium"), (7, "medium"), (8, "high"), (10, "high"), ("HIGH", "high")]
)
def test_priorities_are_names_or_numbers(simulated: ROCmPartitioner, given: int | str, meant: str) -> None:
    scheduler = ModelScheduler(simulated)
    assert scheduler.schedule_model(LLAMA, priority=given)[0]
    assert scheduler.list_models()[0].grant.priority is Priority(meant)


@pytest.mark.parametrize("given", [0, 11, "urgent", 2.5, True])
def test_what_is_no_priority_is_refused(simulated: ROCmPartitioner, given: object) -> None:
    success, _, error = ModelScheduler(simulated).schedule_model(LLAMA, priority=given)  # type: ignore[arg-type]
    assert not success
    assert "is not a priority" in (error or "")


def test_a_preferred_partition_that_is_full_is_passed_over_and_named(simulated: ROCmPartitioner) -> None:
    scheduler = ModelScheduler(simulated)
    assert scheduler.schedule_model(LLAMA, preferred_partition=0) == (True, 0, None)
    assert scheduler.schedule_model(QWEN, preferred_partition=0)[1] == 0
    success, partition_id, note = scheduler.schedule_model("mistralai/Mistral-7B-Instruct-v0.3", preferred_partition=0)
    assert (success, partition_id) == (True, 1)
    assert note == "partition 0 does not have the room; partition 1 was taken instead"


def test_states_are_read_and_set(simulated: ROCmPartitioner) -> None:
    scheduler = ModelScheduler(simulated)
    assert scheduler.get_model_status(LLAMA) is None
    scheduler.schedule_model(LLAMA)
    assert scheduler.get_model_status(LLAMA) is ModelStatus.SCHEDULED
    for status in ("starting", "running", "stopped", "failed"):
        instance = scheduler.set_status(LLAMA, status, reason="as told")
        assert instance is not None
        assert instance.status == status == scheduler.get_model_status(LLAMA)
        assert scheduler.partitions()[0].allocated_bytes > 0
    with pytest.raises(InvalidInput, match="is not a status"):
        scheduler.set_status(LLAMA, "dancing")
    assert scheduler.set_status(LLAMA, ModelStatus.REMOVED) is None
    assert scheduler.get_model_status(LLAMA) is ModelStatus.REMOVED
    assert all(partition.allocated_bytes == 0 for partition in scheduler.partitions())
    with pytest.raises(NotFound):
        scheduler.set_status(LLAMA, "running")


def test_the_least_partition_and_the_reserve_are_on_and_can_be_turned_off() -> None:
    with pytest.raises(InvalidLayout, match="smaller than the least of 8 GB"):
        ROCmPartitioner().initialize("MI300X", [7.9])
    assert ROCmPartitioner(min_partition_gb=1).initialize("MI300X", [7.9])
    with pytest.raises(InvalidLayout, match="4 GB of it reserved"):
        ROCmPartitioner().initialize("MI300X", [103.0, 103.0])
    assert ROCmPartitioner(system_reserve_gb=0).initialize("MI300X", [103.0, 103.0])
    with pytest.raises(InvalidLayout):
        ROCmPartitioner(system_reserve_gb=-1)


def test_the_reserve_of_a_real_gpu_is_never_scheduled(tmp_path: Path) -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    for reserve in (0.0, 4.0):
        partitioner = ROCmPartitionerReal(hardware=hardware, home=Home(tmp_path), system_reserve_gb=reserve)
        partitioner.initialize()
        with ModelScheduler(partitioner) as scheduler:
            (partition,) = scheduler.partitions()
            assert partition.available_bytes == partition.size_bytes - reserve * GB
    with pytest.raises(InvalidLayout, match=r"CPX/NPS1 has partitions of 25\.8 GB"):
        ROCmPartitionerReal(hardware=hardware, home=Home(tmp_path), min_partition_gb=30).initialize("CPX")


def test_hints_of_the_library_name_no_flags_of_commands(tmp_path: Path) -> None:
    partitioner = ROCmPartitionerReal(hardware=SimulatedHardware([("MI300X", 1)]), home=Home(tmp_path))
    found: list[AimGpuError] = []
    with pytest.raises(DriverReloadNeeded) as reload:
        partitioner.initialize("CPX", "NPS4")
    with pytest.raises(UnknownModel) as unknown:
        ModelSizingConfig().get_model_size("nobody/unknown")
    found += [reload.value, unknown.value]
    assert all(error.hint and "--" not in error.hint for error in found)


NAN = float("nan")
WRONG: dict[str, Callable[[], object]] = {
    "a percentage that is no number": lambda: ComputeLimits.percent(NAN),
    "a percentage as text": lambda: ComputeLimits.percent("30"),  # type: ignore[arg-type]
    "a guarantee that is no number": lambda: QoSManager().set_guarantee("m", "gpu0/0", NAN),
    "a limit as text": lambda: QoSManager().set_guarantee("m", "gpu0/0", 0.5, "1"),  # type: ignore[arg-type]
    "a rate as text": lambda: QoSManager().set_objective("m", requests_per_second="5"),  # type: ignore[arg-type]
    "a GPU by name": lambda: ROCmPartitioner(gpu_id="0"),  # type: ignore[arg-type]
    "a real GPU by name": lambda: ROCmPartitionerReal(gpu_id=True),
    "one size without a list": lambda: ROCmPartitioner().initialize("MI300X", 40.0),  # type: ignore[arg-type]
    "sizes as text": lambda: ROCmPartitioner().initialize("MI300X", "40"),  # type: ignore[arg-type]
    "no product": lambda: ROCmPartitioner().initialize(None, [40.0]),  # type: ignore[arg-type]
    "no model": lambda: ModelSizingConfig().get_model_size(""),
    "a recommended size that is none": lambda: ModelSizingConfig().add_model("a/b", "7B", recommended_partition_gb=NAN),
    "a model without a name": lambda: ModelSizingConfig().add_model("", "7B"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_makes_no_sense_is_an_error_of_the_tree(wrong: Callable[[], object]) -> None:
    with pytest.raises(AimGpuError) as caught:
        wrong()
    assert caught.value.hint
    assert "--" not in caught.value.hint


@pytest.mark.parametrize("model", ["", None])
def test_scheduling_what_is_no_model_is_a_refusal(simulated: ROCmPartitioner, model: str) -> None:
    success, partition_id, error = ModelScheduler(simulated).schedule_model(model)
    assert (success, partition_id) == (False, None)
    assert "is not the name of a model" in (error or "")


def test_a_size_that_is_hardly_too_small_is_quoted_as_given() -> None:
    with pytest.raises(InvalidLayout, match=r"a partition of 7\.99 GB is smaller than the least of 8 GB"):
        ROCmPartitioner().initialize("MI300X", [7.99])


def test_a_gpu_on_which_no_program_can_run_is_refused_in_words(tmp_path: Path) -> None:
    kernel = EmulatedKernel(["MI300X"])
    for path in [path for path in kernel.tree if path.startswith("class/kfd")]:
        del kernel.tree[path]
    partitioner = ROCmPartitionerReal(hardware=AmdHardware(TreeSysfs(kernel)), home=Home(tmp_path))
    with pytest.raises(HardwareUnavailable, match="no model can run on amd-"):
        partitioner.initialize()
    assert ModelScheduler(partitioner).schedule_model(LLAMA)[0] is False


def test_a_refusal_never_quotes_as_much_as_is_needed() -> None:
    """15.48 GB do not go into 15.46 GB, and both would be 15.5 if they were rounded to the nearest."""
    config = ModelSizingConfig()
    config.add_model("acme/x", "7B", memory_gb=15.48)
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [15.46])
    success, _, error = ModelScheduler(partitioner, config).schedule_model("acme/x")
    assert not success
    assert error == "acme/x needs 15.5 GB; partition 0 has the most, 15.4 of 15.5 GB available"


def test_a_priority_reads_back_as_it_was_given(simulated: ROCmPartitioner) -> None:
    with ModelScheduler(simulated) as scheduler:
        assert scheduler.schedule_model(LLAMA, priority=10)[0]
        assert scheduler.schedule_model(QWEN, priority="High")[0]
        models = scheduler.list_models()
    assert [model.priority for model in models] == [10, Priority.HIGH]
    assert {model.grant.priority for model in models} == {Priority.HIGH}


def test_validation_before_there_is_a_layout_is_a_sentence_and_not_an_error(tmp_path: Path) -> None:
    partitioner = ROCmPartitioner(gpu_id=7)
    assert partitioner.validate() == ("the GPU is not partitioned yet",)
    with ModelScheduler(partitioner) as scheduler:
        assert scheduler.validate() == ("the GPU is not partitioned yet",)
    assert ROCmPartitionerReal(hardware=MeasuredHardware(), home=Home(tmp_path)).validate() == ("the GPU was not read yet",)


def test_a_scheduler_without_a_partitioner_has_a_simulated_gpu() -> None:
    with ModelScheduler() as scheduler:
        assert isinstance(scheduler.partitioner, ROCmPartitioner)
        scheduler.partitioner.initialize("MI300X", [40.0])
        assert scheduler.schedule_model(LLAMA) == (True, 0, None)


def test_a_partition_that_no_layout_has_holds_no_model() -> None:
    config = ModelSizingConfig()
    small = config.can_fit("meta-llama/Llama-3.2-1B-Instruct", 7)
    assert not small
    assert small.reason == "a partition of 7 GB is smaller than the least of 8 GB"
    assert config.can_fit("meta-llama/Llama-3.2-1B-Instruct", 7, min_partition_gb=0)


def test_what_is_reserved_of_a_partition_is_not_for_the_model() -> None:
    config = ModelSizingConfig()
    assert config.can_fit(LLAMA, 21)
    kept = config.can_fit(LLAMA, 21, reserve_gb=4)
    assert not kept
    assert kept.reason.endswith("the partition has 17 of 21 GB, 4 GB are reserved")
    assert not config.can_fit(LLAMA, 21, reserve_gb=30)


def test_a_partition_that_is_the_whole_gpu_names_no_dies(tmp_path: Path) -> None:
    emulated = AmdHardware(TreeSysfs(EmulatedKernel(["MI300X"])))
    simulated = SimulatedHardware([("MI300X", 1)])
    for partitioner in (
        ROCmPartitionerReal(hardware=emulated, home=Home(tmp_path / "emulated")),
        ROCmPartitionerReal(hardware=simulated, home=Home(tmp_path / "simulated")),
    ):
        partitioner.initialize()
        assert "AIM_XCD_ID" not in partitioner.environment(0)


def test_types_of_arguments_are_importable_from_the_library() -> None:
    manager = runtime.QoSManager()
    manager.set_objective("a", runtime.ServiceObjective(ttft_p95_ms=500))
    manager.submit("a", priority=runtime.Priority.HIGH)
    manager.set_guarantee("a", "p", 0)
    assert manager.guarantees() == (runtime.Guarantee(model="a", partition_id="p", guaranteed_ppm=0),)
