"""A log never fills the disk, whatever its engine writes."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aimgpu.daemon.log_tail import follow_log
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.engines.launchers.log_bound import LogBounds, bound_log
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import Command

KIB = 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a tmpfs, where one is
SMALL = LogBounds(largest_bytes=256 * KIB, kept_bytes=64 * KIB)
WaitUntil = Callable[..., None]
# Numbered lines, a pause now and then, the longer while nobody has come to cut the log, and a last word.
WRITER = """
import os, sys, time
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"line {number} {'x' * 40}\\n")
    if number % 500 == 0:
        sys.stdout.flush()
        time.sleep(0.002)
        while os.fstat(1).st_size > 2 << 20:
            time.sleep(0.002)
print("the end", flush=True)
time.sleep(3600)
"""


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system that can take blocks off the beginning of a file, where tmp_path is on one, and one that cannot."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no /dev/shm here")
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        yield Path(name)


def start_writer(launcher: ProcessLauncher, folder: Path, lines: int) -> Path:
    command = Command(argv=(sys.executable, "-c", WRITER, str(lines)), environment={"PYTHONUNBUFFERED": ""})
    launcher.start("writer-0", command, folder / "run")
    return folder / "run" / LOG_NAME


def test_a_log_stays_short_while_a_process_writes_and_its_last_lines_are_there(
    launcher: ProcessLauncher, folder: Path, wait_until: WaitUntil
) -> None:
    log = start_writer(launcher, folder, 200_000)
    cuts, largest = 0, 0

    def ended() -> bool:
        nonlocal cuts, largest
        largest = max(largest, log.stat().st_size)
        cuts += bound_log(log, SMALL)
        return launcher.last_lines(folder / "run", 1) == ("the end",)

    wait_until(ended, "the writer has written everything")
    bound_log(log, SMALL)
    assert cuts > 2
    assert log.stat().st_size <= SMALL.largest_bytes
    assert largest < 200_000 * 50, "never the whole of it"
    numbers = [int(found) for found in re.findall(r"^line (\d+) x{40}$", log.read_text(), re.MULTILINE)]
    assert numbers[-1] == 199_999
    if folder.parent != SHARED_MEMORY:  # there, what was written in the instant of a cut may stand elsewhere
        last = numbers[-500:]
        assert last == list(range(last[0], last[0] + 500)), "the last part is whole"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_is_short_missing_or_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / LOG_NAME
    assert not bound_log(log, SMALL)
    log.write_bytes(b"x" * SMALL.largest_bytes)
    assert not bound_log(log, SMALL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * 2 * SMALL.largest_bytes)
    log.unlink()
    log.symlink_to(elsewhere)
    assert not bound_log(log, SMALL)
    assert elsewhere.stat().st_size == 2 * SMALL.largest_bytes


def test_who_follows_a_log_goes_on_when_it_is_cut(folder: Path) -> None:
    """Also where it has grown beyond the old length again before the next look."""
    log = folder / LOG_NAME
    log.write_text("")
    written = iter(range(1_000_000))
    followed: list[str] = []

    def write(lines: int) -> None:
        with log.open("a") as file:
            file.writelines(f"line {next(written)} {'x' * 40}\n" for _ in range(lines))

    async def follow(rounds: int) -> None:
        pieces = follow_log(log, 10, lambda: rounds > 0)
        async for text in pieces:
            followed.append(text)
            rounds -= 1
            if rounds > 0:
                write(2000 if rounds % 2 else 8000)
            if rounds % 3 == 0:
                bound_log(log, SMALL)

    asyncio.run(asyncio.wait_for(follow(40), 60))
    numbers = [int(found) for found in re.findall(r"^line (\d+) ", "".join(followed), re.MULTILINE)]
    assert numbers[-1] == next(written) - 1
    assert numbers == sorted(set(numbers)), "nothing twice, nothing out of order"
    assert log.stat().st_size < len("".join(followed))
