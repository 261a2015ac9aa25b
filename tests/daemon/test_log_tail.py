"""The end of a log: the last lines, what follows them, and a log that is cut, replaced or removed meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.daemon import log_tail
from aimgpu.daemon.log_tail import follow_log, read_tail

lines_of_text = st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30), max_size=30)


@pytest.fixture(autouse=True)
def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_LOOK_AGAIN_SECONDS", 0.0)


async def follow(path: Path, lines: int, acts: list[Callable[[], object]]) -> str:
    """Everything sent while the acts happen, one whenever there is nothing more to read; after the last the model is gone."""
    left = list(acts)

    def still_there() -> bool:
        if left:
            left.pop(0)()
            return True
        return False

    pieces: AsyncIterator[str] = follow_log(path, lines, still_there)
    return "".join([piece async for piece in pieces])


@settings(max_examples=examples(20))
@given(lines_of_text, st.integers(0, 40))
def test_the_last_lines_are_those_at_the_end(tmp_path_factory: pytest.TempPathFactory, texts: list[str], count: int) -> None:
    path = tmp_path_factory.getbasetemp() / "tail.log"
    path.write_text("".join(f"{text}\n" for text in texts))
    wanted = texts[-count:] if count else []
    assert read_tail(path, count) == "".join(f"{text}\n" for text in wanted)


def test_of_a_log_that_is_not_there_the_end_is_empty(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "none.log", 10) == ""


def test_a_long_log_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_text("x" * 10_000_000 + "\nlast\n")
    assert len(read_tail(path, 2)) <= 2 * 400
    assert read_tail(path, 1) == "last\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[31mred\x1b[0m\n", "\ufffd[31mred\ufffd[0m\n"),
        (b"\xff\xfe\n", "\ufffd\ufffd\n"),
        (b"a\tb\n", "a\tb\n"),
        (b"\x00\x07bell\n", "\ufffd\ufffdbell\n"),
        ("größe ✓\n".encode(), "größe ✓\n"),
    ],
)
def test_whatever_an_engine_wrote_can_be_printed(tmp_path: Path, written: bytes, shown: str) -> None:
    """Else the log of a model could move the cursor of the terminal that it is read on."""
    path = tmp_path / "a.log"
    path.write_bytes(written)
    assert read_tail(path, 5) == shown


@settings(max_examples=examples(20))
@given(st.lists(lines_of_text, max_size=4), st.integers(0, 5))
def test_what_is_written_meanwhile_follows_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, written: list[list[str]], lines: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "follow.log"
    path.write_text("before\n")

    def append(texts: list[str]) -> None:
        with path.open("a") as file:
            file.writelines(f"{text}\n" for text in texts)

    acts: list[Callable[[], object]] = [lambda texts=texts: append(texts) for texts in written]  # type: ignore[misc]
    found = asyncio.run(follow(path, lines, acts))
    expected = "".join(f"{text}\n" for texts in written for text in texts)
    assert found == ("before\n" if lines else "") + expected


def test_a_log_whose_beginning_is_cut_off_is_followed_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    text = "".join(f"line {number} of many\n" for number in range(200))
    path.write_text(text)
    later = "written after the cut\n"
    found = asyncio.run(follow(path, 1, [lambda: path.write_text(text[2000:] + later)]))
    assert found == "line 199 of many\n" + later


def test_a_log_that_is_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old " * 100 + "\n")
    found = asyncio.run(follow(path, 0, [lambda: path.write_text("new start\n"), lambda: path.write_text("new start\nmore\n")]))
    assert found == "new start\nmore\n"


def test_a_log_that_vanishes_and_comes_back_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    found = asyncio.run(follow(path, 5, [path.unlink, lambda: None, lambda: path.write_text("one\ntwo\n")]))
    assert found == "one\ntwo\n"


def test_a_log_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "late.log"
    assert asyncio.run(follow(path, 5, [lambda: None, lambda: path.write_text("here\n")])) == "here\n"


def test_everything_is_sent_although_the_model_is_gone(tmp_path: Path) -> None:
    """More than one piece is left when it ends: all of them come."""
    path = tmp_path / "a.log"
    path.write_text("")
    text = "x" * 300_000 + "\nend\n"
    assert asyncio.run(follow(path, 0, [lambda: path.write_text(text)])) == text
