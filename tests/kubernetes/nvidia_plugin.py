"""NVIDIA's device plugin 0.19.1 as a program, on two GPUs of a stand-in NVML, before a kubelet that records."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.go_programs import GoProgram
from tests.kubernetes.recording_kubelet import RecordingKubelet, recording_kubelet

PLUGIN = GoProgram(
    name="nvidia-device-plugin",
    packages=("github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin",),
    cgo=True,
    linker="-Wl,--unresolved-symbols=ignore-in-object-files",  # NVML is opened when it runs
)
SOCKETS = "/var/lib/kubelet/device-plugins"
# $1: the folder of sockets, $2: the capabilities of MIG instances. Both are where the plugin looks for them, for it alone.
_PREPARE = f"""
mount -t tmpfs none /var/lib && mkdir -p {SOCKETS} && mount --bind "$1" {SOCKETS} &&
mount -t tmpfs none /proc/driver && mkdir /proc/driver/nvidia-caps && cp "$2" /proc/driver/nvidia-caps/mig-minors &&
shift 2 && exec "$@"
"""


def write_libraries(folder: Path) -> None:
    """NVML, and an MPS daemon that answers."""
    source = Path(__file__).with_name("standin_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    control = folder / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\ncat > /dev/null\necho 100.0\n")
    control.chmod(0o755)


@contextmanager
def running(
    plugin: str, text: str, libraries: Path, folder: Path, *, mig: str = ""
) -> Iterator[tuple[subprocess.Popen[str], RecordingKubelet]]:
    """In a mount namespace of its own; its log is FOLDER/log. `mig`: the instances of both GPUs, as the stand-in reads them."""
    (folder / "config.yaml").write_text(text)
    minors = folder / "mig-minors"
    minors.write_text(_mig_minors())
    sockets = folder / "sockets"
    sockets.mkdir()
    arguments = ["--config-file", str(folder / "config.yaml"), "--mps-root", str(folder), "--device-discovery-strategy", "nvml"]
    command = ["unshare", "--mount", "sh", "-c", _PREPARE, "sh", str(sockets), str(minors), plugin, *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries), "PATH": f"{libraries}:{os.environ['PATH']}"}
    with recording_kubelet(sockets) as kubelet, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment | {"STANDIN_MIG": mig})
        try:
            yield process, kubelet
        finally:
            process.terminate()
            process.wait()


def _mig_minors() -> str:
    """As the driver writes it: a number of a device node for each GPU instance and each compute instance."""
    names = [f"gpu{gpu}/gi{gi}/{part}access" for gpu in range(2) for gi in range(1, 8) for part in ("", "ci0/")]
    return "".join(f"{name} {number}\n" for number, name in enumerate(names, start=3))
