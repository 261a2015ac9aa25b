"""What KAI granted a pod, read from its records; and the seats that bring its pods to the node agent."""

from typing import Any

import pytest

from aimgpu.errors import Conflict
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.node.agent.options import parse_options
from aimgpu.kubernetes.node.dra_driver.resource_slices import DEVICES_PER_SLICE
from aimgpu.kubernetes.node.kai.granted import config_map_of, find_partition, read_grant
from aimgpu.kubernetes.node.kai.seats import build_seat_slices, is_seat
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
        "spec": {
            "schedulerName": "kai-scheduler",
            "nodeName": "node1",
            "containers": [{"name": "side"}, {"name": "main", "env": [variable]}],
        },
    }


def records(portion: str = "0.50", devices: str = GPU.id) -> dict[str, Any]:
    return {"data": {"GPU_PORTION": portion, "NVIDIA_VISIBLE_DEVICES": devices}}


def reservation(device: str, group: str = "6f1c", node: str = "node1") -> dict[str, Any]:
    annotations = {"run.ai/reserve_for_gpu_index": device}
    return {"metadata": {"labels": {"runai-gpu-group": group}, "annotations": annotations}, "spec": {"nodeName": node}}


HELD = [reservation(device.id) for device in DEVICES]


def test_a_fraction_is_a_part_of_the_gpu_that_kai_names() -> None:
    grant = read_grant(pod(gpu_fraction="0.5"), records(), HELD)
    partition = find_partition(grant.devices[0], DEVICES)
    assert partition.device_id == GPU.id
    assert grant.memory_bytes(partition) == partition.memory_bytes // 2 // MIB * MIB
    assert config_map_of(pod()) == "chat-abc1234-shared-gpu-0"


def test_memory_is_not_rounded_as_kais_portion_is() -> None:
    grant = read_grant(pod(gpu_memory="20000"), records("0.14"), HELD)
    assert grant.memory_bytes(find_partition(GPU.id, DEVICES)) == 20000 * MIB


def test_several_gpus_and_names_of_cdi_devices_are_understood() -> None:
    both = ",".join(f"k8s.device-plugin.nvidia.com/gpu={device.id}" for device in DEVICES)
    grant = read_grant(pod(gpu_fraction="0.3"), records("0.30", both), HELD)
    assert [find_partition(name, DEVICES).device_id for name in grant.devices] == [device.id for device in DEVICES]


@pytest.mark.parametrize(
    "config_map",
    [{}, {"data": {}}, records(portion=""), records(portion="NaN"), records(portion="-1"), records(devices="")],
)
def test_records_that_are_not_complete_are_waited_for(config_map: dict[str, Any]) -> None:
    with pytest.raises(Conflict, match="not granted"):
        read_grant(pod(gpu_fraction="0.5"), config_map, HELD)


def test_a_pod_that_kai_did_not_place_is_refused() -> None:
    unplaced = pod(gpu_fraction="0.5")
    unplaced["metadata"]["labels"] = {}
    with pytest.raises(Conflict, match="not granted"):
        read_grant(unplaced, records(), HELD)
    unplaced["spec"]["containers"] = [{"name": "main"}]
    with pytest.raises(Conflict, match="no part of a GPU"):
        config_map_of(unplaced)
    with pytest.raises(Conflict, match="does not have"):
        find_partition("GPU-of-another-node", DEVICES)


@pytest.mark.parametrize(
    "held",
    [
        [],
        [reservation(GPU.id, group="another")],
        [reservation(GPU.id, node="node2")],
        [reservation(DEVICES[1].id)],
        [{"metadata": {}, "spec": {"nodeName": "node1"}}],
    ],
)
def test_a_map_that_its_tenant_forged_grants_no_gpu_that_kai_does_not_hold_for_it(held: list[dict[str, Any]]) -> None:
    with pytest.raises(Conflict, match="holds no GPU"):
        read_grant(pod(gpu_fraction="1"), records("1"), held)


def test_a_pod_of_another_scheduler_has_no_grant_of_kai() -> None:
    forged = pod(gpu_fraction="0.5")
    del forged["spec"]["schedulerName"]
    with pytest.raises(Conflict, match="not placed by KAI"):
        read_grant(forged, records(), HELD)


def test_memory_that_its_tenant_changed_is_never_above_kais_portion() -> None:
    partition = find_partition(GPU.id, DEVICES)
    forged = read_grant(pod(gpu_memory=str(1 << 20)), records("0.14"), HELD)
    assert forged.memory_bytes(partition) <= partition.memory_bytes * 15 // 100


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
