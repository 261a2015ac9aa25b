"""A program that uses the GPU as any other would: `python -m aimgpu.isolation.probe cuda|hip allocate BYTES | work SECONDS`.

It prints one line of JSON. `aimgpu doctor --verify` starts it under limits to see whether they hold. Nothing but the vendor's
driver library is needed.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

_CUDA = ("libcuda.so.1",)
_HIP = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
_HIPRTC = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so")
SPIN_NANOSECONDS = 1_000_000
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
    """Allocate once, or launch kernels for a while."""
    vendor, what, amount = arguments
    found: dict[str, bool | int | str]
    try:
        api = _Cuda() if vendor == "cuda" else _Hip()
        found = {"allocated": api.allocate(int(amount))} if what == "allocate" else {"launches": _work(api, float(amount))}
    except (ProbeFailed, OSError, AttributeError) as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _work(api: "_Cuda | _Hip", seconds: float) -> int:
    """How many kernels of a millisecond ran."""
    launch = api.make_kernel()
    launch()  # the first one loads the code
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        launch()
        count += 1
    return count


class _Cuda:
    def __init__(self) -> None:
        self._library = _load(_CUDA)
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> bool:
        pointer = ctypes.c_void_p()
        return int(self._library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))) == 0

    def make_kernel(self) -> Callable[[], None]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        length, arguments = _one_argument()

        def launch() -> None:
            self._call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
            self._call("cuCtxSynchronize")
            del length[1:]  # keeps the argument alive as long as this function

        return launch

    def _call(self, name: str, *values: object) -> None:
        _checked(name, getattr(self._library, name)(*values))


class _Hip:
    def __init__(self) -> None:
        self._library = _load(_HIP)
        self._call("hipInit", 0)

    def allocate(self, size: int) -> bool:
        pointer = ctypes.c_void_p()
        return int(self._library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))) == 0

    def make_kernel(self) -> Callable[[], None]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("hipModuleLoadData", ctypes.byref(module), self._compile())
        self._call("hipModuleGetFunction", ctypes.byref(function), module, b"spin")
        length, arguments = _one_argument()

        def launch() -> None:
            self._call("hipModuleLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
            self._call("hipDeviceSynchronize")
            del length[1:]

        return launch

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

    def _call(self, name: str, *values: object) -> None:
        _checked(name, getattr(self._library, name)(*values))


def _one_argument() -> tuple[list[ctypes.c_uint64], "ctypes.Array[ctypes.c_void_p]"]:
    length = ctypes.c_uint64(SPIN_NANOSECONDS)
    return [length], (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(length), ctypes.c_void_p))


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
