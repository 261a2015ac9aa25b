"""Random scheduling, states, processes and layouts on a GPU that is measured: memory is charged once and given back once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.examples import examples

from aimgpu.domain import Priority
from aimgpu.errors import InvalidLayout, LedgerOwned, NotFound, PartitionBusy
from aimgpu.runtime import ModelScheduler, ModelSizingConfig, ModelStatus, ROCmPartitioner

GB = 10**9
NAMES = [f"acme/m{number}" for number in range(5)]
MODELS = st.sampled_from(NAMES)
LAYOUTS = st.lists(st.sampled_from([8.0, 20.5, 40.0, 96.0, 150.0]), min_size=1, max_size=4)


class Scheduling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sizing = ModelSizingConfig()
        for number, name in enumerate(NAMES):
            self.sizing.add_model(name, "1B", memory_gb=3 + 12.25 * number, quantization=["fp16", "int4"])
        self.partitioner = ROCmPartitioner(gpu_id=77)
        self.partitioner.initialize("MI300X", [40.0, 40.0])
        self.scheduler = ModelScheduler(self.partitioner, self.sizing)
        self.charged: dict[str, int] = {}
        self.removed: set[str] = set()

    def teardown(self) -> None:
        self.scheduler.close()
        assert all(part.allocated_bytes == 0 for part in self.scheduler.partitions())
        with ModelScheduler(self.partitioner, self.sizing) as another:
            assert another.list_models() == ()

    @initialize()
    def a_second_scheduler_is_refused(self) -> None:
        try:
            ModelScheduler(self.partitioner, self.sizing)
        except LedgerOwned:
            return
        raise AssertionError("two schedulers grant one GPU")

    @rule(model=MODELS, preferred=st.none() | st.integers(0, 4), priority=st.sampled_from([*Priority, 1, 10, "HIGH"]))
    def schedule(self, model: str, preferred: int | None, priority: Priority | str | int) -> None:
        needed = self.sizing.get_model_size(model).memory_bytes
        before = {part.partition_id: part for part in self.scheduler.partitions()}
        success, index, reason = self.scheduler.schedule_model(model, preferred_partition=preferred, priority=priority)
        if success:
            assert index in before
            if model not in self.charged:
                assert before[index].available_bytes >= needed
                self.charged[model] = needed
            self.removed.discard(model)
            return
        assert reason
        exists = preferred is None or preferred in before
        assert not exists or all(part.available_bytes < needed for part in before.values()), reason
        assert {part.partition_id: part for part in self.scheduler.partitions()} == before

    @rule(model=MODELS)
    def schedule_in_another_precision(self, model: str) -> None:
        success, _, reason = self.scheduler.schedule_model(model, "int4")
        if model in self.charged:
            assert not success
            assert "unschedule it before" in (reason or "")
        elif success:
            self.scheduler.unschedule_model(model)
            self.removed.add(model)

    @rule(model=MODELS)
    def unschedule(self, model: str) -> None:
        assert self.scheduler.unschedule_model(model)[0] == (model in self.charged)
        if self.charged.pop(model, None) is not None:
            self.removed.add(model)

    @rule(model=MODELS, status=st.sampled_from(ModelStatus), pid=st.none() | st.just(2**22 + 5))
    def set_status(self, model: str, status: ModelStatus, pid: int | None) -> None:
        try:
            found = self.scheduler.set_status(model, status, pid=pid)
        except NotFound:
            assert model not in self.charged
            return
        assert model in self.charged
        if status is ModelStatus.REMOVED:
            assert found is None
            del self.charged[model]
            self.removed.add(model)
        else:
            assert found is not None
            assert found.status is status

    @rule(sizes=LAYOUTS)
    def divide(self, sizes: list[float]) -> None:
        before = self.partitioner.device().layout
        try:
            self.partitioner.initialize("MI300X", sizes)
        except PartitionBusy:
            assert self.charged
        except InvalidLayout:
            assert sum(sizes) > 192
        else:
            assert not self.charged
            assert [part.size_gb for part in self.partitioner.partitions()] == sizes
            return
        assert self.partitioner.device().layout == before

    @invariant()
    def everything_charged_is_of_a_model_and_nothing_is_over_its_size(self) -> None:
        parts = self.scheduler.partitions()
        assert sum(part.allocated_bytes for part in parts) == sum(self.charged.values())
        assert sorted(name for part in parts for name in part.models) == sorted(self.charged)
        for part in parts:
            assert part.allocated_bytes + part.available_bytes == part.size_bytes
            assert part.allocated_gb == part.allocated_bytes / GB
        assert self.scheduler.validate() == ()
        assert set(self.scheduler.model_ids()) == set(self.charged)

    @invariant()
    def a_model_that_was_removed_is_remembered_as_that(self) -> None:
        for name in NAMES:
            status = self.scheduler.get_model_status(name)
            assert (status is ModelStatus.REMOVED) == (name in self.removed)
            assert (status is None) == (name not in self.removed and name not in self.charged)
            assert (self.scheduler.get_model(name) is None) == (name not in self.charged)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=examples(20), stateful_step_count=20)
