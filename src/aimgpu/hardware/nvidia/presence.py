"""Whether there is an NVIDIA GPU at all, by the PCI bus: a missing driver and a missing GPU are two things."""

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DEVICE_FILES = ("nvidiactl", "dxg")
_DISPLAY_CLASS = "0x03"  # VGA and 3D controllers


def nvidia_may_be_here(pci: Path = PCI_DEVICES, dev: Path = Path("/dev")) -> bool:
    """A GPU on the bus, or a device file that a container or WSL was given without one. Cheap: a few file names."""
    return any((dev / name).exists() for name in _DEVICE_FILES) or bool(nvidia_gpus_on_bus(pci))


def nvidia_gpus_on_bus(pci: Path = PCI_DEVICES) -> tuple[str, ...]:
    """Bus addresses of NVIDIA GPUs, driver or not."""
    try:
        found = sorted(pci.iterdir())
    except OSError:
        return ()
    return tuple(
        entry.name
        for entry in found
        if _read(entry / "vendor") == _NVIDIA and _read(entry / "class").startswith(_DISPLAY_CLASS)
    )


def bound_driver(address: str, pci: Path = PCI_DEVICES) -> str | None:
    """Name of the kernel driver that has this device ("nouveau", "vfio-pci")."""
    try:
        return (pci / address / "driver").readlink().name
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
