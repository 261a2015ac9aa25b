"""NVIDIA's own device plugin reads the same configuration files: it takes what ours takes and refuses what ours refuses.

It runs on two GPUs of a stand-in NVML and registers with a kubelet that records: it offers the resources that ours offers.
"""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.go_programs import build
from tests.cluster.waiting import wait_until
from tests.kubernetes.nvidia_plugin import PLUGIN, running, write_libraries
from tests.kubernetes.sharing_configs import IGNORED, REFUSED, REFUSED_AT_START, TAKEN, time_slicing

from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import SharingSettings, plugin_config
from aimgpu.kubernetes.node.device_plugin.allocation import check_request
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, list_resources
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig, parse_config

REFUSAL = "unable to parse config file"
TOO_LARGE = "maximum request size for shared resources is 1"


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


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    write_libraries(folder)
    return folder


def our_resources(text: str) -> tuple[NodeResource, ...]:
    return list_resources(SimulatedHardware([("H200", 2)]).read_devices(), parse_config(text))


def our_refusal(resource: NodeResource, config: SharingConfig) -> str:
    """Of a request for two; that ours gives a container no two replicas of one GPU is left out."""
    try:
        check_request(resource, [replica.id for replica in resource.replicas[:2]], replace(config, same_gpu=True))
    except InvalidInput as error:
        return error.message
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace takes root")
@pytest.mark.parametrize("name", TAKEN)
def test_nvidias_plugin_offers_the_same_resources_and_refuses_the_same_requests(
    name: str, plugin: str, libraries: Path, tmp_path: Path
) -> None:
    text = IGNORED.get(name, TAKEN[name])  # NVIDIA's plugin ignores `rename` and `devices`: as if they were not there
    config, ours = parse_config(text), our_resources(text)
    with running(plugin, TAKEN[name], libraries, tmp_path) as (process, kubelet):

        def check() -> None:
            if process.poll() is not None:
                raise RuntimeError((tmp_path / "log").read_text())

        wait_until(lambda: len(kubelet.registered) >= len(ours), "resources of NVIDIA's plugin", check)
        theirs = kubelet.registered
        assert {found: len(ids) for found, ids in theirs.items()} == {found.name: len(found.replicas) for found in ours}
        for found in ours:
            assert sorted(one.partition("::")[2] for one in theirs[found.name]) == sorted(
                replica.id.partition("::")[2] for replica in found.replicas
            )
            two = kubelet.allocate(found.name, list(theirs[found.name][:2]))
            assert (TOO_LARGE in two) == (TOO_LARGE in our_refusal(found, config))
            assert not kubelet.allocate(found.name, [theirs[found.name][0]])


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace takes root")
@pytest.mark.parametrize("name", REFUSED_AT_START)
def test_nvidias_plugin_ends_with_the_configuration_that_ours_refuses(
    name: str, plugin: str, libraries: Path, tmp_path: Path
) -> None:
    with running(plugin, REFUSED_AT_START[name], libraries, tmp_path) as (process, _):
        assert process.wait(timeout=300) != 0
        assert "is not supported with MPS" in (tmp_path / "log").read_text()
    with pytest.raises(InvalidInput):
        parse_config(REFUSED_AT_START[name])


def test_settings_per_gpu_are_ours_alone() -> None:
    (some, rest) = our_resources(time_slicing("[{name: nvidia.com/gpu, replicas: 3, devices: [0], rename: nvidia.com/third}]"))
    assert (some.name, len(some.replicas), rest.name, len(rest.replicas)) == ("nvidia.com/gpu", 1, "nvidia.com/third", 3)
