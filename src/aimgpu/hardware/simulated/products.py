"""The GPUs that can be simulated, by the figures of their makers and drivers."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from aimgpu.domain import SliceProfile, Vendor
from aimgpu.errors import UnknownProduct
from aimgpu.hardware.amd.modes import Chip
from aimgpu.hardware.simulated.mig import seven_slice_profiles
from aimgpu.units import GIB, MIB

_GFX942, _GFX950 = 90402, 90500


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One GPU model. `chip` is for AMD, `mig` for NVIDIA."""

    name: str
    vendor: Vendor
    market_name: str
    memory_bytes: int
    compute_units: int
    aliases: tuple[str, ...] = ()
    chip: Chip | None = None
    memory_modes: tuple[str, ...] = ("NPS1",)  # that its firmware reports
    pci_device: int | None = None
    linked: bool = False  # GPUs of one machine form one XGMI hive
    mig: tuple[SliceProfile, ...] = ()


def _amd(name: str, chip: Chip, pci_device: int, memory_modes: tuple[str, ...], *, linked: bool = True) -> Product:
    return Product(
        name=name,
        vendor=Vendor.AMD,
        market_name=f"AMD Instinct {name}",
        memory_bytes=chip.memory_bytes,
        compute_units=chip.xccs * chip.compute_units_each,
        chip=chip,
        memory_modes=memory_modes,
        pci_device=pci_device,
        linked=linked,
    )


def _nvidia(name: str, market_name: str, mebibytes: int, units: int, mig: tuple[SliceProfile, ...]) -> Product:
    return Product(
        name=name,
        vendor=Vendor.NVIDIA,
        market_name=market_name,
        memory_bytes=mebibytes * MIB,
        compute_units=units,
        aliases=(name + "GB",),
        mig=mig,
    )


# Bytes as mem_info_vram_total gives them: the capacity less 16 MiB. MI300A: an APU, 128 GiB shared with the host, whose
# partitions were seen as 42.66 and 21.33 GiB. MI350P: capacity less 16 MiB too, not seen on hardware.
# NVIDIA: total of nvidia-smi; profiles as `nvidia-smi mig -lgip` lists them (SXM variants).
_PARTS = (
    _amd(
        "MI300X",
        Chip(xccs=8, compute_units_each=38, memory_bytes=206141652992, gfx_target=_GFX942),
        0x74A1,
        ("NPS1", "NPS2", "NPS4"),
    ),
    _amd(
        "MI300A",
        Chip(xccs=6, compute_units_each=38, memory_bytes=128 * GIB, gfx_target=_GFX942, apu=True),
        0x74A0,
        ("NPS1",),
        linked=False,
    ),
    _amd(
        "MI308X",
        Chip(xccs=4, compute_units_each=20, memory_bytes=206141652992, gfx_target=_GFX942),
        0x74A2,
        ("NPS1", "NPS4"),
    ),
    _amd(
        "MI325X",
        Chip(xccs=8, compute_units_each=38, memory_bytes=274861129728, gfx_target=_GFX942),
        0x74A5,
        ("NPS1", "NPS4"),
    ),
    _amd(
        "MI350X",
        Chip(xccs=8, compute_units_each=32, memory_bytes=309220868096, gfx_target=_GFX950),
        0x75A0,
        ("NPS1", "NPS2"),
    ),
    _amd(
        "MI355X",
        Chip(xccs=8, compute_units_each=32, memory_bytes=309220868096, gfx_target=_GFX950),
        0x75A3,
        ("NPS1", "NPS2"),
    ),
    _amd(
        "MI350P",
        Chip(xccs=4, compute_units_each=32, memory_bytes=154602045440, gfx_target=_GFX950),
        0x75A8,
        ("NPS1",),
        linked=False,
    ),
    _nvidia(
        "A100-80",
        "NVIDIA A100-SXM4-80GB",
        81920,
        108,
        seven_slice_profiles(names=(10, 20, 40, 80), gib=(9.5, 19.5, 39.25, 79.0), units=(14, 14, 28, 42, 56, 98)),
    ),
    _nvidia(
        "H100-80",
        "NVIDIA H100 80GB HBM3",
        81559,
        132,
        seven_slice_profiles(names=(10, 20, 40, 80), gib=(9.75, 19.625, 39.5, 79.25), units=(16, 26, 32, 60, 64, 132)),
    ),
    _nvidia(
        "H200-141",
        "NVIDIA H200",
        143771,
        132,
        seven_slice_profiles(names=(18, 35, 71, 141), gib=(16.0, 32.5, 69.75, 140.0), units=(16, 26, 32, 60, 64, 132)),
    ),
)
_VENDOR_WORDS = re.compile(r"\b(amd|instinct|nvidia|oam|vf|accelerator)\b")  # and form factors that tools append


def known_products() -> tuple[Product, ...]:
    """Every GPU that can be simulated."""
    return _PARTS


def find_product(name: str) -> Product:
    """The Product of "MI300X", "mi300x" or "AMD Instinct MI300X OAM". Raises UnknownProduct."""
    part = _BY_NAME.get(_normalise(name))
    if part is None:
        names = [each.name for each in _PARTS]
        near = get_close_matches(name.upper(), names, n=1)
        nearest = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownProduct(
            f"{name!r} is not a GPU that can be simulated", hint=f"{nearest}Known products: {', '.join(names)}."
        )
    return part


def _normalise(name: str) -> str:
    return "".join(_VENDOR_WORDS.sub("", re.sub(r"[\s_-]", " ", name.lower())).split())


_BY_NAME = {_normalise(name): part for part in _PARTS for name in (part.name, part.market_name, *part.aliases)}
