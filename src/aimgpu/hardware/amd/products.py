"""Names of AMD's GPUs by PCI device id, for people only: what a device can do is read from the device."""

from aimgpu.hardware.known_gpus import recognise_pci

_VIRTUAL_FUNCTIONS = frozenset({0x7410, 0x74B4, 0x74B5, 0x74B6, 0x74B9, 0x74BC, 0x74BD, 0x75B0, 0x75B3})


def product_name(pci_device: int, gfx_target: int, compute_units: int | None = None, memory_bytes: int | None = None) -> str:
    """Such as "MI300X", or "gfx942-74ff" for a device that has no name here."""
    known = recognise_pci(pci_device, compute_units, memory_bytes)
    return known.product if known else f"{gfx_name(gfx_target)}-{pci_device:04x}"


def market_name(pci_device: int, compute_units: int | None = None) -> str | None:
    """As AMD sells it; None for a device without a name here."""
    known = recognise_pci(pci_device, compute_units, None)
    return known.market_name if known else None


def is_virtual_function(pci_device: int) -> bool:
    """Whether a hypervisor gave it to a virtual machine."""
    return pci_device in _VIRTUAL_FUNCTIONS


def gfx_name(gfx_target: int) -> str:
    """Turns 90402 into "gfx942"."""
    return f"gfx{gfx_target // 10000}{gfx_target // 100 % 100:x}{gfx_target % 100:x}" if gfx_target else "amd"
