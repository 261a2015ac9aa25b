"""Random requests of several models, classes and deadlines on a clock that is set: the manager agrees with a plain list."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import NotFound, QueueFull
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.runtime import QoSManager

MODELS = st.sampled_from(["a", "b"])
MOST = 3
POLICY = QueuePolicy(most_queued=dict.fromkeys(Priority, MOST))


@dataclass(frozen=True)
class Waiting:
    id: str
    model: str
    priority: Priority
    arrived: float
    due: float


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.manager = QoSManager(POLICY, clock=lambda: self.now)
        self.manager.set_objective("a", ServiceObjective(latency_p95_ms=10_000, availability_ppm=900_000))
        self.waiting: list[Waiting] = []
        self.running: dict[str, Waiting] = {}
        self.finished: dict[str, int] = {"a": 0, "b": 0}
        self.expired = 0

    @rule(model=MODELS, priority=st.sampled_from(Priority), deadline=st.none() | st.sampled_from([0.5, 5.0, 500.0]))
    def submit(self, model: str, priority: Priority, deadline: float | None) -> None:
        self.drop_expired()
        same = [one for one in self.waiting if (one.model, one.priority) == (model, priority)]
        try:
            request_id = self.manager.submit(model, priority=priority, deadline_seconds=deadline, payload=(model, deadline))
        except QueueFull:
            assert len(same) == MOST, "refused although there is a place"
            return
        assert len(same) < MOST, "taken although the class is full"
        wait = POLICY.longest_wait_seconds[priority] if deadline is None else deadline
        self.waiting.append(Waiting(id=request_id, model=model, priority=priority, arrived=self.now, due=self.now + wait))

    @rule(model=st.none() | MODELS)
    def take_next(self, model: str | None) -> None:
        self.drop_expired()
        choices = [one for one in self.waiting if model in (None, one.model)]
        request = self.manager.next(model)
        if request is None:
            assert choices == []
            return
        (taken,) = [one for one in choices if one.id == request.id]
        assert (request.model, request.priority) == (taken.model, taken.priority)
        assert request.waited_seconds == self.now - taken.arrived
        assert isinstance(request.payload, tuple)
        assert self.rank(taken) == max(self.rank(one) for one in choices), "one of a higher class waited"
        self.waiting.remove(taken)
        self.running[taken.id] = taken

    @precondition(lambda self: self.running)
    @rule(failed=st.booleans(), tokens=st.integers(0, 5), data=st.data())
    def complete(self, failed: bool, tokens: int, data: st.DataObject) -> None:  # noqa: FBT001 - drawn
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.manager.complete(request_id, failed=failed, ttft_seconds=0.0, output_tokens=tokens)
        self.finished[self.running.pop(request_id).model] += 1
        try:
            self.manager.complete(request_id)
        except NotFound:
            return
        raise AssertionError("completed twice")

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_request_waits_runs_or_is_accounted_for(self) -> None:
        self.drop_expired()
        for model in ("a", "b"):
            for priority in Priority:
                mine = [one for one in self.waiting if (one.model, one.priority) == (model, priority)]
                assert self.manager.depth(model, priority) == len(mine)
        assert self.manager.depth() == len(self.waiting)
        assert self.manager.expired == self.expired

    @invariant()
    def objectives_are_judged_once_something_was_seen(self) -> None:
        found = self.manager.compliance("a")
        if found.requests >= 10:  # fewer are not judged
            assert found.compliant is not None
        assert self.manager.compliance("b").objective is None
        for times in found.times.values():
            assert 0 <= times.minimum <= times.mean <= times.maximum
            assert sorted(times.percentiles.values()) == list(times.percentiles.values())

    def rank(self, one: Waiting) -> int:
        return POLICY.effective_rank(one.priority, self.now - one.arrived)

    def drop_expired(self) -> None:
        self.manager.depth()  # drops them too
        gone = [one for one in self.waiting if one.due <= self.now]
        self.waiting = [one for one in self.waiting if one not in gone]
        self.expired += len(gone)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=examples(25), stateful_step_count=20)
