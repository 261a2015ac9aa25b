"""The GPUs that can be simulated: those that are known by name, with how each can be divided."""

from dataclasses import dataclass

from aimgpu.domain import SliceProfile, Vendor
from aimgpu.hardware.amd.modes import Chip
from aimgpu.hardware.known_gpus import KnownGpu, find_gpu, known_gpus
from aimgpu.hardware.simulated.mig import seven_slice_profiles

_GFX942, _GFX950 = 90402, 90500


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One GPU model. `chip` is for AMD's that can be divided, `mig` for NVIDIA's; most have neither and stay whole."""

    name: str
    vendor: Vendor
    market_name: str
    memory_bytes: int
    compute_units: int
    chip: Chip | None = None
    memory_modes: tuple[str, ...] = ("NPS1",)  # that its firmware reports
    pci_device: int | None = None
    linked: bool = False  # GPUs of one machine form one XGMI hive
    mig: tuple[SliceProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dies:
    """What the kernel's partition rules need beside the figures of the table."""

    xccs: int
    gfx_target: int
    memory_modes: tuple[str, ...]
    linked: bool = True
    apu: bool = False


_DIES = {
    "MI300X": _Dies(xccs=8, gfx_target=_GFX942, memory_modes=("NPS1", "NPS2", "NPS4")),
    "MI300A": _Dies(xccs=6, gfx_target=_GFX942, memory_modes=("NPS1",), linked=False, apu=True),
    "MI308X": _Dies(xccs=4, gfx_target=_GFX942, memory_modes=("NPS1", "NPS4")),
    "MI325X": _Dies(xccs=8, gfx_target=_GFX942, memory_modes=("NPS1", "NPS4")),
    "MI350X": _Dies(xccs=8, gfx_target=_GFX950, memory_modes=("NPS1", "NPS2")),
    "MI355X": _Dies(xccs=8, gfx_target=_GFX950, memory_modes=("NPS1", "NPS2")),
    "MI350P": _Dies(xccs=4, gfx_target=_GFX950, memory_modes=("NPS1",), linked=False),
}
# As `nvidia-smi mig -lgip` lists them.
_MIG = {
    "A100-40": seven_slice_profiles(names=(5, 10, 20, 40), gib=(4.75, 9.75, 19.625, 39.5), units=(14, 14, 28, 42, 56, 98)),
    "A100-80": seven_slice_profiles(names=(10, 20, 40, 80), gib=(9.5, 19.5, 39.25, 79.0), units=(14, 14, 28, 42, 56, 98)),
    "H100-80": seven_slice_profiles(names=(10, 20, 40, 80), gib=(9.75, 19.625, 39.5, 79.25), units=(16, 26, 32, 60, 64, 132)),
    "H200-141": seven_slice_profiles(names=(18, 35, 71, 141), gib=(16.0, 32.5, 69.75, 140.0), units=(16, 26, 32, 60, 64, 132)),
}


def _product(gpu: KnownGpu) -> Product:
    dies = _DIES.get(gpu.product)
    return Product(
        name=gpu.product,
        vendor=gpu.vendor,
        market_name=gpu.market_name,
        memory_bytes=gpu.memory_bytes,
        compute_units=gpu.compute_units,
        chip=_chip(gpu, dies) if dies else None,
        memory_modes=dies.memory_modes if dies else ("NPS1",),
        pci_device=next(iter(gpu.pci_devices), None),
        linked=dies is not None and dies.linked,
        mig=_MIG.get(gpu.product, ()),
    )


def _chip(gpu: KnownGpu, dies: _Dies) -> Chip:
    return Chip(
        xccs=dies.xccs,
        compute_units_each=gpu.compute_units // dies.xccs,
        memory_bytes=gpu.memory_bytes,
        gfx_target=dies.gfx_target,
        apu=dies.apu,
    )


_BY_NAME = {gpu.product: _product(gpu) for gpu in known_gpus()}


def known_products() -> tuple[Product, ...]:
    """Every GPU that can be simulated."""
    return tuple(_BY_NAME.values())


def find_product(name: str) -> Product:
    """The Product of "MI300X", "rtx 4090" or "AMD Instinct MI300X OAM". Raises UnknownProduct."""
    return _BY_NAME[find_gpu(name).product]
