"""Devices that are not there, behaving as the hardware does: specifications, legal layouts, refusals.

Start at `SimulatedHardware`. `products` holds the figures, `state` what is remembered, `holders` who is in the way.
"""

from aimgpu.hardware.simulated.hardware import SimulatedHardware
from aimgpu.hardware.simulated.products import Product, find_product, known_products

__all__ = ["Product", "SimulatedHardware", "find_product", "known_products"]
