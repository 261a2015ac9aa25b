"""When `aimgpu k8s status` advises against counters: kube-scheduler before 1.37 slows down with every node that has them."""

import asyncio
from typing import Any

import pytest
from tests.kubernetes.api_server import serving

from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.models.serving.scheduling_notes import describe_missing_classes, describe_slow_scheduling
from aimgpu.kubernetes.node.dra_driver.candidates import list_candidates
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.node.dra_driver.resource_slices import SliceSettings, build_slices

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def notes(nodes: int, *, single_device: bool = False, minor: str = "36", forbidden: bool = False) -> list[str]:
    gpus = [list_candidates(device, repartition=False) for device in SimulatedHardware([("MI300X", 2)]).read_devices()]

    async def main() -> list[str]:
        async with serving() as (api, client):
            api.minor = minor
            for number in range(nodes):
                settings = SliceSettings(node=f"node{number}", single_device=single_device)
                for part, spec in enumerate(build_slices(gpus, {}, settings)):
                    api.put(SLICES, {"metadata": {"name": f"{number}-{part}"}, "spec": spec})
            if forbidden:
                api.fault = lambda _method, path: 403 if path.startswith(SLICES) else None
            return await describe_slow_scheduling(client)

    return asyncio.run(main())


def test_counters_on_many_nodes_are_advised_against() -> None:
    (note,) = notes(101)
    assert "101 nodes" in note
    assert "agent.singleDevice=true" in note


@pytest.mark.parametrize(
    "given",
    [
        {"nodes": 100},
        {"nodes": 101, "single_device": True},
        {"nodes": 101, "minor": "37"},
        {"nodes": 101, "forbidden": True},
    ],
)
def test_nothing_is_said_where_it_does_not_help_or_cannot_be_known(given: dict[str, Any]) -> None:
    assert notes(**given) == []


def missing(*without: str, slices: bool = True, forbidden: bool = False) -> list[str]:
    async def main() -> list[str]:
        async with serving() as (api, client):
            if slices:
                spec = {"driver": "gpu.aim.amd.com", "nodeName": "n1", "devices": []}
                api.put(SLICES, {"metadata": {"name": "n1"}, "spec": spec})
            for item in device_classes():
                if item["metadata"]["name"] not in without:
                    api.put("/apis/resource.k8s.io/v1/deviceclasses", item)
            if forbidden:
                api.fault = lambda _method, path: 403 if "deviceclasses" in path else None
            return await describe_missing_classes(client)

    return asyncio.run(main())


def test_a_device_class_that_is_not_there_is_named() -> None:
    (note,) = missing("kai.gpu.aim.amd.com", "shared.gpu.aim.amd.com")
    assert "no DeviceClass shared.gpu.aim.amd.com, kai.gpu.aim.amd.com: pods whose claims name it are never placed" in note
    assert missing() == []
    assert missing("kai.gpu.aim.amd.com", slices=False) == []
    assert missing("kai.gpu.aim.amd.com", forbidden=True) == []
