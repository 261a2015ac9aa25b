"""GPUs by name: what the driver reports of each, so that a model can be sized for a GPU that is not here.

`data/gpus.csv` has one per line. A GPU that is read gets its name from here too, so that "--gpu RTX 4090" means the card of the
machine where it has one. NVIDIA's are recognised by the name that the driver gives, AMD's by PCI id and compute units.
"""

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources

from aimgpu.domain import Vendor
from aimgpu.errors import InvalidQuantity, UnknownProduct
from aimgpu.units import MIB, parse_bytes

_SMI = "total of nvidia-smi as owners published it; SMs by NVIDIA's data sheet or architecture paper"
_VRAM = "mem_info_vram_total of amdgpu as owners published it; CUs by AMD's product page"
SOURCES = {
    "smi": _SMI,
    "ecc": f"{_SMI}; with ECC on, as the card comes",
    "vram": _VRAM,
    "less16": "capacity less the 16 MiB that amdgpu keeps on other cards of that kind; CUs by AMD's product page",
    "nominal": "capacity less what the nearest card of its series keeps, not confirmed; units by the maker's product page",
    "firmware": "an APU: the memory that the firmware was set to give the GPU, as in the name; CUs by AMD's product page",
    "apu": "an APU: memory shared with the host; partitions were published as 42.66 and 21.33 GiB; CUs by AMD's data sheet",
    "kernel": f"{_VRAM}; partitions by the kernel's rules",
}
_WORDS = re.compile(
    r"\b(amd|instinct|nvidia|geforce|radeon|tesla|quadro|oam|vf|accelerator|generation|edition|graphics|gpu|gb|gib)\b"
)
_PREFIXES = ("nvidia", "geforce", "amd", "radeon", "instinct", "tesla", "quadro", "rtx", "rx")
_MAKERS = (
    *((Vendor.NVIDIA, word) for word in ("nvidia", "geforce", "rtx", "gtx", "quadro", "tesla")),
    *((Vendor.AMD, word) for word in ("amd", "radeon", "rx", "instinct")),
)
_LONGEST_NAME = 100
_MOST_SUGGESTED = 4
_SIZES = ("RTX-3060-12", "RTX-4090-24", "MI300X")  # for a GPU that is like none of those known


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """One GPU model."""

    product: str  # "RTX-4090-24"
    vendor: Vendor
    market_name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    compute_units: int
    pci_devices: tuple[int, ...]  # AMD
    division: str  # what the hardware offers and a simulation does not
    source: str  # key of SOURCES


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """In the order of the file."""
    text = resources.files("aimgpu.hardware").joinpath("data/gpus.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(
        KnownGpu(
            product=row["product"],
            vendor=Vendor(row["vendor"]),
            market_name=row["name"],
            aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
            memory_bytes=int(row["memory_mib"]) * MIB,
            compute_units=int(row["compute_units"]),
            pci_devices=tuple(int(number, 16) for number in row["pci_devices"].split()),
            division=row["division"],
            source=row["source"],
        )
        for row in csv.DictReader(lines)
    )


def find_gpu(name: str) -> KnownGpu:
    """Of "MI300X", "rtx 4090", "4090", "GeForce RTX 4060 Ti 16GB". Raises UnknownProduct with those that may be meant."""
    wanted = _normalise(name)
    found = _by_name().get(wanted, ())
    if len(found) == 1:
        return found[0]
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    if found:
        names = [gpu.product for gpu in found]
        hint = f"Name one of them: {' or '.join(names)}."
        raise UnknownProduct(f"{shown!r} is {len(found)} GPUs", hint=hint, typed=name, near=names)
    near = _with_memory(name) or _near(name, wanted)
    meant = (
        f"Did you mean {' or '.join(near)}? "
        if near
        else f"Name one with as much memory, such as {' or '.join(_SIZES)}; 24GiB in its place lists some. "
    )
    raise UnknownProduct(
        f"{shown!r} is not a GPU that can be simulated",
        hint=f"{meant}`aimgpu gpus --known` lists the {len(known_gpus())} that are known.",
        page_hint=f"{meant}The reference lists the {len(known_gpus())} that are known.",
        typed=name,
        near=near or _SIZES,
    )


def is_known(name: str) -> bool:
    """Whether this names a GPU, or several."""
    return _normalise(name) in _by_name()


def recognise(vendor: Vendor, market_name: str | None, memory_bytes: int) -> KnownGpu | None:
    """The GPU of which a driver gives the market name; of those that differ in memory the nearest."""
    named = [gpu for gpu in known_gpus() if gpu.vendor is vendor and gpu.market_name == market_name]
    return min(named, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


def recognise_pci(pci_device: int, compute_units: int | None, memory_bytes: int | None) -> KnownGpu | None:
    """AMD's of a PCI id, which several have: its compute units decide, then its memory. None where none has as many."""
    found = [gpu for gpu in known_gpus() if pci_device in gpu.pci_devices]
    same = [gpu for gpu in found if compute_units in (None, gpu.compute_units)]
    if len(found) == 1 and not same:
        same = found  # of a partition only a part of them is seen
    return min(same, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)), default=None)


def _with_memory(name: str) -> list[str]:
    """Of "24GiB": the products whose memory is nearest."""
    try:
        wanted = parse_bytes(name)
    except InvalidQuantity:
        return []
    return [gpu.product for gpu in sorted(known_gpus(), key=lambda gpu: abs(gpu.memory_bytes - wanted))[:_MOST_SUGGESTED]]


def _near(name: str, wanted: str) -> list[str]:
    """Products with a name like it, or with it as a part; of one maker where the name says whose."""
    if not wanted or len(wanted) > _LONGEST_NAME:
        return []
    names = _by_name()
    within = sorted((name for name in names if wanted in name), key=len)
    close = get_close_matches(wanted, names, n=_MOST_SUGGESTED, cutoff=0.7)
    found = [gpu for near in (*close, *within) for gpu in names[near]]
    makers = {maker for maker, word in _MAKERS if re.search(rf"\b{word}", name.lower())}
    return list(dict.fromkeys(gpu.product for gpu in found if not makers or gpu.vendor in makers))[:_MOST_SUGGESTED]


@cache
def _by_name() -> dict[str, tuple[KnownGpu, ...]]:
    found: dict[str, tuple[KnownGpu, ...]] = {}
    for gpu in known_gpus():
        for name in {_normalise(each) for each in (gpu.market_name, *gpu.aliases)}:
            found[name] = (*found.get(name, ()), gpu)
    return found | {_normalise(gpu.product): (gpu,) for gpu in known_gpus()}


def _normalise(name: str) -> str:
    words = _WORDS.sub(" ", re.sub(r"[^a-z0-9]+", " ", name.lower()[: 2 * _LONGEST_NAME]).replace("mobile", "laptop"))
    joined = "".join(words.split())
    while (prefix := next((each for each in _PREFIXES if joined.startswith(each)), None)) is not None:
        joined = joined.removeprefix(prefix)
    return re.sub(r"(?<=\d)gb$", "", joined)
