"""NVIDIA's own device plugin reads the same configuration files: it takes what ours takes and refuses what ours refuses.

It runs on two GPUs of a stand-in NVML and registers with a kubelet that records: it offers the resources that ours offers.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.go_programs import GoProgram, build
from tests.cluster.waiting import wait_until
from tests.kubernetes.recording_kubelet import RecordingKubelet, recording_kubelet
from tests.kubernetes.sharing_configs import IGNORED, REFUSED, REFUSED_AT_START, TAKEN, time_slicing

from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.device_plugin.allocation import check_request
from aimgpu.kubernetes.device_plugin.resources import NodeResource, list_resources
from aimgpu.kubernetes.device_plugin.sharing_config import SharingConfig, parse_config
from aimgpu.kubernetes.timeslicing.sharing_manifest import SharingSettings, plugin_config

PLUGIN = GoProgram(
    name="nvidia-device-plugin",
    packages=("github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin",),
    cgo=True,
    linker="-Wl,--unresolved-symbols=ignore-in-object-files",  # NVML is opened when it runs
)
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
    """A folder with NVML, and with an MPS daemon that answers."""
    folder = tmp_path_factory.mktemp("libraries")
    source = Path(__file__).with_name("standin_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    control = folder / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\ncat > /dev/null\necho 100.0\n")
    control.chmod(0o755)
    return folder


@contextmanager
def running(plugin: str, text: str, libraries: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], RecordingKubelet]]:
    """The plugin in a mount namespace of its own, where the kubelet's folder is one of the test's."""
    (folder / "config.yaml").write_text(text)
    sockets = folder / "sockets"
    sockets.mkdir()
    inside = "/var/lib/kubelet/device-plugins"
    script = f'mount -t tmpfs none /var/lib && mkdir -p {inside} && mount --bind "$1" {inside} && shift && exec "$@"'
    arguments = ["--config-file", str(folder / "config.yaml"), "--mps-root", str(folder), "--device-discovery-strategy", "nvml"]
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(sockets), plugin, *arguments]
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries), "PATH": f"{libraries}:{os.environ['PATH']}"}
    with recording_kubelet(sockets) as kubelet, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
        try:
            yield process, kubelet
        finally:
            process.terminate()
            process.wait()


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
