"""A tenant that does what it is told, one line of commands at a time; it answers `ok` and what the command returned.

Streams and contexts are numbered in the order in which they were made; stream 0 is the default stream. A launch may name the
length of its kernel in microseconds, which the simulated driver takes from the kernel's handle.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

LIB = ctypes.CDLL("libcuda.so.1")
NONE = ctypes.c_void_p(None)
COLLECTIVE = 1 << 40
STREAMS: list[ctypes.c_void_p] = [NONE]
CONTEXTS: list[ctypes.c_void_p] = []
POINTERS: list[ctypes.c_uint64] = []
POOLS: list[ctypes.c_void_p] = []
GRAPHS: list[ctypes.c_void_p] = []
HANDLES: list[ctypes.c_uint64] = []


def check(code: int) -> None:
    if code != 0:
        raise SystemExit(code)


def launch(count: int, microseconds: int = 0, stream: int = 0) -> None:
    for _ in range(count):
        kernel = ctypes.c_void_p(microseconds or None)
        check(LIB.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, STREAMS[stream], NONE, NONE))


def serve(steps: int, pause_ms: int, requests: int) -> None:
    for _ in range(requests):
        for _ in range(steps):
            launch(1)
            LIB.cuCtxSynchronize()
        time.sleep(pause_ms / 1000)


def threads(count: int, launches: int, microseconds: int = 0) -> None:
    """Each thread on a stream of its own."""
    first = len(STREAMS)
    for _ in range(count):
        stream()
    running = [threading.Thread(target=launch, args=(launches, microseconds, first + number)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def timed(count: int, microseconds: int = 0) -> int:
    """How long the calls took, in milliseconds."""
    begun = time.monotonic()
    launch(count, microseconds)
    return round(1000 * (time.monotonic() - begun))


def collective(number: int, microseconds: int, stream: int = 0) -> None:
    launch(1, COLLECTIVE * number + microseconds, stream)
    check(LIB.cuStreamSynchronize(STREAMS[stream]))


def stream(flags: int = 1) -> int:
    STREAMS.append(ctypes.c_void_p())
    check(LIB.cuStreamCreate(ctypes.byref(STREAMS[-1]), flags))
    return len(STREAMS) - 1


def streams(count: int) -> int:
    """How many of so many streams could be made."""
    made = [ctypes.c_void_p() for _ in range(count)]
    codes = [LIB.cuStreamCreateWithPriority(ctypes.byref(one), 1, 0) for one in made]
    STREAMS.extend(one for one, code in zip(made, codes, strict=True) if code == 0)
    return codes.count(0)


def destroy(number: int) -> None:
    check(LIB.cuStreamDestroy_v2(STREAMS[number]))


def sync(number: int = -1) -> None:
    check(LIB.cuCtxSynchronize() if number < 0 else LIB.cuStreamSynchronize(STREAMS[number]))


def query(number: int, times: int = 1) -> int:
    return int([LIB.cuStreamQuery(STREAMS[number]) for _ in range(times)][-1])


def poll(number: int, milliseconds: int) -> None:
    """As a thread that waits for a copy on a side stream does."""
    end = time.monotonic() + milliseconds / 1000
    while time.monotonic() < end:
        LIB.cuStreamQuery(STREAMS[number])
        time.sleep(0.001)


def poll_event(number: int, milliseconds: int) -> None:
    """As a thread that waits for an event of a side stream does."""
    event = ctypes.c_void_p()
    check(LIB.cuEventCreate(ctypes.byref(event), 0))
    check(LIB.cuEventRecord(event, STREAMS[number]))
    end = time.monotonic() + milliseconds / 1000
    while time.monotonic() < end:
        LIB.cuEventQuery(event)
        time.sleep(0.001)


def capture(count: int, number: int = 0) -> None:
    begin(number)
    launch(count, 0, number)
    finish(number)


def begin(number: int) -> None:
    check(LIB.cuStreamBeginCapture_v2(STREAMS[number], 0))


def finish(number: int) -> None:
    GRAPHS.append(ctypes.c_void_p())
    check(LIB.cuStreamEndCapture(STREAMS[number], ctypes.byref(GRAPHS[-1])))


def context(device: int = 0) -> int:
    CONTEXTS.append(ctypes.c_void_p())
    check(LIB.cuCtxCreate_v2(ctypes.byref(CONTEXTS[-1]), 0, device))
    return len(CONTEXTS) - 1


def enter(number: int) -> None:
    check(LIB.cuCtxSetCurrent(CONTEXTS[number]))


def primary(device: int) -> None:
    made = ctypes.c_void_p()
    check(LIB.cuDevicePrimaryCtxRetain(ctypes.byref(made), device))
    check(LIB.cuCtxSetCurrent(made))


def contexts(count: int) -> int:
    """How many of so many contexts could be made."""
    made = [ctypes.c_void_p() for _ in range(count)]
    codes = [LIB.cuCtxCreate_v2(ctypes.byref(one), 0, 0) for one in made]
    CONTEXTS.extend(one for one, code in zip(made, codes, strict=True) if code == 0)
    return codes.count(0)


def destroy_context(number: int) -> None:
    check(LIB.cuCtxDestroy_v2(CONTEXTS[number]))


def destroy_primary() -> int:
    """A call that the driver refuses: a primary context is released."""
    made = ctypes.c_void_p()
    check(LIB.cuCtxGetCurrent(ctypes.byref(made)))
    return int(LIB.cuCtxDestroy_v2(made))


def copy(count: int, stream: int = 0) -> None:
    """Within the device."""
    for _ in range(count):
        check(LIB.cuMemcpyDtoDAsync_v2(ctypes.c_uint64(8), ctypes.c_uint64(8), ctypes.c_size_t(1 << 30), STREAMS[stream]))


def clear(count: int, stream: int = 0) -> None:
    for _ in range(count):
        check(LIB.cuMemsetD8Async(ctypes.c_uint64(8), 0, ctypes.c_size_t(1 << 30), STREAMS[stream]))


def keep(function: Callable[..., int], *arguments: object) -> int:
    """Its code; what it allocated is kept."""
    got = ctypes.c_uint64()
    code = function(ctypes.byref(got), *arguments)
    if code == 0:
        POINTERS.append(got)
    return code


def allocate(mib: int) -> int:
    return keep(LIB.cuMemAlloc_v2, ctypes.c_size_t(mib << 20))


def allocate_small(kib: int) -> int:
    return keep(LIB.cuMemAlloc_v2, ctypes.c_size_t(kib << 10))


def rest(milliseconds: int) -> None:
    time.sleep(milliseconds / 1000)


def allocate_on(mib: int, number: int) -> int:
    """Ordered by the stream."""
    return keep(LIB.cuMemAllocAsync, ctypes.c_size_t(mib << 20), STREAMS[number])


def free(number: int = -1) -> int:
    return int(LIB.cuMemFree_v2(POINTERS.pop(number)))


def free_on(number: int, pointer: int = -1) -> int:
    return int(LIB.cuMemFreeAsync(POINTERS.pop(pointer), STREAMS[number]))


def pool(place: int = 1, device: int = 0, kind: int = 1) -> int:
    POOLS.append(ctypes.c_void_p())
    where = (ctypes.c_int * 32)(kind, 0, place, device)
    return int(LIB.cuMemPoolCreate(ctypes.byref(POOLS[-1]), ctypes.byref(where)))


def allocate_from(mib: int, number: int = -1) -> int:
    return keep(LIB.cuMemAllocFromPoolAsync, ctypes.c_size_t(mib << 20), POOLS[number], NONE)


def create(mib: int) -> int:
    HANDLES.append(ctypes.c_uint64())
    where = (ctypes.c_int * 32)(1, 0, 1, 0)
    return int(LIB.cuMemCreate(ctypes.byref(HANDLES[-1]), ctypes.c_size_t(mib << 20), where, ctypes.c_uint64(0)))


def export() -> int:
    return int(LIB.cuMemExportToShareableHandle(ctypes.byref(ctypes.c_uint64()), HANDLES[-1], 1, ctypes.c_uint64(0)))


def release() -> int:
    return int(LIB.cuMemRelease(HANDLES.pop()))


def destroy_pool(number: int = -1) -> int:
    return int(LIB.cuMemPoolDestroy(POOLS.pop(number)))


def destroy_graph(number: int = -1) -> int:
    return int(LIB.cuGraphDestroy(GRAPHS.pop(number)))


def limit(which: int, kib: int) -> int:
    return int(LIB.cuCtxSetLimit(which, ctypes.c_size_t(kib << 10)))


def limit_count(which: int, count: int) -> int:
    return int(LIB.cuCtxSetLimit(which, ctypes.c_size_t(count)))


def green(device: int = 0) -> int:
    return int(LIB.cuGreenCtxCreate(ctypes.byref(ctypes.c_void_p()), NONE, device, 0))


def total() -> int:
    """MiB that the program is shown."""
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    check(LIB.cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(total_bytes)))
    return total_bytes.value >> 20


def fork_while_allocating(children: int) -> int:
    """Forks while other threads allocate; returns how many children could not allocate and free, or died."""
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            got = [ctypes.c_uint64() for _ in range(40)]
            for one in got:
                LIB.cuMemAlloc_v2(ctypes.byref(one), ctypes.c_size_t(1))
            for one in got:
                LIB.cuMemFree_v2(one)

    workers = [threading.Thread(target=churn) for _ in range(4)]
    for worker in workers:
        worker.start()
    failed = 0
    for _ in range(children):
        child = os.fork()
        if child == 0:
            one = ctypes.c_uint64()
            code = LIB.cuMemAlloc_v2(ctypes.byref(one), ctypes.c_size_t(1)) or LIB.cuMemFree_v2(one)
            os._exit(code)
        failed += os.waitpid(child, 0)[1] != 0
    done.set()
    for worker in workers:
        worker.join()
    return failed


COMMANDS: dict[str, Callable[..., int | None]] = {
    function.__name__: function
    for function in (
        *(launch, serve, threads, timed, collective, stream, destroy, sync, query, poll, capture, begin, finish),
        *(streams, contexts, destroy_primary, poll_event),
        *(context, enter, primary, destroy_context, copy, clear, allocate, allocate_on, free, free_on, pool, allocate_from),
        *(destroy_pool, destroy_graph, limit, green, total, fork_while_allocating, allocate_small, rest),
        *(create, export, release, limit_count),
    )
}


def main() -> None:
    for line in sys.stdin:
        word, *numbers = line.split()
        answer = COMMANDS[word](*map(int, numbers))
        sys.stdout.write("ok\n" if answer is None else f"ok {answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
