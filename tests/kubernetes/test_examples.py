"""The manifests of examples/kubernetes do what their first lines say: on the real cluster, with stand-ins for the engines."""

from collections.abc import Iterator

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.kubernetes.admission import running_admission
from tests.kubernetes.example_manifests import FOLDER, MANIFESTS, granted_bytes, read_example, with_stand_in
from tests.kubernetes.node_agent import NodeAgent, running_agent

from aimgpu.hardware.simulated import find_product
from aimgpu.kubernetes.cluster.admission.inventory import PublishedGpus
from aimgpu.kubernetes.cluster.admission.review import Cluster as Admitted
from aimgpu.kubernetes.cluster.admission.review import review_service
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config
from aimgpu.sizing import built_in
from aimgpu.units import GIB, MIB

GPU_MEMORY = find_product("MI300X").memory_bytes


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_says_how_it_is_applied(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert f"#   kubectl apply -f examples/kubernetes/{name}\n" in text
    assert all(item["apiVersion"] and item["metadata"]["name"] for item in read_example(name))


def test_the_time_slicing_config_is_one_that_the_device_plugin_takes() -> None:
    [item] = read_example("time-slicing-config.yaml")
    [text] = item["data"].values()
    parse_config(text)
    assert yaml.safe_load(text)["sharing"]["timeSlicing"]["resources"] == [{"name": "nvidia.com/gpu", "replicas": 4}]


def test_the_service_of_the_example_is_one_that_admission_takes() -> None:
    [item] = read_example("kserve-shared.yaml")
    assert review_service(item, Admitted(gpus=PublishedGpus([]), catalogue=built_in())) == ()


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> Iterator[NodeAgent]:
    with running_agent(cluster, "--simulated", "MI300X:2", "--repartition") as running, running_admission(cluster):
        wait_until(lambda: bool(running.devices()), "GPUs are published", running.check)
        yield running


def test_two_pods_run_on_one_gpu_with_half_and_two_fifths_of_it(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    for item in read_example("two-pods-one-gpu.yaml"):
        cluster.apply(with_stand_in(item), namespace)
    for name, tenths in (("vllm-1", 5), ("vllm-2", 4)):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
        assert granted_bytes(cluster, name, namespace) == pytest.approx(GPU_MEMORY * tenths // 10, abs=2 * MIB)
    assert len({grant["partition_id"].partition("/")[0] for grant in agent.grants()}) == 1
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants are given back", agent.check)


def test_claims_give_a_share_and_a_partition_of_its_own(cluster: Cluster, namespace: str, agent: NodeAgent) -> None:
    for item in read_example("claims.yaml"):
        cluster.apply(with_stand_in(item) if item["kind"] == "Pod" else item, namespace)
    for name in ("shared", "alone"):
        cluster.wait(f"pod/{name}", "condition=Ready", namespace)
    assert granted_bytes(cluster, "shared", namespace) == 90 * GIB
    assert granted_bytes(cluster, "alone", namespace) == pytest.approx(GPU_MEMORY // 8, abs=GIB)
    cluster.delete("pod", "--all", namespace=namespace)
    wait_until(lambda: not agent.grants(), "grants are given back", agent.check)


@pytest.mark.parametrize("name", ["ollama-time-sliced.yaml", "time-slicing-config.yaml"])
def test_the_api_server_takes_what_needs_no_definition_of_ours(cluster: Cluster, namespace: str, name: str) -> None:
    shown = cluster.kubectl("apply", "--dry-run=server", f"--namespace={namespace}", "-f", str(FOLDER / name))
    assert shown.count("created (server dry run)") == len(read_example(name))


def test_the_api_server_takes_the_plan_by_our_definition(cluster: Cluster) -> None:
    definitions = custom_resource_definitions()
    names = [one["metadata"]["name"] for one in definitions]
    cluster.apply(definitions)
    try:
        cluster.wait_until_served(*names)
        shown = cluster.kubectl("apply", "--dry-run=server", "-f", str(FOLDER / "partition-plan.yaml"))
        assert "partitionplan.aim.amd.com/cpx created (server dry run)" in shown
    finally:
        cluster.kubectl("delete", "crd", *names, "--wait=false")
