"""What fails in every round is in the log, and does not fill it."""

import logging

from aimgpu.logs import RepeatFilter


def record(text: str, *, level: int = logging.ERROR, error: Exception | None = None, **data: object) -> logging.LogRecord:
    made = logging.LogRecord("room", level, "file", 1, text, (), (type(error), error, None) if error else None)
    made.data = data
    return made


def test_an_error_that_repeats_is_logged_again_after_ten_minutes_with_how_often_it_came() -> None:
    clock = [0.0]
    seen = RepeatFilter(lambda: clock[0])
    passed = []
    for _ in range(86_400):  # a day, one a second
        one = record("watchdog.failed", error=OSError("nvidia-smi hangs"), gpu=0)
        if seen.filter(one):
            passed.append(one)
        clock[0] += 1.0
    assert len(passed) == 144
    assert [vars(one)["data"].get("repeated") for one in passed[:2]] == [None, 599]
    assert vars(passed[1])["data"]["gpu"] == 0


def test_other_errors_and_what_is_no_error_pass() -> None:
    seen = RepeatFilter(lambda: 0.0)
    assert [seen.filter(record("a.failed", error=OSError(text))) for text in ("one", "two", "one")] == [True, True, False]
    assert [seen.filter(record("a.failed", gpu=number)) for number in (0, 1, 0)] == [True, True, False]
    assert all(seen.filter(record("wake.ended", level=logging.INFO)) for _ in range(3))


def test_what_it_remembers_is_bounded() -> None:
    seen = RepeatFilter(lambda: 0.0)
    assert all(seen.filter(record("a.failed", number=number)) for number in range(5000))
    assert len(seen._seen) == 1000
