"""The library with arguments that cannot be meant: an error of ours with a hint, at once, and nothing is changed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hardware.emulation.kernel import EmulatedKernel, TreeSysfs

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import AimGpuError, InvalidInput, InvalidLayout, NotFound, UnknownPartition
from aimgpu.hardware.amd import AmdHardware
from aimgpu.home import Home
from aimgpu.isolation.interposer import Interposer
from aimgpu.runtime import (
    ComputeLimits,
    ModelScheduler,
    ModelSizingConfig,
    ModelStatus,
    QoSManager,
    ResourceIsolator,
    ROCmPartitioner,
    ROCmPartitionerReal,
)

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
ABSURD = [10**400, -(10**400), 10**5000, 1e300]  # no float holds the first, no repr writes the third
NAN, INFINITE = float("nan"), float("inf")
NO_NUMBERS: list[object] = [NAN, INFINITE, -INFINITE, "5", None, True, [], {}, 1j, *ABSURD]
NO_TIMES = [value for value in NO_NUMBERS if value is not None] + [-1, -0.001]
Wrong = Callable[[], object]


@pytest.fixture
def partitioner() -> ROCmPartitioner:
    made = ROCmPartitioner(gpu_id=0)
    made.initialize("MI300X", [96.0, 96.0])
    return made


@pytest.fixture
def scheduler(partitioner: ROCmPartitioner) -> Iterator[ModelScheduler]:
    with ModelScheduler(partitioner) as made:
        yield made


def named(value: object) -> str:
    """For names of tests."""
    absurd = [index for index, each in enumerate(ABSURD) if value is each]
    return f"absurd{absurd[0]}" if absurd else repr(value)


def refused(wrong: Wrong, kind: type[AimGpuError] = AimGpuError) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert caught.value.hint
    assert "--" not in caught.value.hint, "a script has no command line"


@pytest.mark.parametrize("deadline", NO_TIMES, ids=named)
def test_a_deadline_that_is_no_time_is_refused_and_nothing_waits(deadline: float) -> None:
    manager = QoSManager()
    refused(lambda: manager.submit("a", deadline_seconds=deadline), InvalidInput)
    assert manager.depth() == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ttft_seconds", value) for value in NO_TIMES),
        *(("output_tokens", value) for value in (-1, 1.5, "3", None, True, NAN, *ABSURD)),
    ],
    ids=named,
)
def test_an_outcome_that_cannot_be_is_refused_and_the_request_still_runs(name: str, value: object) -> None:
    manager = QoSManager()
    manager.submit("a")
    request = manager.next()
    assert request is not None
    refused(lambda: manager.complete(request.id, **{name: value}), InvalidInput)  # type: ignore[arg-type]
    assert manager.compliance("a").requests == 0
    manager.complete(request.id)
    assert manager.compliance("a").requests == 1


def test_a_clock_of_the_caller_that_is_ahead_gives_no_negative_time() -> None:
    manager = QoSManager(clock=lambda: 0.0)
    manager.submit("a")
    request = manager.next()
    assert request is not None
    manager.complete(request.id, ttft_seconds=5.0, output_tokens=3)
    assert manager.compliance("a").times["tpot"].minimum == 0.0


@pytest.mark.parametrize("objective", ["fast", 5, {"ttft_p95_ms": 5}, ["x"], ServiceObjective], ids=named)
def test_what_is_no_objective_is_refused_and_the_one_that_was_set_stays(objective: object) -> None:
    manager = QoSManager()
    kept = ServiceObjective(ttft_p95_ms=500)
    manager.set_objective("a", kept)
    refused(lambda: manager.set_objective("a", objective), InvalidInput)  # type: ignore[arg-type]
    assert manager.objective("a") == kept


@pytest.mark.parametrize("rate", [value for value in NO_NUMBERS if value is not None] + [0, -1], ids=named)
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    manager = QoSManager()
    refused(lambda: manager.set_objective("a", requests_per_second=rate), InvalidInput)
    assert manager.requests_per_second_objective("a") is None


@pytest.mark.parametrize("part", [*NO_NUMBERS, -0.1, 1.1], ids=named)
def test_a_guarantee_that_is_no_part_is_refused(part: float) -> None:
    manager = QoSManager()
    refused(lambda: manager.set_guarantee("a", "p", part), InvalidInput)
    if part is not None:
        refused(lambda: manager.set_guarantee("a", "p", 0.1, limit=part), InvalidInput)
    assert manager.guarantees() == ()


@pytest.mark.parametrize("priority", [0, 11, -1, 2.5, "urgent", "", None, True, [], Priority, *ABSURD], ids=named)
def test_what_is_no_priority_is_refused_by_every_call(scheduler: ModelScheduler, priority: str) -> None:
    manager = QoSManager()
    refused(lambda: manager.submit("a", priority=priority), InvalidInput)
    if priority is not None:
        refused(lambda: manager.depth("a", priority), InvalidInput)
    assert manager.depth() == 0
    assert scheduler.schedule_model(LLAMA, priority=priority)[0] is False
    assert scheduler.list_models() == ()


@pytest.mark.parametrize("request_id", ["", "x", None, 5], ids=named)
def test_completing_what_does_not_run_is_not_found(request_id: str) -> None:
    manager = QoSManager()
    waiting = manager.submit("a")
    refused(lambda: manager.complete(request_id), NotFound)
    refused(lambda: manager.complete(waiting), NotFound)
    assert manager.depth() == 1


@pytest.mark.parametrize("precision", ["", "fp17", 16, ["fp16"], b"fp16", "fp16,int4"], ids=named)
def test_what_is_no_precision_is_refused_and_nothing_is_charged(scheduler: ModelScheduler, precision: str) -> None:
    success, partition_id, reason = scheduler.schedule_model(LLAMA, precision)
    assert (success, partition_id) == (False, None)
    assert reason
    refused(lambda: ModelSizingConfig().get_model_size(LLAMA, precision), InvalidInput)
    assert all(partition.allocated_bytes == 0 for partition in scheduler.partitions())


@pytest.mark.parametrize("index", [-1, 2, "0", 0.5, True, [], "part-0", *ABSURD], ids=named)
def test_a_partition_that_is_not_there_is_refused_by_every_call(
    scheduler: ModelScheduler, partitioner: ROCmPartitioner, index: int
) -> None:
    success, _, reason = scheduler.schedule_model(LLAMA, preferred_partition=index)
    assert not success
    assert "has no partition" in (reason or "")
    isolator = ResourceIsolator(partitioner)
    refused(lambda: partitioner.environment(index), UnknownPartition)
    refused(lambda: isolator.environment(index), UnknownPartition)
    refused(lambda: isolator.apply(index, "a"), UnknownPartition)
    refused(lambda: isolator.set_model_limit(index, "a", ComputeLimits.percent(1)), UnknownPartition)


@pytest.mark.parametrize("pid", [0, -1, "5", 1.5, True, [1], *ABSURD], ids=named)
def test_a_pid_that_is_none_is_refused_and_the_accounting_still_works(scheduler: ModelScheduler, pid: int) -> None:
    assert scheduler.schedule_model(LLAMA)[0]
    refused(lambda: scheduler.set_status(LLAMA, ModelStatus.RUNNING, pid=pid), InvalidInput)
    assert scheduler.get_model_status(LLAMA) is ModelStatus.SCHEDULED
    assert scheduler.validate() == ()


@pytest.mark.parametrize("status", ["dancing", "", None, 5, ["running"], "RUNNING"], ids=named)
def test_what_is_no_status_is_refused(scheduler: ModelScheduler, status: str) -> None:
    assert scheduler.schedule_model(LLAMA)[0]
    refused(lambda: scheduler.set_status(LLAMA, status), InvalidInput)
    assert scheduler.get_model_status(LLAMA) is ModelStatus.SCHEDULED


@pytest.mark.parametrize("name", ["context_tokens", "concurrency"])
@pytest.mark.parametrize("count", [0, -1, 1.5, "8192", None, True, NAN, *ABSURD], ids=named)
def test_a_count_that_is_none_is_refused_when_it_is_given(name: str, count: int) -> None:
    refused(lambda: ModelSizingConfig(**{name: count}), InvalidInput)  # type: ignore[arg-type]


def test_an_engine_that_cannot_be_sized_is_refused() -> None:
    refused(lambda: ModelSizingConfig(engine="steam").get_model_size(LLAMA), InvalidInput)


@pytest.mark.parametrize("size", [value for value in NO_NUMBERS if value is not None] + [0, -5], ids=named)
def test_a_size_that_is_none_is_refused_by_every_call(size: float) -> None:
    config = ModelSizingConfig()
    refused(lambda: config.can_fit(LLAMA, size), InvalidInput)
    refused(lambda: config.add_model("a/b", "7B", memory_gb=size), InvalidInput)
    refused(lambda: config.add_model("a/b", "7B", recommended_partition_gb=size), InvalidInput)
    if not isinstance(size, str):
        refused(lambda: config.add_model("a/b", size), InvalidInput)  # type: ignore[arg-type]
    refused(lambda: ROCmPartitioner().initialize("MI300X", [size]), InvalidLayout)
    if size != 0:
        refused(lambda: ROCmPartitioner(gpu_id=size), InvalidLayout)  # type: ignore[arg-type]
        refused(lambda: ROCmPartitioner(min_partition_gb=size), InvalidLayout)
        refused(lambda: ROCmPartitionerReal(system_reserve_gb=size, home=Home(Path("/nonexistent"))), InvalidLayout)


@pytest.mark.parametrize("ppm", [0.5, "5", None, True, NAN, [1], *ABSURD], ids=named)
def test_millionths_are_whole_numbers(ppm: int) -> None:
    refused(lambda: ComputeLimits(floor_ppm=ppm, ceiling_ppm=5), InvalidLayout)
    refused(lambda: ComputeLimits(floor_ppm=0, ceiling_ppm=ppm), InvalidLayout)


@pytest.mark.parametrize(("floor", "ceiling"), [(-1, 5), (6, 5), (0, 0), (0, 1_000_001), (1_000_001, 1_000_001)])
def test_limits_that_cannot_be_kept_are_refused(floor: int, ceiling: int) -> None:
    refused(lambda: ComputeLimits(floor_ppm=floor, ceiling_ppm=ceiling), InvalidLayout)


@pytest.mark.parametrize("limit", [50, "50%", {"ceiling": 5}, ComputeLimits], ids=named)
def test_what_is_no_limit_is_refused_and_the_others_stay(partitioner: ROCmPartitioner, limit: ComputeLimits) -> None:
    isolator = ResourceIsolator(partitioner)
    isolator.set_model_limit(0, "a", ComputeLimits.percent(10))
    before = isolator.divide_equally()
    refused(lambda: isolator.set_limits({0: limit}), InvalidLayout)
    refused(lambda: isolator.set_model_limit(0, "a", limit), InvalidLayout)
    assert isolator.limits() == before
    assert isolator.model_limits(0) == {"a": ComputeLimits.percent(10)}


@pytest.mark.parametrize("indices", [[9], ["0"], [9, "0"], [None]], ids=named)
def test_limits_of_partitions_that_are_not_there_are_refused(partitioner: ROCmPartitioner, indices: list[int]) -> None:
    isolator = ResourceIsolator(partitioner)
    refused(lambda: isolator.set_limits({index: ComputeLimits.percent(1) for index in indices}), InvalidLayout)
    assert isolator.limits() == {}


@pytest.mark.parametrize("model", ["", None, 5], ids=named)
def test_a_limit_needs_the_name_of_a_model(partitioner: ROCmPartitioner, model: str) -> None:
    """The empty name would be that of every process without one."""
    isolator = ResourceIsolator(partitioner)
    before = isolator.environment(0)
    refused(lambda: isolator.set_model_limit(0, model, ComputeLimits.percent(1)), InvalidLayout)
    assert isolator.environment(0) == before


@pytest.mark.parametrize("units", [0, -1, 305, 1.5, "5", True, None, *ABSURD], ids=named)
def test_units_that_the_gpu_does_not_have_are_refused(partitioner: ROCmPartitioner, units: int) -> None:
    refused(lambda: ComputeLimits.units(units, partitioner.device()), InvalidLayout)


@pytest.mark.parametrize("memory", [value for value in NO_NUMBERS if value is not None] + [-1], ids=named)
def test_a_cap_that_is_no_size_is_refused(tmp_path: Path, memory: float) -> None:
    hardware = AmdHardware(TreeSysfs(EmulatedKernel(["MI300X"])))
    partitioner = ROCmPartitionerReal(hardware=hardware, home=Home(tmp_path))
    partitioner.initialize()
    isolator = ResourceIsolator(partitioner, interposer=Interposer(tmp_path))
    refused(lambda: isolator.environment(0, "a", memory_gb=memory), InvalidLayout)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"models:",
        b"models: 5",
        b"models: [a]",
        b"models: {a: 5}",
        b"models: {1: {parameters: 7B}}",
        b"\xff\xfe\x00",
        b"[" * 500,
        b"models: {a: {parameters: x}}",
        b"models: {a: {parameters: 7B, model_id: ''}}",
    ],
    ids=["empty", "nothing", "number", "list", "no entry", "a number as name", "no text", "deep", "no count", "no name"],
)
def test_a_file_that_is_no_list_of_models_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "models.yaml").write_bytes(text)
    refused(lambda: ModelSizingConfig(tmp_path / "models.yaml"), InvalidInput)


def test_a_file_that_is_too_large_is_refused_and_not_read_in_part(tmp_path: Path) -> None:
    """The first half of a list of models is a list of models too."""
    lines = "".join(f"  m{number}: {{parameters: 7B}}\n" for number in range(10))
    (tmp_path / "models.yaml").write_text(f"models:\n{lines}#" + "x" * (4 << 20))
    with pytest.raises(InvalidInput, match="larger than"):
        ModelSizingConfig(tmp_path / "models.yaml")
