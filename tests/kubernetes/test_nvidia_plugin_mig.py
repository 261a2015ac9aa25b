"""MIG: NVIDIA's own device plugin and ours name, count and refuse the same instances of the same two GPUs."""

import os
import re
import shutil
from pathlib import Path

import pytest
from tests.cluster.go_programs import build
from tests.cluster.waiting import wait_until
from tests.kubernetes.nvidia_plugin import PLUGIN, running, write_libraries

from aimgpu.domain import Vendor
from aimgpu.domain.slices import EMPTY
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.node.device_plugin.allocation import check_request
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, list_resources, mixed_layouts
from aimgpu.kubernetes.vocabulary.sharing_config import Strategy, parse_config

WHOLE = ""
THREE_KINDS = "3g.71gb@0+1g.18gb@4+1g.18gb@5"
ALIKE = "1g.18gb@0+1g.18gb@1+1g.18gb@2"

# The strategy, the replicated resources and the layouts of two GPUs, with what both plugins offer.
OFFERED: dict[str, tuple[str, str, tuple[str, str], dict[str, int]]] = {
    "single, whole GPUs": ("single", "", (WHOLE, WHOLE), {"nvidia.com/gpu": 2}),
    "single, instances alike": ("single", "", (ALIKE, "1g.18gb@3"), {"nvidia.com/gpu": 4}),
    "single, in replicas": ("single", "{name: nvidia.com/gpu, replicas: 2}", (ALIKE, ALIKE), {"nvidia.com/gpu": 12}),
    "mixed, whole GPUs": ("mixed", "", (WHOLE, WHOLE), {"nvidia.com/gpu": 2}),
    "mixed, three kinds": (
        "mixed",
        "",
        (THREE_KINDS, "2g.35gb@0"),
        {"nvidia.com/mig-3g.71gb": 1, "nvidia.com/mig-1g.18gb": 2, "nvidia.com/mig-2g.35gb": 1},
    ),
    "mixed, beside a whole GPU": (
        "mixed",
        "{name: nvidia.com/gpu, replicas: 3}",
        ("7g.141gb@0", WHOLE),
        {"nvidia.com/mig-7g.141gb": 1, "nvidia.com/gpu": 3},
    ),
    "mixed, one kind in replicas": (
        "mixed",
        "{name: nvidia.com/mig-1g.18gb, replicas: 4}, {name: nvidia.com/mig-4g.71gb, replicas: 2}",
        (THREE_KINDS, "1g.18gb@0+1g.35gb@2"),
        {"nvidia.com/mig-3g.71gb": 1, "nvidia.com/mig-1g.18gb": 12, "nvidia.com/mig-1g.35gb": 1},
    ),
    "mixed, MIG mode without instances": ("mixed", "", (EMPTY, "3g.71gb@4"), {"nvidia.com/mig-3g.71gb": 1}),
}

REFUSED: dict[str, tuple[tuple[str, str], str]] = {
    "instances of two kinds": ((THREE_KINDS, ALIKE), "more than one MIG device type present on node"),
    "one GPU whole": ((ALIKE, WHOLE), "must be configured with the same migEnabled value"),
    "one GPU without instances": ((ALIKE, EMPTY), "has no MIG devices configured"),
    "both without instances": ((EMPTY, EMPTY), "has no MIG devices configured"),
}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace takes root")


@pytest.fixture(scope="module")
def plugin() -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return str(build(PLUGIN) / "nvidia-device-plugin")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    write_libraries(folder)
    return folder


def config(strategy: str, replicated: str) -> str:
    sharing = f"sharing: {{timeSlicing: {{resources: [{replicated}]}}}}\n" if replicated else ""
    return f"version: v1\nflags: {{migStrategy: {strategy}}}\n{sharing}"


def instances(layout: str) -> str:
    """The kinds of a layout's instances, as the stand-in NVML reads them."""
    return "-" if layout == EMPTY else ",".join(re.findall(r"(\d+g\.\d+gb(?:\+me)?)@", layout))


def our_resources(strategy: str, replicated: str, layouts: tuple[str, str]) -> tuple[NodeResource, ...]:
    hardware = SimulatedHardware([("H200", 2)])
    for device, layout in zip(hardware.read_devices(), layouts, strict=True):
        if layout:
            hardware.apply_layout(device.id, layout)
    return list_resources(hardware.read_devices(), parse_config(config(strategy, replicated)))


@pytest.mark.parametrize("name", OFFERED)
def test_our_plugin_offers_the_instances_by_their_names(name: str) -> None:
    strategy, replicated, layouts, expected = OFFERED[name]
    assert {found.name: len(found.replicas) for found in our_resources(strategy, replicated, layouts)} == expected


@needs_root
@pytest.mark.parametrize("name", OFFERED)
def test_nvidias_plugin_offers_the_same_instances_and_gives_them_out(
    name: str, plugin: str, libraries: Path, tmp_path: Path
) -> None:
    strategy, replicated, layouts, expected = OFFERED[name]
    text = config(strategy, replicated)
    with running(plugin, text, libraries, tmp_path, mig=";".join(map(instances, layouts))) as (process, kubelet):

        def check() -> None:
            if process.poll() is not None:
                raise RuntimeError((tmp_path / "log").read_text())

        wait_until(lambda: len(kubelet.registered) >= len(expected), "resources of NVIDIA's plugin", check)
        assert {found: len(ids) for found, ids in kubelet.registered.items()} == expected
        for found in our_resources(strategy, replicated, layouts):
            ours, theirs = found.replicas[0].id, kubelet.registered[found.name][0]
            assert ("::" in ours) == ("::" in theirs)
            assert not kubelet.allocate(found.name, [theirs])
            assert check_request(found, [ours], parse_config(text))


@needs_root
def test_an_instance_with_media_engines_has_its_documented_name_in_ours_and_the_plain_one_in_nvidias(
    plugin: str, libraries: Path, tmp_path: Path
) -> None:
    """NVIDIA's 0.19.1 compares the beginning of profiles: 1g.18gb is found before 1g.18gb+me."""
    layouts = ("1g.18gb+me@0", WHOLE)
    assert [found.name for found in our_resources("mixed", "", layouts)] == ["nvidia.com/gpu", "nvidia.com/mig-1g.18gb.me"]
    instances_of_both = ";".join(map(instances, layouts))
    with running(plugin, config("mixed", ""), libraries, tmp_path, mig=instances_of_both) as (process, kubelet):
        wait_until(lambda: len(kubelet.registered) == 2 or process.poll() is not None, "resources of NVIDIA's plugin")
        assert set(kubelet.registered) == {"nvidia.com/gpu", "nvidia.com/mig-1g.18gb"}


@pytest.mark.parametrize("name", REFUSED)
def test_our_plugin_gives_no_single_name_to_different_partitions(name: str) -> None:
    layouts, _ = REFUSED[name]
    assert our_resources("single", "", layouts) == ()


@needs_root
@pytest.mark.parametrize("name", REFUSED)
def test_nvidias_plugin_gives_no_single_name_to_different_partitions(
    name: str, plugin: str, libraries: Path, tmp_path: Path
) -> None:
    layouts, reason = REFUSED[name]
    with running(plugin, config("single", ""), libraries, tmp_path, mig=";".join(map(instances, layouts))) as (
        process,
        kubelet,
    ):
        assert process.wait(timeout=300) != 0
        assert kubelet.registered == {}
    assert reason in (tmp_path / "log").read_text()


def test_amd_gpus_of_different_layouts_get_no_single_name_but_one_each_when_mixed() -> None:
    hardware = SimulatedHardware([("MI300X", 2), ("H200", 1)])
    hardware.apply_layout(hardware.read_devices()[0].id, "CPX/NPS1")
    devices = hardware.read_devices()
    single, mixed = (list_resources(devices, parse_config(config(strategy, ""))) for strategy in ("single", "mixed"))
    assert [found.name for found in single] == ["nvidia.com/gpu"]
    assert {found.name: len(found.replicas) for found in mixed} == {
        "amd.com/cpx_nps1": 8,
        "amd.com/spx_nps1": 1,
        "nvidia.com/gpu": 1,
    }
    assert list(mixed_layouts(devices, Strategy.SINGLE)) == [Vendor.AMD]
    assert "CPX/NPS1, SPX/NPS1" in mixed_layouts(devices, Strategy.SINGLE)[Vendor.AMD]
    assert mixed_layouts(devices, Strategy.MIXED) == {}
