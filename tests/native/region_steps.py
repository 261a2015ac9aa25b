"""Records what the processes of one tenant do to their region, step by step in an order of the dice, and replays it.

native/steps.h says which steps there are. Exactly one process moves at a time; the daemon is the project's own Region, which
moves between two steps of the others, and may free the place of a live one by mistake. Any of them may die before any step, or
become another program.
"""

import ctypes
import fcntl
import mmap
import os
import random
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aimgpu.errors import ShareInUse
from aimgpu.isolation import building, layout
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB

PROGRAM = Path(__file__).parent / "programs" / "region_steps.c"
MODEL = building.find_sources() / "model"
UNIT = 64 * MIB
MOST_CAP = 8
PLACES = {0: 5, 1: 2}  # by what a context takes: with contexts few places are left, so that they run out
OPERATIONS, STARTS = 6, {0: 5, 1: 8}  # of a process; processes in all
S_LOCK, S_UNLOCK, DEATH, EXEC = 1, 2, 50, 51
D_LOCKED, D_FREES, D_CAP, D_KEPT, D_DONE, D_MISTAKE = 60, 61, 62, 63, 64, 65


class Shared(ctypes.Structure):
    """As region_steps.c lays it out."""

    _fields_ = (
        ("turn", ctypes.c_int),
        ("wants", ctypes.c_int * 4),
        ("dies_in", ctypes.c_int * 4),
        ("count", ctypes.c_uint),
        ("steps", ctypes.c_ubyte * 4 * (1 << 14)),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model says of a recording."""

    is_accepted: bool
    broken: tuple[str, ...]  # what does not hold on the way


def compile_program(target: Path, sources: Path) -> Path:
    """The program that is recorded, with the C as it lies in `sources`."""
    flags = ("-std=gnu11", "-O0", "-g", "-w", "-DAIM_STEPS", f"-I{building.find_sources()}")
    files = sorted(map(str, sources.glob("*.c")))
    subprocess.run(["cc", *flags, "-o", str(target), str(PROGRAM), *files, "-lpthread", "-ldl"], check=True)
    return target


def compile_model(folder: Path, *, context: int) -> Path:
    """The model as a program that replays the recording that RECORDED names."""
    target = folder / f"replay-{context}"
    folder = folder / f"model-{context}"
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).write_text(path.read_text())
    bounds = ("-DREPLAY", "-DDEVICES=1", f"-DPLACES={PLACES[context]}", f"-DMOST_CAP={MOST_CAP}", f"-DCONTEXT={context}")
    plenty = ("-DOPERATIONS=200", "-DROUNDS=200", *([f"-DHIGH={PLACES[context]}"] if context else []))
    subprocess.run(["spin", "-a", *bounds, *plenty, "region.pml"], cwd=folder, check=True, capture_output=True)
    flags = ("-O0", "-w", "-DSAFETY", "-DMEMLIM=1000")
    subprocess.run(["gcc", *flags, "-o", str(target), "pan.c"], cwd=folder, check=True, capture_output=True)
    return target


def replay(model: Path, recording: bytes) -> Verdict:
    """Tries every order of the steps that are not recorded."""
    file = model.with_suffix(".steps")
    file.write_bytes(recording)
    command = [str(model), "-m100000", "-w20", "-E"]
    environment = {**os.environ, "RECORDED": str(file)}
    done = subprocess.run(command, cwd=model.parent, env=environment, check=True, capture_output=True, text=True)
    said = [
        line.partition("violated ")[2].partition(" (at depth")[0] for line in done.stdout.splitlines() if "violated" in line
    ]
    assert "max search depth" not in done.stdout, done.stdout
    return Verdict(is_accepted="(at==0)" in said, broken=tuple(sorted({text for text in said if text != "(at==0)"})))


def record(folder: Path, program: Path, seed: int, *, context: int) -> bytes:
    """Runs processes in turns that follow from the seed, until each has died."""
    path = folder / f"{seed}.region"
    region = Region.create(path, device_bytes=GIB, device="")
    cap = UNIT * (7 if context else 3)
    region.admit(TenantLimits(name="tenant", cap_bytes=cap, rounding_bytes=1, context_bytes=context * UNIT))
    others = crowd(region, PLACES[context]) if context else None
    file = folder / f"{seed}.shared"
    file.write_bytes(bytes(ctypes.sizeof(Shared)))
    with file.open("r+b") as opened:
        shared = Shared.from_buffer(mmap.mmap(opened.fileno(), 0))
    _Recorder(region, shared, program, {"AIMGPU_STEPS": str(file), "AIMGPU_STEPS_PLACES": str(PLACES[context])}, seed).run(
        context, cap // UNIT
    )
    recording = b"".join(bytes(shared.steps[at]) for at in range(shared.count))
    if others is not None:
        others.close()
    region.close()
    path.unlink()
    file.unlink()
    return recording


def crowd(region: Region, places: int) -> IO[bytes]:
    """All places but the first few are taken by processes that live as long as the file that is returned is open."""
    tenant = region.tenant_of("tenant")
    tenant.process_high = layout.PROCESSES
    opened = region.path.open("r+b")
    fcntl.fcntl(
        opened,
        fcntl.F_OFD_SETLK,
        struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, layout.LIFE_OFFSET + places, layout.PROCESSES - places, 0),
    )
    for slot in tenant.processes[places:]:
        slot.state, slot.life_locked = layout.ACTIVE, 1
    return opened


class _Recorder:
    def __init__(self, region: Region, shared: Shared, program: Path, environment: dict[str, str], seed: int) -> None:
        self.region, self.shared, self.program = region, shared, program
        self.environment = {**environment, "AIMGPU_REGION": str(region.path), "AIMGPU_TENANT": "tenant"}
        self.dice = random.Random(seed)
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.has_lock = 0
        self.places = int(environment["AIMGPU_STEPS_PLACES"])

    def run(self, context: int, cap: int) -> None:
        starts = STARTS[context]
        self._write(D_LOCKED, 0, 1)  # the cap that the test begins with
        self._write(D_CAP, 0, cap)
        self._write(D_KEPT, 0, 1)
        self._write(D_DONE, 0, 0)
        waiting = [1, 2, 3]
        try:
            while self.alive or starts > 0:
                if waiting and starts > 0 and (not self.alive or self.dice.random() < 0.3):
                    starts -= 1
                    self._start(waiting.pop(0), context)
                died = self._step()
                waiting += [died] if died else []
                if self.dice.random() < 0.04:
                    self._act_as_daemon()
        finally:
            for process in self.alive.values():
                process.kill()
                process.wait()

    def _start(self, number: int, context: int) -> None:
        steps = self.dice.choice((0, 0, 10, 25, 50, 100)) + self.dice.randrange(10)
        self.shared.dies_in[number] = 10 * steps if context else steps  # each sum looks at all places
        command = [str(self.program), str(self.dice.randrange(1 << 20)), str(OPERATIONS), str(context)]
        environment = {**self.environment, "AIMGPU_STEPS_AS": str(number)}
        self.alive[number] = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def _step(self) -> int:
        """One step of one process; its number, where it died."""
        shared = self.shared
        until = time.monotonic() + 60
        while not all(shared.wants[number] for number in self.alive):
            assert time.monotonic() < until, "a process neither moves nor ends"
            time.sleep(0)
        number = self.dice.choice(sorted(self.alive))
        from_step = shared.count
        shared.turn = number
        while shared.turn == number:
            if self.alive[number].poll() is not None:  # the system has what it held
                del self.alive[number]
                shared.wants[number] = shared.turn = 0
                self.has_lock = 0 if self.has_lock == number else self.has_lock
                return number
            time.sleep(0)
        for at in range(from_step, shared.count):
            who, step, _, value = shared.steps[at]
            if step == S_LOCK and value:
                self.has_lock = who
            elif step in (S_UNLOCK, EXEC) and self.has_lock == who:
                self.has_lock = 0
        return 0

    def _act_as_daemon(self) -> None:
        if self.has_lock and self.dice.random() < 0.9:
            return
        before = self._places()
        places = [at for at, state in enumerate(before[: self.places]) if state == layout.ACTIVE]
        if places and self.dice.random() < 0.2:
            at = self.dice.choice(places)
            self.region.tenant_of("tenant").processes[at].state = layout.FREE
            self._write(D_MISTAKE, at, 0)
            return
        self._write(D_LOCKED, 0, int(not self.has_lock))
        wanted = self.dice.choice((None, *range(1, MOST_CAP + 1)))
        kept = 1
        if wanted is None:
            self.region.reap()
        else:
            try:
                self.region.resize("tenant", wanted * UNIT)
            except ShareInUse:
                kept = 0
        for at, (was, now) in enumerate(zip(before, self._places(), strict=True)):
            if was != now:
                self._write(D_FREES, at, 0)
        if wanted is not None:
            self._write(D_CAP, 0, wanted)
            self._write(D_KEPT, 0, kept)
        self._write(D_DONE, 0, 0)

    def _places(self) -> list[int]:
        return [slot.state for slot in self.region.tenant_of("tenant").processes]

    def _write(self, step: int, place: int, value: int) -> None:
        for at, number in enumerate((0, step, place, value)):
            self.shared.steps[self.shared.count][at] = number
        self.shared.count += 1
