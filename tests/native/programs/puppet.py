"""A tenant that does what it is told: one command a line on stdin, `ok` after each.

launch COUNT: kernels, one after another; serve STEPS PAUSE_MS REQUESTS: requests as a server has them;
capture COUNT: kernels into a graph; sync.
"""

import ctypes
import sys
import time
from collections.abc import Callable

LIB = ctypes.CDLL("libcuda.so.1")
NONE = ctypes.c_void_p(None)


def launch(count: int) -> None:
    for _ in range(count):
        if LIB.cuLaunchKernel(NONE, 1, 1, 1, 1, 1, 1, 0, NONE, NONE, NONE) != 0:
            raise SystemExit(1)


def serve(steps: int, pause_ms: int, requests: int) -> None:
    for _ in range(requests):
        for _ in range(steps):
            launch(1)
            LIB.cuCtxSynchronize()
        time.sleep(pause_ms / 1000)


def capture(count: int) -> None:
    graph = ctypes.c_void_p()
    LIB.cuStreamBeginCapture_v2(NONE, 0)
    launch(count)
    LIB.cuStreamEndCapture(NONE, ctypes.byref(graph))


COMMANDS: dict[str, Callable[..., None]] = {"launch": launch, "serve": serve, "capture": capture}


def main() -> None:
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "sync":
            LIB.cuCtxSynchronize()
        else:
            COMMANDS[word](*map(int, numbers))
        sys.stdout.write("ok\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
