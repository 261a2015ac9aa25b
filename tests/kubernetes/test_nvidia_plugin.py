"""NVIDIA's own device plugin reads the same configuration files: it takes what ours takes and refuses what ours refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cluster.go_programs import GoProgram, build
from tests.kubernetes.sharing_configs import REFUSED, TAKEN

from aimgpu.kubernetes.timeslicing.sharing_manifest import SharingSettings, plugin_config

PLUGIN = GoProgram(
    name="nvidia-device-plugin",
    packages=("github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin",),
    cgo=True,
    linker="-Wl,--unresolved-symbols=ignore-in-object-files",  # NVML is opened when it runs
)
REFUSAL = "unable to parse config file"


@pytest.fixture(scope="module")
def plugin() -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return str(build(PLUGIN) / "nvidia-device-plugin")


def start(plugin: str, text: str, folder: Path) -> str:
    """What it says before it ends: without a GPU it always does."""
    path = folder / "config.yaml"
    path.write_text(text)
    command = [plugin, "--config-file", str(path), "--kubelet-socket", str(folder / "kubelet.sock")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode != 0
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("name", TAKEN)
def test_nvidias_plugin_takes_the_configuration(name: str, plugin: str, tmp_path: Path) -> None:
    assert REFUSAL not in start(plugin, TAKEN[name], tmp_path)


def test_nvidias_plugin_takes_what_timeslicing_renders(plugin: str, tmp_path: Path) -> None:
    for settings in (
        SharingSettings(resource="nvidia.com/gpu", replicas=4),
        SharingSettings(resource="nvidia.com/gpu", replicas=16, rename=True, several=True, enforced=True),
    ):
        assert REFUSAL not in start(plugin, plugin_config(settings), tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_nvidias_plugin_refuses_the_configuration(name: str, plugin: str, tmp_path: Path) -> None:
    assert REFUSAL in start(plugin, REFUSED[name], tmp_path)
