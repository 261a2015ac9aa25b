"""The software GPU: a driver of ours that needs no hardware (`native/software_gpu`), and what is read of it.

Memory and device time are real inside it, so a limit can be seen to hold. It is never taken for a card.
"""

from aimgpu.hardware.software.hardware import SoftwareHardware
from aimgpu.hardware.software.state import SoftwareGpu

__all__ = ["SoftwareGpu", "SoftwareHardware"]
