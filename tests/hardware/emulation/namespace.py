"""A command on a machine with other hardware: an emulated /sys, and a /dev with the files that its GPUs would have."""

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
mount --make-rprivate / && mount --bind "$1" /sys && mount -t tmpfs none /mnt && mkdir /mnt/shm /mnt/dri || exit 90
for file in null zero random urandom; do touch "/mnt/$file" && mount --bind "/dev/$file" "/mnt/$file" || exit 91; done
for file in $2; do touch "/mnt/$file" || exit 92; done
mount --bind /dev/shm /mnt/shm && mount --rbind /mnt /dev && shift 2 && exec "$@"
"""
_PROGRAM = "from aimgpu.cli.main import main; main()"
COMPUTE_DRIVER = ("kfd", *(f"dri/renderD{number}" for number in range(128, 144)))


def aimgpu_on(
    tree: Path, home: Path, *arguments: str, device_files: tuple[str, ...] = COMPUTE_DRIVER
) -> subprocess.CompletedProcess[str]:
    """`aimgpu` with these arguments. Needs root."""
    before = ["unshare", "-m", "sh", "-c", _SCRIPT, "sh", str(tree), " ".join(device_files)]
    environment = {**os.environ, "AIMGPU_HOME": str(home)}
    command = [*before, sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
