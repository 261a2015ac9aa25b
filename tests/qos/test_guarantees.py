import pytest

from aimgpu.qos.queueing.guarantees import Guarantee, check_guarantees
from aimgpu.qos.queueing.rate import SmoothedRate, TokenBucket


def give(model: str, guaranteed: int, limit: int | None = None, partition: str = "p0") -> Guarantee:
    return Guarantee(model=model, partition_id=partition, guaranteed_ppm=guaranteed, limit_ppm=limit)


def test_promises_that_fit_are_fine() -> None:
    fitting = [give("a", 400_000, 400_000), give("b", 600_000), give("c", 900_000, partition="p1")]
    assert check_guarantees(fitting) == ()


def test_more_than_the_whole_of_a_partition_is_refused() -> None:
    [problem] = check_guarantees([give("a", 600_000), give("b", 400_001)])
    assert "p0" in problem
    assert "100.0001%" in problem


def test_a_guarantee_above_the_same_models_limit_is_refused() -> None:
    [problem] = check_guarantees([give("a", 500_000, 400_000)])
    assert "above its limit" in problem


@pytest.mark.parametrize("wrong", [give("a", -1), give("a", 1_000_001), give("a", 0, 0), give("a", 0, 1_000_001)])
def test_nonsense_is_refused(wrong: Guarantee) -> None:
    assert check_guarantees([wrong])


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    bucket = TokenBucket.full(2.0, 3.0, 0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(100.0) == 0.0


def test_a_rate_is_unknown_until_enough_was_seen_and_right_after() -> None:
    rate = SmoothedRate(30.0)
    assert rate.read(0.0) is None
    rate.add(0.0)
    assert rate.read(1.0) is None
    for index in range(1, 400):
        rate.add(index * 0.25)
    assert rate.read(100.0) == pytest.approx(4.0, rel=0.05)
