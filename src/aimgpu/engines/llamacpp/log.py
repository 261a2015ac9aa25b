"""What llama.cpp says in its log when it does not load, or computes elsewhere than it should.

Lines look like "0.00.004.067 E gguf_init_from_file: ...", in older builds without time and letter.
"""

import re
from collections.abc import Iterable

from aimgpu.engines.causes import PORT_TAKEN, find_cause, parse_size

_NO_GPU = re.compile(r"no usable GPU found|failed to initialize (?:CUDA|ROCm)")
_REFUSED = re.compile(r"allocating ([\d.]+ \w+) on device \d+: \w+ failed: out of memory")
_OUT_OF_MEMORY = re.compile(r"(?:CUDA|ROCm|HIP) error: (?:out of memory|the resource allocation failed)")
_UNKNOWN_SHORTFALL = 128 << 20
_DOTS = re.compile(r"\.{1,100}")
_CAUSES = {
    "the model file cannot be opened: {0}": r"failed to open GGUF file (.*)",
    "the model file is not GGUF": r"invalid magic characters",
    "the model file is cut off or damaged": (
        r"failed to read key-value pairs|failed to read tensor|data is not within the file bounds|tensor .* out of bounds"
    ),
    "this llama.cpp does not know the model's architecture {0}": r"unknown model architecture: (.*)",
    "not enough GPU memory: it wanted {0} more": r"allocating ([\d.]+ \w+) on device \d+: \w+ failed: out of memory",
    "not enough GPU memory": r"(?:CUDA|ROCm|HIP) error: (?:out of memory|the resource allocation failed)",  # the second: cuBLAS
    "this llama-server was not built for this GPU": (
        r"no kernel image is available|invalid device function|compiled for a different architecture"
    ),
    "the GPU driver is too old for this llama-server": r"driver version is insufficient",
    "the GPU failed: {0}": r"(?:CUDA|ROCm|HIP) error: (.*)",
    "not enough memory: {0}": r"((?:failed|unable) to allocate.*)",
    PORT_TAKEN: r"couldn't bind",
    "it does not take these arguments: {0}": r"^error: (.*)",
    "it misses a library: {0}": r"error while loading shared libraries: (.*?):",
    "it cannot load the model: {0}": r"error loading model: (.*)",
    "the interposer says: {0}": r"^aimgpu: (.*)",
}


def read_failure(lines: Iterable[str]) -> str | None:
    """The first known cause, else the first line that logs an error, else the last Python exception."""
    texts = tuple(lines)
    if cause := find_cause(texts, _CAUSES):
        return cause
    errors = [line.split(" E ", 1)[1].strip() for line in texts if " E " in line]
    if errors:
        return errors[0]
    python = [line for line in texts if line.startswith(("ModuleNotFoundError", "ImportError", "OSError", "MemoryError"))]
    return python[-1] if python else None


def read_missing_bytes(lines: Iterable[str]) -> int | None:
    """The buffer that it could not allocate, of which some may have been free; None: memory was not why it died."""
    plain = list(lines)
    refused = [parse_size(match[1]) for line in plain if (match := _REFUSED.search(line))]
    if refused:
        return max(refused[-1], 1)
    return _UNKNOWN_SHORTFALL if any(map(_OUT_OF_MEMORY.search, plain)) else None


def tells_no_gpu(lines: Iterable[str]) -> bool:
    """It warns and goes on, on the CPU."""
    return any(_NO_GPU.search(line) for line in lines)


def read_load_percent(lines: Iterable[str]) -> int | None:
    """Older builds print a dot for every percent; newer ones say nothing."""
    dots = [len(line) for line in lines if _DOTS.fullmatch(line)]
    return dots[-1] if dots else None
