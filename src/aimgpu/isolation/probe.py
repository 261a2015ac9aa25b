"""A program that uses the GPU as any other would: `python -m aimgpu.isolation.probe cuda|hip WHAT AMOUNT`.

WHAT is `allocate` BYTES, `work` SECONDS, `fill` BYTES (as much as it gets of these), `decode` REQUESTS or `hog` 0. It prints
lines of JSON; `fill` and `hog` go on until their input ends. `aimgpu doctor --verify` and `aimgpu demo` start it under limits
to see whether they hold. Nothing but the vendor's driver library is needed.
"""

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

_CUDA = ("libcuda.so.1",)
_HIP = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
_HIPRTC = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so")
SPIN_NANOSECONDS = 1_000_000
STEP_NANOSECONDS, STEPS = 2_000_000, 16  # one token of a model, and how many a request has
PAUSE_SECONDS = 0.03  # between two requests
HOG_NANOSECONDS, HOG_AHEAD = 2_000_000, 3  # its kernels, and how many it queues before it waits
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .pred %p;
  .reg .u64 %start, %length, %now;
  ld.param.u64 %length, [nanoseconds];
  mov.u64 %start, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %p, %now, %length;
  @%p bra again;
  ret;
}
\0"""
# The wall clock of AMD's GPUs counts 100 MHz.
_HIP_SOURCE = b"""extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start = wall_clock64();
  while ((wall_clock64() - start) * 10 < nanoseconds) {}
}\0"""


class ProbeFailed(Exception):
    """A call that must work did not."""


def main(arguments: Sequence[str]) -> int:
    """Do one thing; a call that must work and did not ends in `error`."""
    vendor, what, amount = arguments
    try:
        api = _Cuda() if vendor == "cuda" else _Hip()
        PROGRAMS[what](api, amount)
    except (ProbeFailed, OSError, AttributeError) as error:
        _tell(error=str(error))
    return 0


def _allocate(api: "_Gpu", amount: str) -> None:
    _tell(allocated=api.allocate(int(amount)))


def _work(api: "_Gpu", amount: str) -> None:
    """How many kernels of a millisecond ran."""
    api.run(SPIN_NANOSECONDS)  # the first one loads the code
    count, end = 0, time.monotonic() + float(amount)
    while time.monotonic() < end:
        api.run(SPIN_NANOSECONDS)
        count += 1
    _tell(launches=count)


def _fill(api: "_Gpu", amount: str) -> None:
    """Allocate all at once, then in ever smaller pieces down to one byte. What is held at the end is the limit."""
    wanted, held, piece = int(amount), 0, int(amount)
    at_once = api.allocate(wanted)
    held += wanted if at_once else 0
    while held < wanted and piece >= 1:
        if api.allocate(min(piece, wanted - held)):
            held += min(piece, wanted - held)
        else:
            piece //= 2
    _tell(at_once=at_once, held_bytes=held)
    sys.stdin.read()


def _decode(api: "_Gpu", amount: str) -> None:
    """As a model that answers one request after the other: how long each took, in seconds."""
    api.run(STEP_NANOSECONDS)
    _tell(ready=True)
    taken = []
    for _ in range(int(amount)):
        begun = time.monotonic()
        for _ in range(STEPS):
            api.run(STEP_NANOSECONDS)
        taken.append(time.monotonic() - begun)
        time.sleep(PAUSE_SECONDS)
    _tell(requests=taken)


def _hog(api: "_Gpu", amount: str) -> None:
    """As a training job: always more work than the device has done."""
    del amount
    waiting = threading.Thread(target=sys.stdin.read, daemon=True)
    waiting.start()
    api.run(HOG_NANOSECONDS)
    _tell(running=True)
    while waiting.is_alive():
        for _ in range(HOG_AHEAD):
            api.launch(HOG_NANOSECONDS)
        api.synchronise()


PROGRAMS: dict[str, Callable[["_Gpu", str], None]] = {
    "allocate": _allocate,
    "work": _work,
    "fill": _fill,
    "decode": _decode,
    "hog": _hog,
}


def _tell(**found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


class _Gpu:
    """One vendor's driver API, as far as these programs use it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._library = _load(names)
        self._length = ctypes.c_uint64()
        self._arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(self._length), ctypes.c_void_p))

    def allocate(self, size: int) -> bool:
        """Whether it got it; it is never freed."""
        raise NotImplementedError

    def launch(self, nanoseconds: int) -> None:
        """Queue a kernel of this length."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """Wait for what was queued."""
        raise NotImplementedError

    def run(self, nanoseconds: int) -> None:
        """Queue one and wait for it."""
        self.launch(nanoseconds)
        self.synchronise()

    def _call(self, name: str, *values: object) -> None:
        _checked(name, getattr(self._library, name)(*values))


class _Cuda(_Gpu):
    def __init__(self) -> None:
        super().__init__(_CUDA)
        context = ctypes.c_void_p()
        self._function: ctypes.c_void_p | None = None
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> bool:
        pointer = ctypes.c_void_p()
        return int(self._library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))) == 0

    def launch(self, nanoseconds: int) -> None:
        self._length.value = nanoseconds
        self._call("cuLaunchKernel", self._kernel(), 1, 1, 1, 1, 1, 1, 0, None, self._arguments, None)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    def _kernel(self) -> ctypes.c_void_p:
        if self._function is None:
            module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
            self._call("cuModuleGetFunction", ctypes.byref(self._function), module, b"spin")
        return self._function


class _Hip(_Gpu):
    def __init__(self) -> None:
        super().__init__(_HIP)
        self._function: ctypes.c_void_p | None = None
        self._call("hipInit", 0)

    def allocate(self, size: int) -> bool:
        pointer = ctypes.c_void_p()
        return int(self._library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))) == 0

    def launch(self, nanoseconds: int) -> None:
        self._length.value = nanoseconds
        self._call("hipModuleLaunchKernel", self._kernel(), 1, 1, 1, 1, 1, 1, 0, None, self._arguments, None)

    def synchronise(self) -> None:
        self._call("hipDeviceSynchronize")

    def _kernel(self) -> ctypes.c_void_p:
        if self._function is None:
            module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("hipModuleLoadData", ctypes.byref(module), self._compile())
            self._call("hipModuleGetFunction", ctypes.byref(self._function), module, b"spin")
        return self._function

    def _compile(self) -> bytes:
        """For the GPU that is there; ROCm's run-time compiler comes with the HIP runtime."""
        compiler = _load(_HIPRTC)
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        _checked(
            "hiprtcCreateProgram", compiler.hiprtcCreateProgram(ctypes.byref(program), _HIP_SOURCE, b"spin", 0, None, None)
        )
        _checked("hiprtcCompileProgram", compiler.hiprtcCompileProgram(program, 0, None))
        _checked("hiprtcGetCodeSize", compiler.hiprtcGetCodeSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _checked("hiprtcGetCode", compiler.hiprtcGetCode(program, code))
        return code.raw


def _load(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise ProbeFailed(f"{names[0]} cannot be loaded")


def _checked(name: str, code: int) -> None:
    if code:
        raise ProbeFailed(f"{name} failed with {code}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
