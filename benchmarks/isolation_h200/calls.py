"""What the library adds to a step, within one process: the driver's own functions and the library's in turns, at random.

Two processes differ by more than the library costs (where their weights lie in memory), so the comparison between processes
cannot resolve it. Here everything but the called function is the same. Without the library both are the same function.
"""

import ctypes
import random
import statistics
import struct
import time
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
LAUNCH, WAIT = "cuGraphLaunch", "cuCtxSynchronize"
TYPES: tuple[tuple[type, ...], ...] = ((ctypes.c_void_p, ctypes.c_void_p), ())


def time_calls(graph: int, seconds: float, steps: int = 1, pause: float = 0.0) -> dict[str, Any]:
    """Steps of one graph, so many in a row launched and waited for by the functions of one side, and then a pause."""
    try:
        sides = {"hooked": find_hooked(LAUNCH, WAIT), "real": find_real(LAUNCH, WAIT)}
        executable = instantiate(graph)
    except (LookupError, OSError, struct.error) as error:
        return {"error": str(error)}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    dice, until = random.Random(1), time.monotonic() + seconds  # noqa: S311 turns
    while time.monotonic() < until:
        side = dice.choice(("hooked", "real"))
        launch, wait = (ctypes.CFUNCTYPE(ctypes.c_int, *types)(at) for at, types in zip(sides[side], TYPES, strict=True))
        for _ in range(steps):
            begun = time.monotonic()
            if launch(executable, None) != 0 or wait() != 0:
                return {"error": f"a step by the {side} functions failed"}
            taken[side].append(time.monotonic() - begun)
        if pause:
            time.sleep(dice.expovariate(1 / pause))
    return {
        "same_functions": sides["hooked"] == sides["real"],
        "steps": {side: len(times) for side, times in taken.items()},
        "step_ms": {side: round(1000 * statistics.median(times), 4) for side, times in taken.items()},
    }


def instantiate(graph: int) -> ctypes.c_void_p:
    executable = ctypes.c_void_p()
    call = ctypes.CDLL(DRIVER).cuGraphInstantiateWithFlags
    if call(ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_ulonglong(0)) != 0:
        raise OSError("the graph cannot be instantiated")
    return executable


def find_hooked(*names: str, library: str = DRIVER) -> list[int]:
    """Where a program that asks the loader gets to."""
    loaded = ctypes.CDLL(library)
    return [int(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0) for name in names]


def find_real(*names: str, library: str = "libcuda.so") -> list[int]:
    """Where the driver's own functions are, by its table of symbols: `dlsym` is hooked."""
    path, base = find_mapping(library)
    values = read_symbols(path.read_bytes(), names)
    return [base + values[name] for name in names]


def find_mapping(library: str) -> tuple[Path, int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) > 5 and Path(words[5]).name.startswith(library) and int(words[2], 16) == 0:  # noqa: PLR2004 columns
            return Path(words[5]), int(words[0].partition("-")[0], 16)
    raise LookupError(f"{library} is not loaded")


def read_symbols(image: bytes, names: tuple[str, ...]) -> dict[str, int]:
    """Addresses of exported functions of a 64-bit ELF library, from its first loaded byte."""
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    tables = [struct.unpack_from("<IIQQQQIIQQ", image, sections + index * size) for index in range(count)]
    dynamic = [table for table in tables if table[1] == 11]  # noqa: PLR2004 SHT_DYNSYM
    if not dynamic:
        raise LookupError("the library has no table of symbols")
    _, _, _, _, start, length, link, *_ = dynamic[0]
    strings = tables[link][4]
    wanted, found = {name.encode() for name in names}, {}
    for at in range(start, start + length, 24):
        name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
        name = image[strings + name_at : image.index(b"\0", strings + name_at)]
        if section != 0 and name in wanted:
            found[name.decode()] = value
    return found
