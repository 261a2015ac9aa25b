"""Sequences of launches against the gate itself, on a clock of its own: how much is queued at the worst moment.

At any moment a critical request may begin, so each moment counts. One launch is always ahead of it, since it cannot be
interrupted: the longest of those in flight is not counted, the others are. A sequence is a list of moves, each a line of
programs/gate_on_a_clock.c.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from aimgpu.domain import Priority
from aimgpu.isolation import building, layout
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB

PROGRAMS = Path(__file__).parent / "programs"
MICROSECOND, MILLISECOND = 1_000, 1_000_000
MOST_AHEAD = 8  # launches that may be in flight together, by lengths.c
WRAPPED = ("aim_now", "clock_nanosleep", "syscall")
LENGTHS = (2, 10, 20, 100, 400, 1_000, 5_000, 20_000, 80_000, 400_000)  # microseconds
PAUSES = (0, 50, 1_000, 30_000, 2_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The worst moment of a sequence."""

    queued_ns: int  # beside the longest launch in flight
    unfinished: int  # launches, with the one that runs
    idle_ns: int  # of the device, while launches waited


def kernels(functions: int = 3) -> st.SearchStrategy[str]:
    return st.builds(
        "k {} {} {} {}".format,
        st.integers(0, functions - 1),
        st.integers(0, 3),
        st.sampled_from(LENGTHS).map(lambda length: length * MICROSECOND),
        st.sampled_from((1, 2, 3, 5, 10, 40, 300)),
    )


def graphs() -> st.SearchStrategy[str]:
    lengths = st.sampled_from(LENGTHS).map(lambda length: length * MICROSECOND)
    return st.builds("g {} {} {}".format, st.integers(0, 2), lengths, st.sampled_from((1, 2, 5, 40)))


MOVES = st.lists(
    st.one_of(
        kernels(),
        graphs(),
        st.integers(0, 2).map("x {}".format),
        st.just("u"),
        st.sampled_from(PAUSES).map(lambda pause: f"p {pause * MICROSECOND}"),
    ),
    min_size=1,
    max_size=30,
)


class Gate:
    """The gate of a best-effort tenant beside a critical one that is there and idle."""

    def __init__(self, folder: Path) -> None:
        driver, program = folder / "libcuda.so.1", folder / "gate_on_a_clock"
        compile_c("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, PROGRAMS / "virtual_driver.c")
        sources = sorted(building.find_sources().glob("*.c"))
        wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
        compile_c(
            "-rdynamic",
            *wraps,
            "-o",
            program,
            PROGRAMS / "gate_on_a_clock.c",
            *sources,
            driver,
            f"-Wl,-rpath,{folder}",
            "-lpthread",
        )
        self._region = Region.create(folder / "clock.region", device_bytes=80 * GIB, device="GPU-" + "a0" * 16)
        for name, priority in (("critical", Priority.HIGH), ("hog", Priority.LOW)):
            self._region.admit(TenantLimits(name=name, cap_bytes=1 * GIB, priority=priority))
        critical = self._region._layout.tenants[0]
        critical.process_high, critical.processes[0].state = 1, layout.ACTIVE
        environment = {"AIMGPU_REGION": str(self._region.path), "AIMGPU_TENANT": "hog"}
        self._process = subprocess.Popen(
            [str(program)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def play(self, moves: list[str]) -> Worst:
        hog = self._region._layout.tenants[1]
        hog.longest_launch_ns = hog.overrun_ns = hog.process_turn = hog.process_high = 0  # each begins as the first
        for slot in hog.processes:
            slot.state = layout.FREE
        header = self._region.header
        header.gap_ns = header.turn = header.turn_until_ns = 0
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(moves) + "\n")
        self._process.stdin.flush()
        queued, unfinished, idle = map(int, self._process.stdout.readline().split())
        return Worst(queued_ns=queued, unfinished=unfinished, idle_ns=idle)

    def close(self) -> None:
        self._process.communicate()
        self._region.close()


def compile_c(*arguments: object) -> None:
    command = ["cc", "-std=gnu11", "-O1", "-g", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def longest(moves: list[str]) -> int:
    """Nanoseconds of the longest launch in a sequence."""
    words = [move.split() for move in moves]
    return max((int(word[-2]) for word in words if word[0] in "kg"), default=0)
