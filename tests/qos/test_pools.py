"""Slots that classes share, on an engine and on a device with a limit."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aimgpu.domain import Priority, QueueSettings
from aimgpu.qos.queueing.backend import BackendState, Pool
from aimgpu.qos.queueing.concurrency import AdaptiveLimit
from aimgpu.qos.queueing.device_pools import DevicePools
from aimgpu.qos.queueing.policy import DEFAULT_LONGEST_WAIT, DEFAULT_MOST_QUEUED, QueuePolicy, policy_for

LOW, MEDIUM, HIGH = Priority.LOW.rank, Priority.MEDIUM.rank, Priority.HIGH.rank
PLAIN = QueuePolicy()
RANKS = st.sampled_from([LOW, MEDIUM, HIGH])


def filled(*ranks: int) -> Pool:
    pool = Pool()
    for rank in ranks:
        pool.began(rank)
    return pool


def test_without_need_of_higher_classes_the_lowest_gets_every_slot() -> None:
    pool = filled(*[LOW] * 7)
    assert pool.has_room(LOW, 8, PLAIN, 0.0)
    pool.began(LOW)
    assert not any(pool.has_room(rank, 8, PLAIN, 0.0) for rank in (LOW, MEDIUM, HIGH))


def test_what_higher_classes_needed_at_once_is_kept_for_them_and_fades() -> None:
    pool = filled(*[LOW] * 6)
    pool.note_need(HIGH, 1, now=0.0, decay_seconds=PLAIN.reserve_seconds)
    assert not pool.has_room(LOW, 8, PLAIN, 0.0), "two of eight are kept, a quarter"
    assert pool.has_room(HIGH, 8, PLAIN, 0.0)
    later = 5 * PLAIN.reserve_seconds
    assert pool.has_room(LOW, 8, PLAIN, later)


def test_a_larger_need_replaces_a_smaller_one_and_not_the_other_way_round() -> None:
    pool = filled()
    pool.note_need(HIGH, 9, now=0.0, decay_seconds=600.0)
    pool.note_need(HIGH, 0, now=1.0, decay_seconds=600.0)
    assert pool.reserved[HIGH] == (10.0, 0.0)
    pool.note_need(HIGH, 0, now=10_000.0, decay_seconds=600.0)
    assert pool.reserved[HIGH] == (1.0, 10_000.0), "the old one has faded below it"


def test_a_policy_may_keep_slots_for_the_highest_before_any_was_seen() -> None:
    policy = QueuePolicy(least_reserve_part=0.5)
    pool = filled(*[LOW] * 4)
    assert not pool.has_room(LOW, 8, policy, 0.0)
    assert not pool.has_room(MEDIUM, 8, policy, 0.0)
    assert pool.has_room(HIGH, 8, policy, 0.0)


def test_pressure_holds_the_lowest_to_its_share_and_never_to_nothing() -> None:
    pool = filled(LOW, LOW)
    assert not pool.has_room(LOW, 8, PLAIN, 0.0, low_share=0.25)
    assert pool.has_room(MEDIUM, 8, PLAIN, 0.0, low_share=0.25)
    assert filled().has_room(LOW, 2, PLAIN, 0.0, low_share=0.01), "one slot is always left"
    assert pool.usable(LOW, 8, PLAIN, 0.0, 0.25) == 2
    assert pool.usable(HIGH, 8, PLAIN, 0.0, 0.25) == 8


@given(
    st.lists(RANKS, max_size=12), RANKS, st.integers(1, 12), st.floats(0.0, 1.0), st.lists(st.tuples(RANKS, st.integers(0, 6)))
)
def test_who_has_room_has_not_more_than_it_may_use(
    running: list[int], rank: int, allowed: int, low_share: float, needs: list[tuple[int, int]]
) -> None:
    """And a higher class has room wherever a lower one has."""
    pool = filled(*running)
    for above, waiting in needs:
        pool.note_need(above, waiting, 0.0, PLAIN.reserve_seconds)
    if pool.has_room(rank, allowed, PLAIN, 0.0, low_share):
        assert pool.in_flight < allowed
        assert all(pool.has_room(higher, allowed, PLAIN, 0.0, low_share) for higher in range(rank, HIGH + 1))
    assert 1 <= pool.usable(rank, allowed, PLAIN, 0.0, low_share) <= allowed


@pytest.mark.parametrize(
    ("settings_given", "limit"), [(QueueSettings(), None), (QueueSettings(per_gpu=4), 4), (QueueSettings(per_gpu=1), 1)]
)
def test_a_stacks_queue_settings_become_the_policy(settings_given: QueueSettings, limit: int | None) -> None:
    policy = policy_for(settings_given)
    assert policy.limit_of("gpu0") == limit
    assert policy.limits_devices == (limit is not None)
    assert policy.longest_wait_seconds == DEFAULT_LONGEST_WAIT
    assert policy.most_queued == DEFAULT_MOST_QUEUED


@given(st.sampled_from(list(Priority)), st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_waiting_lifts_a_request_and_never_lowers_it(priority: Priority, waited: float, more: float) -> None:
    earlier, later = PLAIN.effective_rank(priority, waited), PLAIN.effective_rank(priority, waited + more)
    assert priority.rank <= earlier <= later <= HIGH
    assert PLAIN.effective_rank(priority, PLAIN.longest_wait_seconds[priority]) >= min(priority.rank + 2, HIGH)


class AnyDevices(RuleBasedStateMachine):
    """Requests begin and end on devices with limits, and the limits change meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, int] = {"gpu0": 3}
        self.pools = DevicePools(QueuePolicy(device_limits=self.limits))
        self.states = {name: BackendState(limit=AdaptiveLimit(8), device_id=name) for name in ("gpu0", "gpu1")}
        self.unknown = BackendState(limit=AdaptiveLimit(8), device_id=None)
        self.running: list[tuple[str | None, int]] = []

    def state(self, device: str | None) -> BackendState:
        return self.unknown if device is None else self.states[device]

    @rule(device=st.sampled_from(["gpu0", "gpu1", None]), rank=RANKS)
    def begin(self, device: str | None, rank: int) -> None:
        if device is not None and not self.pools.has_room(device, rank, 0.0, 1.0):
            limit = self.limits.get(device)
            assert limit is not None
            assert self.pools.in_flight(device) is not None
            return
        self.pools.began(device, rank)
        self.state(device).pool.began(rank)
        self.running.append((device, rank))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        device, rank = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pools.ended(device, rank)
        self.state(device).pool.ended(rank)

    @rule(limits=st.dictionaries(st.sampled_from(["gpu0", "gpu1"]), st.integers(1, 5)), every=st.none() | st.integers(1, 4))
    def change(self, limits: dict[str, int], every: int | None) -> None:
        self.limits = {name: limits.get(name, every) for name in ("gpu0", "gpu1") if limits.get(name, every) is not None}  # type: ignore[misc]
        policy = QueuePolicy(device_limits=limits, every_device_limit=every)
        self.pools.change_limits(policy, [*self.states.values(), self.unknown])

    @invariant()
    def what_is_counted_is_what_runs(self) -> None:
        counted = Counter(device for device, _ in self.running)
        for device in ("gpu0", "gpu1"):
            limit = self.limits.get(device)
            assert self.pools.in_flight(device) == (counted[device] if limit is not None else None)
            assert self.pools.is_full(device) == (limit is not None and counted[device] >= limit)


TestAnyDevices = AnyDevices.TestCase
TestAnyDevices.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
