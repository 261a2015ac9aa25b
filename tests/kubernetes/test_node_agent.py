"""The node agent beside its driver: labels, metrics, the GpuNode object, layouts that a PartitionPlan wants, its memory."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.node_agent import NodeAgent, claim_template, gpu_pod, running_agent, share

from aimgpu.domain import Vendor
from aimgpu.errors import ClusterFailed, InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.node.agent.conflicts import advertised_resources, find_rival_sockets
from aimgpu.kubernetes.node.agent.labels import PluginSharing, label_changes, node_labels
from aimgpu.kubernetes.node.agent.options import parse_options, parse_simulated
from aimgpu.kubernetes.node.agent.survey import numa_node, pcie_root
from aimgpu.kubernetes.node.dra_driver.publisher import require_claims
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions

GPU = "sim-mi300x-0"


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    cluster.apply(custom_resource_definitions())
    cluster.wait_until_served(*(definition["metadata"]["name"] for definition in custom_resource_definitions()))
    with running_agent(cluster, "--simulated", "MI300X:1", "--metrics-port", "9400") as running:
        yield running


def test_the_node_is_labelled_and_its_gpus_are_in_its_gpu_node(cluster: Cluster, agent: NodeAgent) -> None:
    def gpus() -> list[dict[str, object]]:
        found = cluster.get("gpunode", "node1").get("status") or {}
        listed: list[dict[str, object]] = found.get("gpus") or []
        return listed

    wait_until(lambda: bool(cluster.kubectl("get", "gpunodes", "--output=name")) and bool(gpus()), "a GpuNode", agent.check)
    assert [(gpu["id"], gpu["product"], gpu["layout"]) for gpu in gpus()] == [(GPU, "MI300X", "SPX/NPS1")]
    wanted = {
        "aim.amd.com/gpu-sharing.managed": "true",
        "aim.amd.com/gpu.simulated": "true",
        "amd.com/gpu.compute-memory-partition": "spx_nps1",
    }
    wait_for(
        lambda: cluster.get("node", "node1")["metadata"]["labels"],
        lambda labels: wanted.items() <= labels.items(),
        "the node's labels",
        agent.check,
    )


def test_its_rights_suffice_to_follow_its_own_objects(agent: NodeAgent) -> None:
    """Without them it would ask for each of them in every round."""

    def absent() -> dict[str, bool]:
        """Of what it follows, as last logged."""
        lines = [json.loads(line) for line in agent.log().splitlines() if '"mirror.listed"' in line]
        return {line["resource"]: line["absent"] for line in lines}

    wanted = dict.fromkeys(("nodes", "gpunodes", "resourceslices"), False)
    found = wait_for(absent, lambda found: wanted.items() <= found.items(), "its watches", agent.check)
    assert not any(found.values())


def test_a_layout_that_a_plan_wants_is_applied_when_the_gpu_is_idle(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(claim_template("some", share("1Gi")), namespace)
    cluster.apply(gpu_pod("busy", "some"), namespace)
    cluster.wait("pod/busy", "condition=Ready", namespace)
    wanted = "-p=" + json.dumps({"spec": {"layouts": [{"gpu": GPU, "layout": "CPX/NPS4"}]}})
    cluster.kubectl("patch", "gpunode", "node1", "--type=merge", wanted)

    def condition() -> dict[str, str]:
        found = (cluster.get("gpunode", "node1").get("status") or {}).get("conditions") or [{}]
        first: dict[str, str] = found[0]
        return first

    found = wait_for(condition, lambda found: found["status"] == "False", "it waits for its pods", agent.check)
    assert "it is in use as SPX/NPS1; drain its pods first" in found["message"]
    cluster.delete("pod", "busy", namespace=namespace)
    wait_for(condition, lambda found: found["status"] == "True", "applied", agent.check)
    assert agent.simulated_state()["devices"][GPU]["layout"] == "CPX/NPS4"
    wait_until(lambda: f"{GPU}-cpx-7" in agent.devices(), "its partitions are published", agent.check)
    cluster.kubectl("patch", "gpunode", "node1", "--type=merge", wanted.replace("CPX/NPS4", "SPX/NPS1"))
    wait_until(lambda: GPU in agent.devices(), "back again", agent.check)


def test_metrics_show_gpus_and_grants_and_the_agent_stays_small(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    cluster.apply(claim_template("some", share("1Gi")), namespace)
    cluster.apply(gpu_pod("counted", "some"), namespace)
    cluster.wait("pod/counted", "condition=Ready", namespace)
    port = cluster.forward(9400)

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    wanted = (
        f'aim_gpu_partition_memory_allocated_bytes{{node="node1",gpu="{GPU}",partition="{GPU}/spx-0"}} {1 << 30}',
        'simulated="true"',
        f'model="{namespace}/counted-gpu-',
    )
    wait_for(metrics, lambda text: all(line in text for line in wanted), "the grant in the metrics", agent.check)
    assert agent.process is not None
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 100 * 1024


def test_labels_are_those_that_operators_select_on() -> None:
    devices = SimulatedHardware([("MI300X", 2), ("H200", 1)]).read_devices()
    labels = node_labels(devices, {Vendor.NVIDIA: PluginSharing(replicas=4), Vendor.AMD: PluginSharing(replicas=2)})
    assert labels["nvidia.com/gpu.replicas"] == "4"
    assert labels["nvidia.com/gpu.product"].endswith("-SHARED")
    assert labels["nvidia.com/gpu.sharing-strategy"] == "time-slicing"
    assert labels["amd.com/gpu.replicas"] == "2"
    assert labels["amd.com/gpu.compute-memory-partition"] == "spx_nps1"
    assert all(len(value) <= 63 for value in labels.values())
    assert label_changes(labels, labels) == {}
    assert label_changes({"aim.amd.com/gpu.count": "3", "other": "x"}, {}) == {"aim.amd.com/gpu.count": None}


def test_other_plugins_are_found_by_their_resources_and_sockets(tmp_path: Path) -> None:
    node = {"status": {"allocatable": {"amd.com/gpu": "8", "nvidia.com/gpu": "0", "cpu": "4"}}}
    assert [rival.text for rival in advertised_resources(node, {Vendor.AMD}, set())] == [
        "another device plugin advertises amd.com/gpu on this node"
    ]
    assert advertised_resources(node, {Vendor.AMD}, {"amd.com/gpu"}) == []
    assert advertised_resources(node, {Vendor.NVIDIA}, set()) == []
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "device-plugins" / "nvidia-gpu.sock").touch()
    devices = SimulatedHardware([("H200", 1)]).read_devices()
    assert find_rival_sockets(tmp_path, devices) == []  # left over: nobody listens


def test_the_numa_node_of_an_nvidia_gpu_is_found_by_what_its_driver_says_of_the_uuid(tmp_path: Path) -> None:
    device = replace(SimulatedHardware([("H200", 1)]).read_devices()[0], id="GPU-2")
    for number, address in ((1, "0000:04:00.0"), (2, "0000:84:00.0")):
        facts = tmp_path / "proc/driver/nvidia/gpus" / address / "information"
        facts.parent.mkdir(parents=True)
        facts.write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number}\nBus Location: \t {address}\n")
        folder = tmp_path / f"sys/devices/pci0000:{number}0" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{number - 1}\n")
        link = tmp_path / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    assert numa_node(device, tmp_path / "sys", tmp_path / "proc") == 1
    assert pcie_root(device, tmp_path / "sys", tmp_path / "proc") == "pci0000:20"
    assert numa_node(replace(device, id="GPU-3"), tmp_path / "sys", tmp_path / "proc") is None


class OldServer(Client):
    """An API server without resource claims."""

    def __init__(self) -> None:
        pass

    async def serves(self, _group_version: str) -> bool:
        return False

    async def version(self) -> tuple[int, int, int]:
        return 1, 33, 0


def test_a_server_without_claims_is_refused_with_what_to_run_instead() -> None:
    with pytest.raises(ClusterFailed, match=r"1\.33.*resource.k8s.io/v1") as refused:
        asyncio.run(require_claims(OldServer()))
    assert "--device-plugin" in (refused.value.hint or "")


def test_options_that_cannot_go_together_are_refused() -> None:
    assert parse_simulated("MI300X:2, H200") == (("MI300X", 2), ("H200", 1))
    with pytest.raises(InvalidInput):
        parse_simulated("MI300X:none")
    with pytest.raises(InvalidInput, match="twice"):
        parse_options(["--device-plugin", "config.yaml"], {})
