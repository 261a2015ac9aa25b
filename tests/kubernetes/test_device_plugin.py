"""What the device plugin advertises, and which replicas a container gets; no cluster needed."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kubernetes.recording_kubelet import recording_kubelet
from tests.kubernetes.sharing_configs import REFUSED, TAKEN

from aimgpu.domain import Spread, Vendor
from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.node.cdi import ContainerEdits
from aimgpu.kubernetes.node.device_plugin.allocation import check_request, choose_replicas
from aimgpu.kubernetes.node.device_plugin.plugin import ResourcePlugin
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, PluginReplica, list_resources, replicas_per_gpu
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig, Strategy, parse_config

READ = {
    "empty": (Strategy.NONE, {}, False),
    "no version": (Strategy.NONE, {}, False),
    "four replicas": (Strategy.NONE, {"nvidia.com/gpu": 4}, False),
    "without a vendor": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
    "renamed by default": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
    "no more than one": (Strategy.NONE, {"nvidia.com/gpu": 2}, True),
    "two resources": (Strategy.NONE, {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.5gb": 3}, False),
    "some devices": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
    "so many devices": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
    "own name": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
    "mps": (Strategy.NONE, {"nvidia.com/gpu": 2}, True),
    "our own block": (Strategy.NONE, {"nvidia.com/gpu": 2}, False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_configurations_of_nvidias_plugin_are_read(name: str) -> None:
    found = parse_config(TAKEN[name])
    replicas = {one.name: one.replicas for one in found.replicated}
    assert (found.strategy, replicas, found.fail_requests_greater_than_one) == READ[name]
    assert found.mps is (name == "mps")
    assert (found.placement is Spread.PACK) is (name == "our own block")


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_nvidias_plugin_refuses_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        parse_config(REFUSED[name])


def resources(products: list[tuple[str, int]], config: str, layout: str | None = None) -> dict[str, int]:
    hardware = SimulatedHardware(products)
    if layout:
        for device in hardware.read_devices():
            hardware.apply_layout(device.id, layout)
    return {item.name: len(item.replicas) for item in list_resources(hardware.read_devices(), parse_config(config))}


SHARE = "version: v1\nflags: {{migStrategy: {strategy}}}\nsharing: {{timeSlicing: {{{rename}resources: [{resources}]}}}}\n"


def config(strategy: str, resources: str, rename: str = "") -> str:
    return SHARE.format(strategy=strategy, resources=resources, rename=rename)


def test_resources_are_named_as_the_vendors_do() -> None:
    assert resources([("MI300X", 2), ("H200", 1)], "version: v1") == {"amd.com/gpu": 2, "nvidia.com/gpu": 1}
    four = config("none", "{name: amd.com/gpu, replicas: 4}")
    assert resources([("MI300X", 2), ("H200", 1)], four) == {"amd.com/gpu": 8, "nvidia.com/gpu": 1}
    renamed = config("none", "{name: amd.com/gpu, replicas: 4}", "renameByDefault: true, ")
    assert resources([("MI300X", 1)], renamed) == {"amd.com/gpu.shared": 4}
    single = config("single", "{name: amd.com/gpu, replicas: 2}")
    assert resources([("MI300X", 1)], single, "CPX/NPS1") == {"amd.com/gpu": 16}
    mixed = config("mixed", "{name: amd.com/cpx_nps1, replicas: 3}, {name: nvidia.com/mig-3g.71gb, replicas: 2}")
    assert resources([("MI300X", 1)], mixed, "CPX/NPS1") == {"amd.com/cpx_nps1": 24}
    assert resources([("H200", 1)], mixed, "3g.71gb@0+1g.18gb@4") == {"nvidia.com/mig-1g.18gb": 1, "nvidia.com/mig-3g.71gb": 2}
    assert resources([("H200", 1)], config("none", "{name: nvidia.com/gpu, replicas: 2}"), "3g.71gb@0") == {}


def test_settings_per_gpu_are_honoured() -> None:
    text = config("none", "{name: amd.com/gpu, replicas: 4, devices: [1]}, {name: amd.com/gpu, replicas: 2, devices: [0]}")
    hardware = SimulatedHardware([("MI300X", 3)])
    (resource,) = list_resources(hardware.read_devices(), parse_config(text))
    counts = {device.index: 0 for device in hardware.read_devices()}
    for replica in resource.replicas:
        counts[int(replica.device_id[-1])] += 1
    assert counts == {0: 2, 1: 4, 2: 1}


def test_mps_gives_each_replica_its_part_of_the_compute_and_one_per_container() -> None:
    config = parse_config(TAKEN["mps"])
    (resource,) = list_resources(SimulatedHardware([("H200", 1)]).read_devices(), config)
    assert {replica.compute_ppm for replica in resource.replicas} == {500_000}
    with pytest.raises(InvalidInput, match="maximum request size for shared resources is 1"):
        check_request(resource, [replica.id for replica in resource.replicas], config)


def test_the_kubelet_is_given_the_numa_node_of_each_replica(tmp_path: Path) -> None:
    devices = SimulatedHardware([("MI300X", 2)]).read_devices()
    shared = parse_config(config("none", "{name: amd.com/gpu, replicas: 2}"))
    (resource,) = list_resources(devices, shared, numa={devices[0].id: 1, devices[1].id: None})

    async def register() -> None:
        plugin = ResourcePlugin(resource, folder=tmp_path, config=shared, give=lambda *_: (ContainerEdits(), ()))
        await plugin.start()
        await plugin.stop()

    with recording_kubelet(tmp_path) as kubelet:
        asyncio.run(register())
    first, second = ({one.id for one in resource.replicas if one.device_id == device.id} for device in devices)
    assert kubelet.numa_nodes == {**dict.fromkeys(first, (1,)), **dict.fromkeys(second, ())}


def test_replicas_divide_the_memory_and_never_exceed_it() -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    (device,) = hardware.read_devices()
    (resource,) = list_resources([device], parse_config(config("none", "{name: amd.com/gpu, replicas: 7}")))
    assert sum(replica.memory_bytes or 0 for replica in resource.replicas) <= device.memory_bytes
    assert replicas_per_gpu([resource], Vendor.AMD) == 7


def shared(gpus: int, replicas: int) -> NodeResource:
    made = tuple(
        PluginReplica(
            id=f"g{gpu}::{number}", device_id=f"g{gpu}", partition_id=f"g{gpu}/spx-0", memory_bytes=1, compute_ppm=None
        )
        for gpu in range(gpus)
        for number in range(replicas)
    )
    return NodeResource(name="amd.com/gpu", replicas=made, shared=True)


def test_packed_fills_a_gpu_and_spread_takes_the_emptiest() -> None:
    resource = shared(2, 3)
    free = ["g0::2", "g1::0", "g1::1", "g1::2"]
    assert choose_replicas(resource, free, [], 1, SharingConfig(placement=Spread.PACK)) == ["g0::2"]
    assert choose_replicas(resource, free, [], 1, SharingConfig(placement=Spread.SPREAD)) == ["g1::0"]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_container_gets_different_gpus_as_long_as_there_are_any(gpus: int, replicas: int, data: st.DataObject) -> None:
    resource = shared(gpus, replicas)
    names = [replica.id for replica in resource.replicas]
    free = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    count = data.draw(st.integers(1, len(free)))
    placement = data.draw(st.sampled_from(Spread))
    chosen = choose_replicas(resource, free, free[:1], count, SharingConfig(placement=placement))
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= set(free)
    assert free[0] in chosen
    there = {name.partition("::")[0] for name in free}
    assert len({name.partition("::")[0] for name in chosen}) == min(count, len(there))


def test_more_than_one_is_refused_where_it_is_configured_and_twice_the_same_gpu_unless_asked() -> None:
    resource = shared(2, 2)
    with pytest.raises(InvalidInput, match="maximum request size for shared resources is 1"):
        check_request(resource, ["g0::0", "g1::0"], SharingConfig(fail_requests_greater_than_one=True))
    assert len(check_request(resource, ["g0::0", "g1::0"], SharingConfig())) == 2
    with pytest.raises(InvalidInput, match="2 replicas of one GPU"):
        check_request(resource, ["g0::0", "g0::1"], SharingConfig())
    assert len(check_request(resource, ["g0::0", "g0::1"], SharingConfig(same_gpu=True))) == 2
