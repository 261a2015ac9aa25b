"""Tenants whose kernels record when they ran, for ahead.py: `python -m benchmarks.isolation_h200.spin {server,hog}`.

Needs only the driver. A kernel occupies the whole GPU for a number of steps and stamps its first and its last moment with the
GPU's own clock, which all processes share. Orders as in workloads.py, and `CLOCK`: how that clock relates to the
host's.
"""

import argparse
import contextlib
import ctypes
import json
import random
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aimgpu.isolation.critical_signal import CriticalSignal

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 steps, .param .u64 starts, .param .u64 ends, .param .u64 place)
{
    .reg .u64 %rd<12>;
    .reg .u32 %r<4>;
    .reg .f32 %f<4>;
    .reg .pred %p<4>;
    ld.param.u64 %rd1, [steps];
    ld.param.u64 %rd2, [starts];
    ld.param.u64 %rd3, [ends];
    ld.param.u64 %rd4, [place];
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    shl.b64 %rd5, %rd4, 3;
    add.u64 %rd2, %rd2, %rd5;
    add.u64 %rd3, %rd3, %rd5;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mov.u64 %rd6, %globaltimer;
    atom.global.min.u64 %rd7, [%rd2], %rd6;
READY:
    cvt.rn.f32.u32 %f1, %r1;
    mov.f32 %f2, 0f3F7FFFFE;
    mov.f32 %f3, 0f3F000000;
STEP:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    sub.u64 %rd1, %rd1, 1;
    setp.ne.u64 %p2, %rd1, 0;
    @%p2 bra STEP;
    setp.lt.f32 %p3, %f1, 0f00000000;
    @%p3 st.global.u64 [%rd3], %rd1;
    @%p1 bra DONE;
    mov.u64 %rd8, %globaltimer;
    atom.global.max.u64 %rd9, [%rd3], %rd8;
DONE:
    ret;
}
"""
PLACES, THREADS, BLOCKS_PER_PROCESSOR, MULTIPROCESSORS = 1 << 15, 1024, 2, 16  # the last: a device attribute
TRIAL_STEPS, CLOCK_TRIALS, AHEAD = 200_000, 50, 8
STEPS_PER_REQUEST, STEP_MS, PAUSE_SECONDS = 10, 2.0, 0.05


class Card:
    """The GPU through the driver's own interface."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context, module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        processors = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuDeviceGetAttribute", ctypes.byref(processors), MULTIPROCESSORS, 0)
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        self.blocks = BLOCKS_PER_PROCESSOR * processors.value
        self._starts, self._ends = (self._allocate(byte) for byte in (0xFF, 0))
        self._place = 0

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 whatever the function takes
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} returned {code}")

    def _allocate(self, byte: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(8 * PLACES))
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(byte), ctypes.c_size_t(8 * PLACES))
        return pointer

    def launch(self, steps: int, blocks: int | None = None) -> int:
        """The place of its stamps."""
        place, self._place = self._place, self._place + 1
        values = [ctypes.c_uint64(steps), self._starts, self._ends, ctypes.c_uint64(place)]
        parameters = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
        shape = (blocks or self.blocks, 1, 1, THREADS, 1, 1)
        self.call("cuLaunchKernel", self._kernel, *map(ctypes.c_uint, shape), ctypes.c_uint(0), None, parameters, None)
        return place

    def wait(self) -> None:
        self.call("cuCtxSynchronize")

    def stamps(self) -> list[tuple[int, int]]:
        """Of all launches so far, all of them finished."""
        columns = []
        for pointer in (self._starts, self._ends):
            column = (ctypes.c_uint64 * max(1, self._place))()
            self.call("cuMemcpyDtoH_v2", column, pointer, ctypes.c_size_t(ctypes.sizeof(column)))
            columns.append(list(column)[: self._place])
        return list(zip(*columns, strict=True))

    def steps_for(self, milliseconds: float) -> int:
        """Tried with another number of blocks, so that it is another launch for whoever learns lengths."""
        for _ in range(2):  # the first may load the kernel
            place = self.launch(TRIAL_STEPS, self.blocks - 1)
            self.wait()
        start, end = self.stamps()[place]
        return max(1, round(TRIAL_STEPS * milliseconds * 1e6 / max(1, end - start)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["server", "hog"])
    parser.add_argument("--signal", help="region:tenant whose requests are announced")
    parser.add_argument("--seed", type=int, help="a hog's launches, in milliseconds")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS)
    parser.add_argument("--size", help="not used")
    arguments = parser.parse_args()
    if arguments.kind == "hog":
        run_hog(Card(), arguments.seed)
    else:
        run_server(Card(), arguments)


def orders() -> Iterator[list[str]]:
    print("READY", flush=True)
    while line := sys.stdin.readline():
        yield line.split()


def run_hog(card: Card, milliseconds: float) -> None:
    steps = card.steps_for(milliseconds)
    for _ in range(3):
        card.launch(steps)
    card.wait()
    for _ in orders():
        print("BEGUN", flush=True)
        first = card.launch(steps)
        last = first
        while not select.select([sys.stdin], [], [], 0)[0]:
            last = card.launch(steps)
            if (last - first) % AHEAD == AHEAD - 1:
                card.wait()
        card.wait()
        sys.stdin.readline()
        print(json.dumps({"launches": card.stamps()[first : last + 1]}), flush=True)


def run_server(card: Card, arguments: argparse.Namespace) -> None:
    steps = card.steps_for(STEP_MS)
    path, _, tenant = (arguments.signal or "").partition(":")
    signal: Any = CriticalSignal.open(Path(path), tenant) if tenant else contextlib.nullcontext()
    for order, *rest in orders():
        if order == "CLOCK":
            print(json.dumps(read_clock(card)), flush=True)
            continue
        dice, requests = random.Random(1), []  # noqa: S311 pauses
        until = time.monotonic() + float(rest[0])
        while time.monotonic() < until:
            arrived = time.monotonic_ns()
            with signal:
                places = [serve_step(card, steps) for _ in range(STEPS_PER_REQUEST)]
            requests.append((arrived, places[0], places[-1]))
            time.sleep(dice.expovariate(1 / arguments.pause))
        stamps = card.stamps()
        result = [(arrived, stamps[first][0], stamps[last][1]) for arrived, first, last in requests]
        print(json.dumps({"requests": result}), flush=True)


def serve_step(card: Card, steps: int) -> int:
    place = card.launch(steps)
    card.wait()
    return place


def read_clock(card: Card) -> dict[str, int]:
    """On an idle GPU: one moment by both clocks, and how far they may be apart."""
    trials = []
    for _ in range(CLOCK_TRIALS):
        before = time.monotonic_ns()
        place = card.launch(1, 1)
        card.wait()
        trials.append((before, time.monotonic_ns(), place))
    before, after, place = min(trials, key=lambda trial: trial[1] - trial[0])
    return {"host_ns": (before + after) // 2, "device_ns": card.stamps()[place][0], "error_ns": (after - before + 1) // 2}


if __name__ == "__main__":
    main()
