"""AMD Instinct GPUs, read from the kernel's own files first, changed through them or AMD's tools.

Start at `AmdHardware`. `gpus` and `topology` read, `devices` names what was read, `change` changes it with `writers` and
`reload`; `smi` and `smi_json` know AMD's tool; `modes` are the kernel's rules.
"""

from aimgpu.hardware.amd.hardware import AmdHardware, ServingAmdHardware
from aimgpu.hardware.amd.smi import AmdSmi, find_amd_smi
from aimgpu.hardware.amd.sysfs import Sysfs

__all__ = ["AmdHardware", "AmdSmi", "ServingAmdHardware", "Sysfs", "find_amd_smi"]
