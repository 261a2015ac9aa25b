"""NVIDIA GPUs through NVML: devices, processes, MIG.

Start at `NvidiaHardware`. `nvml` loads the library, `facts` and `instances` ask it, `devices` and `usage` put the answers
into the domain's words, `partitioner` changes the MIG layout, `recording` writes answers down. Not here: who gets what.
"""

from aimgpu.hardware.nvidia.hardware import NvidiaHardware

__all__ = ["NvidiaHardware"]
