"""What KAI granted a pod, read from its records; and the seats that bring its pods to the node agent."""

from typing import Any

import pytest

from aimgpu.errors import Conflict
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.agent.options import parse_options
from aimgpu.kubernetes.dra_driver.resource_slices import DEVICES_PER_SLICE
from aimgpu.kubernetes.kai.granted import config_map_of, find_partition, read_grant
from aimgpu.kubernetes.kai.seats import build_seat_slices, is_seat
from aimgpu.units import MIB

DEVICES = SimulatedHardware([("H200-141", 2)]).read_devices()
GPU = DEVICES[0]


def pod(**annotations: str) -> dict[str, Any]:
    variable = {
        "name": "GPU_PORTION",
        "valueFrom": {"configMapKeyRef": {"name": "chat-abc1234-shared-gpu-0", "key": "GPU_PORTION"}},
    }
    return {
        "metadata": {
            "name": "chat",
            "namespace": "team",
            "labels": {"runai-gpu-group": "6f1c"},
            "annotations": {name.replace("_", "-"): value for name, value in annotations.items()},
        },
        "spec": {"containers": [{"name": "side"}, {"name": "main", "env": [variable]}]},
    }


def records(portion: str = "0.50", devices: str = GPU.id) -> dict[str, Any]:
    return {"data": {"GPU_PORTION": portion, "NVIDIA_VISIBLE_DEVICES": devices}}


def test_a_fraction_is_a_part_of_the_gpu_that_kai_names() -> None:
    grant = read_grant(pod(gpu_fraction="0.5"), records())
    partition = find_partition(grant.devices[0], DEVICES)
    assert partition.device_id == GPU.id
    assert grant.memory_bytes(partition) == partition.memory_bytes // 2 // MIB * MIB
    assert config_map_of(pod()) == "chat-abc1234-shared-gpu-0"


def test_memory_is_not_rounded_as_kais_portion_is() -> None:
    grant = read_grant(pod(gpu_memory="20000"), records("0.14"))
    assert grant.memory_bytes(find_partition(GPU.id, DEVICES)) == 20000 * MIB


def test_several_gpus_and_names_of_cdi_devices_are_understood() -> None:
    both = ",".join(f"k8s.device-plugin.nvidia.com/gpu={device.id}" for device in DEVICES)
    grant = read_grant(pod(gpu_fraction="0.3"), records("0.30", both))
    assert [find_partition(name, DEVICES).device_id for name in grant.devices] == [device.id for device in DEVICES]


@pytest.mark.parametrize(
    "config_map",
    [{}, {"data": {}}, records(portion=""), records(portion="NaN"), records(portion="-1"), records(devices="")],
)
def test_records_that_are_not_complete_are_waited_for(config_map: dict[str, Any]) -> None:
    with pytest.raises(Conflict, match="not granted"):
        read_grant(pod(gpu_fraction="0.5"), config_map)


def test_a_pod_that_kai_did_not_place_is_refused() -> None:
    unplaced = pod(gpu_fraction="0.5")
    unplaced["metadata"]["labels"] = {}
    with pytest.raises(Conflict, match="not granted"):
        read_grant(unplaced, records())
    unplaced["spec"]["containers"] = [{"name": "main"}]
    with pytest.raises(Conflict, match="no part of a GPU"):
        config_map_of(unplaced)
    with pytest.raises(Conflict, match="does not have"):
        find_partition("GPU-of-another-node", DEVICES)


def test_seats_fit_one_slice_and_a_node_without_gpus_has_none() -> None:
    (spec,) = build_seat_slices(DEVICES, "node1")
    assert 0 < len(spec["devices"]) <= DEVICES_PER_SLICE
    assert all(is_seat(device["name"]) for device in spec["devices"])
    assert not any("consumesCounters" in device or "allowMultipleAllocations" in device for device in spec["devices"])
    assert build_seat_slices((), "node1")[0]["devices"] == []
    assert not is_seat("gpu-0")


def test_kai_needs_the_driver_and_may_have_the_plugin() -> None:
    assert parse_options(["--kai", "--device-plugin", "/config"], {}).kai
    with pytest.raises(ValueError, match="enforced by claims"):
        parse_options(["--kai", "--no-dra"], {})
