"""Names of AMD's accelerators by PCI device id, for people only: what a device can do is read from the device."""

_PRODUCTS = {
    0x7408: "MI250X",
    0x740C: "MI250X",
    0x740F: "MI210",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A2: "MI308X",
    0x74A5: "MI325X",
    0x74A8: "MI308X",
    0x74A9: "MI300X",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
    0x75A8: "MI350P",
}
_VIRTUAL_FUNCTIONS = {
    0x7410: "MI210",
    0x74B4: "MI300A",
    0x74B5: "MI300X",
    0x74B6: "MI308X",
    0x74B9: "MI325X",
    0x74BC: "MI308X",
    0x74BD: "MI300X",
    0x75B0: "MI350X",
    0x75B3: "MI355X",
}


def product_name(pci_device: int, gfx_target: int) -> str:
    """Such as "MI300X", or "gfx942-74ff" for a device that has no name here."""
    known = _PRODUCTS.get(pci_device) or _VIRTUAL_FUNCTIONS.get(pci_device)
    return known or f"{gfx_name(gfx_target)}-{pci_device:04x}"


def market_name(pci_device: int) -> str | None:
    """As AMD sells it; None for a device without a name here."""
    known = _PRODUCTS.get(pci_device) or _VIRTUAL_FUNCTIONS.get(pci_device)
    return f"AMD Instinct {known}" if known else None


def is_virtual_function(pci_device: int) -> bool:
    """Whether a hypervisor gave it to a virtual machine."""
    return pci_device in _VIRTUAL_FUNCTIONS


def gfx_name(gfx_target: int) -> str:
    """Turns 90402 into "gfx942"."""
    return f"gfx{gfx_target // 10000}{gfx_target // 100 % 100:x}{gfx_target % 100:x}" if gfx_target else "amd"
