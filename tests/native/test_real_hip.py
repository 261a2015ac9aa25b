"""AMD's real HIP runtime, as far as it goes without a GPU (Debian: apt-get install libamdhip64-5).

It finds no device, so nothing can be allocated; what is shown is that loading, lookups and calls pass through unharmed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aimgpu.isolation import building

HOOKS = [
    name
    for name, api in re.findall(
        r"^HOOK\((\w+), (\w+), \d+\)", (building.find_sources() / "functions.def").read_text(), re.MULTILINE
    )
    if api == "HIP"
]
LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
PROGRAM = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
names = sys.argv[2].split(",")
found = [name for name in names if hasattr(lib, name)]
p, n, m = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
big = ctypes.create_string_buffer(8192)
codes = [
    lib.hipInit(0),
    lib.hipGetDeviceCount(ctypes.byref(ctypes.c_int())),
    lib.hipMalloc(ctypes.byref(p), ctypes.c_size_t(1 << 20)),
    lib.hipMallocManaged(ctypes.byref(p), ctypes.c_size_t(1 << 20), 1),
    lib.hipMallocPitch(ctypes.byref(p), ctypes.byref(n), ctypes.c_size_t(100), ctypes.c_size_t(10)),
    lib.hipMemGetInfo(ctypes.byref(n), ctypes.byref(m)),
    lib.hipGetDeviceProperties(big, 0),
    lib.hipDeviceSynchronize(),
    lib.hipFree(None),
]
print(",".join(found))
print(codes)
"""


def test_the_real_runtime_is_passed_through_unharmed(rig: Any, tmp_path: Path) -> None:
    code = f"import ctypes; [ctypes.CDLL(n) for n in {LIBRARIES[-1:]!r}]"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0:
        pytest.skip("no HIP runtime here (Debian: apt-get install libamdhip64-5)")
    rig.admit()
    program = tmp_path / "calls.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), LIBRARIES[-1], ",".join(HOOKS)]
    bare = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout.splitlines()
    environment = {**rig.environment(), "LD_LIBRARY_PATH": ""}
    held = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert held == bare
    assert "hipMalloc" in bare[0].split(",")
    assert rig.used() == rig.region.read_use()[0].denied == 0
