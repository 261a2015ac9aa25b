"""GPUs for tests that go through all kinds of them: every one that can be divided, and a few of the many that cannot."""

from aimgpu.hardware.simulated import Product, known_products

_WHOLE = ("RTX-4090-24", "RX-7900-XTX", "8060S-96")


def divided_products() -> tuple[Product, ...]:
    """Every GPU that can be divided, and one of NVIDIA's, one of AMD's and one APU that cannot."""
    return tuple(each for each in known_products() if each.chip or each.mig or each.name in _WHOLE)
