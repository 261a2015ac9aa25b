"""The daemon's log: one JSON object per line, whatever was logged."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.logs import JsonFormatter, configure_logging

values = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
data = st.dictionaries(st.from_regex(r"\A[a-z_]{1,10}\Z").filter(lambda name: name not in {"time", "level", "event"}), values)


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("tests.logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)


def format_one(event: str, level: int = logging.INFO, **extra: Any) -> str:
    record = logging.LogRecord("a", level, "a.py", 1, event, (), None)
    record.__dict__.update(extra)
    return JsonFormatter().format(record)


@settings(max_examples=examples(40))
@given(st.text(max_size=40), data)
def test_a_record_is_one_line_of_json_with_its_event_and_data(event: str, given_data: dict[str, Any]) -> None:
    line = format_one(event, data=given_data)
    assert "\n" not in line
    found = json.loads(line)
    assert found["event"] == event
    assert found["level"] == "info"
    assert {name: found[name] for name in given_data} == given_data


def test_values_that_json_does_not_have_are_logged_as_text() -> None:
    found = json.loads(format_one("e", data={"path": Path("/a"), "error": ValueError("bad"), "names": frozenset({"x"})}))
    assert (found["path"], found["error"]) == ("/a", "bad")
    assert "x" in found["names"]


def test_times_are_utc_to_the_millisecond() -> None:
    assert json.loads(format_one("e", created=1.25))["time"] == "1970-01-01T00:00:01.250+00:00"


def fail() -> None:
    raise RuntimeError("broke\nin two lines")


def test_an_exception_is_in_the_line_with_its_traceback(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    try:
        fail()
    except RuntimeError:
        logger.exception("step.failed", extra={"data": {"step": 3}})
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["event"], found["step"]) == ("error", "step.failed", 3)
    assert "RuntimeError: broke\nin two lines" in found["exception"]
    assert "Traceback" in found["exception"]


def test_arguments_are_put_into_the_event(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    logger.warning("took %d of %s", 3, "chat")
    assert json.loads(stream.getvalue())["event"] == "took 3 of chat"


def test_configuring_twice_writes_every_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging()
        configure_logging()
        logging.getLogger("any").info("once", extra={"data": {"n": 1}})
        logging.getLogger("any").debug("never")
        lines = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert [json.loads(line)["event"] for line in lines] == ["once"]
