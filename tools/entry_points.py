"""The drivers' entry points that the interposer knows, and what it does with each: read from native/functions.def.

`python tools/entry_points.py FOLDER...` compares the list with bindings that are installed in these folders (cuda-bindings,
hip-python) and prints every name that is not on it: a new driver release shows up there before it shows up in production.
"""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = ROOT / "native" / "functions.def"

# What happens to a call that is not wrapped. "neutral" ones neither allocate nor run anything, and are not listed.
TREATMENTS = {
    "wrapped": "wrapped: charged, given back, gated, or followed, as isolation.md describes",
    "copy": "not gated: copies use the copy engines, as far as the driver can; large copies within a device through these "
    "calls take memory bandwidth",
    "memset": "not gated: short kernels of the driver (the common forms are wrapped)",
    "host": "not charged: host memory",
    "import": "not charged: memory or semaphores of another process or interface, charged to the process that made it",
    "code": "not charged when called: code, constants and static arrays are part of what the driver holds beside allocations. "
    "Their size is not known before they are loaded (images are compressed, or compiled by the driver); what exceeds the fixed "
    "sum per context is charged when the driver reports it, within two seconds",
    "queue": "not charged when called: what a stream takes on AMD was never measured, so there is no sum to charge; it is "
    "charged when the driver reports it, within two seconds, and at once where the kernel keeps the limit (`dmem`)",
    "managed": "not charged: moves or hints pages of managed memory, which was charged where it was allocated",
    "graph": "not gated: builds or changes graphs, which are gated when they are launched; memory nodes are charged through "
    "the wrapped calls, and a child graph whose ownership moves stays charged until the process ends",
    "private": "neither charged nor gated: private tables of the driver (NVENC, NVDEC, OptiX, CUPTI use them); the watchdog "
    "sees the memory",
    "shared": "not charged: binds memory that was charged where it was made",
    "checkpoint": "not followed: the charge stays while a process is checkpointed",
    "decompress": "not gated: decompression engines",
    "semaphore": "not gated: writes or waits for one word",
    "hostfunc": "not gated: runs host code",
    "graphics": "not charged: maps resources of a graphics interface",
    "green": "not gated on its own: divides processors among contexts; launches there are gated",
    "address": "not charged: address space and access rights, no memory",
    "context": "not admitted beforehand: charged with the process's first allocation",
    "event": "not followed: completion known by it is learned at the next synchronisation, or after `unwaited_ns`",
    "capture": "checked when our batch on the stream is ended: an event is never recorded into a capture",
}

INTRODUCTION = """\
What the interposer does with every function of CUDA's driver interface and of HIP that allocates, launches, or concerns either.
The names are those of the bindings for CUDA 12.9 and 13.5 (`cuda-bindings`) and ROCm 6.4 and 7.2 (`hip-python`), kept in
`native/functions.def`; a test compares the list with the newest bindings, so that a function of a new release is looked at
before it is used. Functions that are not listed neither allocate nor run anything. Nothing of HIP was run on AMD hardware.
""".splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoint:
    """One function of a driver's interface, without version and stream suffixes."""

    name: str
    api: str
    treatment: str
    symbols: tuple[str, ...]  # the forms that are wrapped; else its name


def read_list() -> list[EntryPoint]:
    """Every known entry point, in the order of its name."""
    text = FUNCTIONS.read_text()
    left = re.findall(r"^LEFT\((\w+), (\w+), (\w+)\)", text, re.MULTILINE)
    wrapped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for symbol, api in re.findall(r"^HOOK\((\w+), (\w+),", text, re.MULTILINE):
        wrapped[re.sub(r"(_v\d)?(_ptsz|_ptds|_spt)?$", "", symbol), api].append(symbol)
    points = [EntryPoint(name=name, api=api, treatment=treatment, symbols=(name,)) for name, api, treatment in left]
    points += [
        EntryPoint(name=name, api=api, treatment="wrapped", symbols=tuple(symbols)) for (name, api), symbols in wrapped.items()
    ]
    return sorted(points, key=lambda point: (point.api, point.name))


def known_names() -> set[str]:
    """Names that need no further look: of functions, and of their forms."""
    return {name for point in read_list() for name in (point.name, *point.symbols)}


def read_bindings(folder: Path) -> set[str]:
    """Names that the bindings in a folder declare: cuda-bindings' cydriver.pxd, hip-python's chip.pxd."""
    names: set[str] = set()
    for path, pattern in (("cuda/bindings/cydriver.pxd", r"^cdef CUresult (cu\w+)\("), ("hip/chip.pxd", r"\b(hip[A-Z]\w+)\(")):
        if (folder / path).is_file():
            names |= set(re.findall(pattern, (folder / path).read_text(), re.MULTILINE))
    return names


def page() -> str:
    """The reference page."""
    lines = ["# Entry points of CUDA and HIP", "", *INTRODUCTION, ""]
    points = read_list()
    for treatment, text in TREATMENTS.items():
        chosen = [point for point in points if point.treatment == treatment]
        lines += [f"## {treatment}", "", f"{text[0].upper()}{text[1:]}.", ""]
        for api in ("CUDA", "HIP"):
            of_api = [point for point in chosen if point.api == api]
            if of_api:
                shown = (", ".join(f"`{symbol}`" for symbol in point.symbols) for point in of_api)
                lines += [f"{api}: {', '.join(shown)}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Prints the names of installed bindings that the list does not have."""
    unknown = sorted(set().union(*(read_bindings(Path(folder)) for folder in sys.argv[1:])) - known_names())
    print("\n".join(unknown))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
