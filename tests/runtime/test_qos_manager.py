import threading

import pytest

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import InvalidInput, NotFound, QueueFull
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.runtime import QoSManager


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def finish_next(manager: QoSManager, **outcome: object) -> str:
    request = manager.next()
    assert request is not None
    manager.complete(request.id, **outcome)  # type: ignore[arg-type]
    return str(request.payload)


def test_requests_come_out_by_class_deadline_and_arrival(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    manager.submit("a", priority="low", payload="low")
    manager.submit("a", payload="first")
    manager.submit("b", payload="second")
    manager.submit("b", deadline_seconds=1, payload="urgent")
    manager.submit("a", priority="high", payload="high")
    assert manager.depth() == 5
    assert manager.depth("a", "low") == 1
    assert [finish_next(manager) for _ in range(5)] == ["high", "urgent", "first", "second", "low"]
    assert manager.next() is None
    assert manager.depth() == 0


def test_the_lowest_is_overtaken_only_so_long(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    manager.submit("a", priority="low", payload="old")
    clock.now = 115.0
    manager.submit("a", priority="high", payload="new")
    assert finish_next(manager) == "old"


def test_what_waited_too_long_is_dropped_and_counted_as_a_failure(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    manager.set_objective("a", ServiceObjective(availability_ppm=990_000))
    manager.submit("a", deadline_seconds=1)
    clock.now = 2.0
    assert manager.next("a") is None
    assert (manager.depth("a"), manager.expired) == (0, 1)
    assert manager.compliance("a").failures == 1


def test_compliance_has_percentiles_throughput_by_time_and_the_objective(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    objective = ServiceObjective(latency_p95_ms=1000)
    manager.set_objective("a", objective)
    assert manager.objective("a") == objective
    assert manager.compliance("a").compliant is None
    for index in range(100):
        manager.submit("a")
        request = manager.next("a")
        assert request is not None
        clock.now += 3.0 if index % 20 == 0 else 0.5
        manager.complete(request.id, ttft_seconds=0.1, output_tokens=5)
    found = manager.compliance("a")
    assert found.compliant is True
    assert found.objective == objective
    assert found.targets[0].attainment == pytest.approx(0.95)
    assert found.percentiles["latency"][0.5] == pytest.approx(0.5, rel=0.06)
    assert found.percentiles["latency"][0.99] == pytest.approx(3.0, rel=0.06)
    assert found.percentiles["tpot"][0.5] == pytest.approx(0.1, rel=0.06)
    assert found.requests_per_second == pytest.approx(100 / 62.5, rel=0.06)
    assert found.output_tokens_per_second == pytest.approx(500 / 62.5, rel=0.06)
    manager.submit("a")
    request = manager.next("a")
    assert request is not None
    manager.complete(request.id, failed=True)
    assert manager.compliance("a").compliant is False


def test_guarantees_that_cannot_all_be_kept_are_refused_and_change_nothing() -> None:
    manager = QoSManager()
    manager.set_guarantee("a", "p0", 0.6, limit=0.8)
    with pytest.raises(InvalidInput, match=r"add up to 110%"):
        manager.set_guarantee("b", "p0", 0.5)
    with pytest.raises(InvalidInput, match="above its limit"):
        manager.set_guarantee("b", "p0", 0.4, limit=0.3)
    manager.set_guarantee("b", "p0", 0.4)
    manager.set_guarantee("c", "p1", 1.0)


def test_a_full_queue_refuses_and_an_unknown_id_is_not_found() -> None:
    manager = QoSManager(QueuePolicy(most_queued=dict.fromkeys(Priority, 1)))
    manager.submit("a")
    with pytest.raises(QueueFull):
        manager.submit("a")
    request = manager.next()
    assert request is not None
    manager.complete(request.id)
    with pytest.raises(NotFound):
        manager.complete(request.id)


def test_eight_threads_share_one_manager_and_nothing_is_lost() -> None:
    manager = QoSManager()
    taken: list[str] = []

    def work() -> None:
        for _ in range(100):
            manager.submit("a")
            request = manager.next()
            if request is not None:
                taken.append(request.id)
                manager.complete(request.id)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while (request := manager.next()) is not None:
        taken.append(request.id)
        manager.complete(request.id)
    assert len(taken) == len(set(taken)) == 800
    assert manager.compliance("a").requests == 800


def test_a_class_has_its_own_promise_and_a_rate_is_judged_while_somebody_asks(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    objective = ServiceObjective(tokens_per_second=50, low=ServiceObjective(latency_p99_ms=100_000))
    manager.set_objective("a", objective)
    assert manager.objective("a") == objective
    for _ in range(12):
        manager.submit("a", priority="high")
        manager.submit("a", priority="low")
        for tokens in (300, 5):
            request = manager.next("a")
            assert request is not None
            clock.now += 5.0
            manager.complete(request.id, output_tokens=tokens)
        clock.now += 100.0
    found = manager.compliance("a")
    assert [(target.name, target.attainment) for target in found.targets] == [("throughput", 1.0)]
    assert [target.attainment for target in found.classes[Priority.LOW]] == [1.0]
    assert found.compliant is True
    manager.submit("a", priority="high")
    request = manager.next("a")
    assert request is not None
    clock.now += 5.0
    manager.complete(request.id, output_tokens=100)
    clock.now += 5.0
    assert manager.compliance("a").compliant is False


def test_promises_that_contradict_each_other_are_refused() -> None:
    manager = QoSManager()
    with pytest.raises(InvalidInput, match=r"ttft_p99 \(100ms\) is shorter than ttft_p50 \(1s\)"):
        manager.set_objective("a", ServiceObjective(low=ServiceObjective(ttft_p50_ms=1000, ttft_p99_ms=100)))
    assert manager.objective("a") is None


def test_times_are_those_that_requests_took(clock: Clock) -> None:
    """Of 200 requests 2 took 50 s: that is the p99."""
    manager = QoSManager(clock=clock)
    for index in range(200):
        manager.submit("a")
        request = manager.next("a")
        assert request is not None
        clock.now += 50.0 if index in {10, 150} else 0.25
        manager.complete(request.id, ttft_seconds=0.1, output_tokens=4)
    latency = manager.compliance("a").times["latency"]
    assert (latency.count, latency.minimum, latency.maximum) == (200, 0.25, 50.0)
    assert latency.mean == pytest.approx((2 * 50 + 198 * 0.25) / 200)
    assert latency.percentiles == {0.5: 0.25, 0.9: 0.25, 0.95: 0.25, 0.99: 50.0}
    clock.now += 301.0
    assert manager.compliance("a").times == {}


def test_a_rate_of_requests_is_an_objective_while_requests_wait(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    manager.set_objective("a", requests_per_second=2.0)
    assert manager.requests_per_second_objective("a") == 2.0
    assert manager.compliance("a").rate_kept is None
    for _ in range(20):
        manager.submit("a")
    for _ in range(10):
        request = manager.next("a")
        assert request is not None
        clock.now += 1.0
        manager.complete(request.id)
    found = manager.compliance("a")
    assert (found.rate_kept, found.compliant) == (False, False)
    while (request := manager.next("a")) is not None:
        manager.complete(request.id)
    assert manager.compliance("a").rate_kept is not False
    with pytest.raises(InvalidInput):
        manager.set_objective("a", requests_per_second=0)


def test_guarantees_can_be_read() -> None:
    manager = QoSManager()
    manager.set_guarantee("a", "p0", 0.6, limit=0.8)
    manager.set_guarantee("b", "p1", 0.5)
    assert [(each.model, each.guaranteed_ppm, each.limit_ppm) for each in manager.guarantees("a")] == [("a", 600_000, 800_000)]
    assert [each.model for each in manager.guarantees(partition_id="p1")] == ["b"]
    assert len(manager.guarantees()) == 2


def test_expired_requests_do_not_fill_the_queue(clock: Clock) -> None:
    manager = QoSManager(QueuePolicy(most_queued=dict.fromkeys(Priority, 2)), clock=clock)
    manager.submit("a", deadline_seconds=1)
    manager.submit("a", deadline_seconds=1)
    with pytest.raises(QueueFull):
        manager.submit("a")
    clock.now = 2.0
    manager.submit("a")
    assert (manager.depth("a"), manager.expired) == (1, 2)


def test_classes_are_names_or_numbers(clock: Clock) -> None:
    manager = QoSManager(clock=clock)
    manager.submit("a", priority=2, payload="low")
    manager.submit("a", priority=9, payload="high")
    assert (manager.depth("a", 10), manager.depth("a", "low")) == (1, 1)
    assert [finish_next(manager) for _ in range(2)] == ["high", "low"]
