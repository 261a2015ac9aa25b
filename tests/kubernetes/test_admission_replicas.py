"""Annotated pods on clusters whose nodes run the device plugin: limits of extended resources in place of claims."""

import copy
from typing import Any

import pytest
from tests.kubernetes.test_admission_review import H200, QWEN, SEAT, apply, cluster_of, pod, slice_of

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.cluster.admission.inventory import PublishedGpus
from aimgpu.kubernetes.cluster.admission.replicas import OfferedReplicas
from aimgpu.kubernetes.cluster.admission.review import Cluster, review_pod
from aimgpu.sizing import built_in

GIB = 1 << 30


def offer(name: str = "amd.com/gpu", memory: int = 48, of: int = 192, **more: object) -> dict[str, Any]:
    sizes = {"memoryBytes": memory * GIB, "partitionBytes": of * GIB, "shared": memory != of}
    modes = {"computeMode": "SPX", "memoryMode": "NPS1"} if name.startswith("amd") else {}
    return {"name": name, "replicas": of // memory, "isolation": "none", **sizes, **modes, **more}


def gpu_node(*offers: dict[str, Any], name: str = "n1") -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"resources": list(offers)}}


def plugins(*nodes: dict[str, Any], gpus: PublishedGpus | None = None) -> Cluster:
    return Cluster(gpus=gpus or PublishedGpus(), replicas=OfferedReplicas(nodes), catalogue=built_in())


def limits(item: dict[str, Any], cluster: Cluster) -> dict[str, str]:
    admitted = review_pod(item, "default", cluster)
    assert admitted.template is None
    main = apply(item, admitted.patch)["spec"]["containers"][0]
    found: dict[str, str] = main["resources"]["limits"]
    return found


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"gpu_fraction": "0.25"}, {"amd.com/gpu.shared": "1"}),
        ({"gpu_fraction": "0.1"}, {"amd.com/gpu.shared": "1"}),
        ({"gpu_fraction": "0.5"}, {"nvidia.com/gpu": "1"}),  # of the H200: no replica of the other has a half
        ({"gpu_memory": "49152"}, {"amd.com/gpu.shared": "1"}),
        ({"gpu_memory": "49153"}, {"nvidia.com/gpu": "1"}),
        ({"gpu_fraction": "0.25", "gpu_fraction_num_devices": "2"}, {"amd.com/gpu.shared": "2"}),
        ({"aim.amd.com__compute_mode": "CPX", "aim.amd.com__memory_mode": "NPS4"}, {"amd.com/cpx_nps4": "1"}),
    ],
)
def test_the_smallest_replica_that_is_large_enough_is_taken(annotations: dict[str, str], expected: dict[str, str]) -> None:
    cpx = offer("amd.com/cpx_nps4", 24, 24, computeMode="CPX", memoryMode="NPS4")
    cluster = plugins(gpu_node(offer("amd.com/gpu.shared"), cpx), gpu_node(offer("nvidia.com/gpu", 70, 140), name="n2"))
    assert limits(pod(**annotations), cluster) == expected


def test_a_second_pass_changes_nothing_and_other_limits_are_kept() -> None:
    item = pod(gpu_fraction="0.25")
    item["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
    cluster = plugins(gpu_node(offer()))
    once = apply(item, review_pod(item, "default", cluster).patch)
    assert once["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "2", "amd.com/gpu": "1"}
    assert once["metadata"]["annotations"]["aim.amd.com/resource"] == "amd.com/gpu"
    assert review_pod(once, "default", cluster).patch == []
    greedy = copy.deepcopy(once)  # the mark is no way to more than was asked for
    greedy["spec"]["containers"][0]["resources"]["limits"]["amd.com/gpu"] = "8"
    assert limits(greedy, cluster)["amd.com/gpu"] == "1"
    greedy["spec"]["containers"][1]["resources"] = {"limits": {"amd.com/gpu": "1"}}
    with pytest.raises(InvalidInput, match=r"'side' has a limit of amd\.com/gpu"):
        review_pod(greedy, "default", cluster)


@pytest.mark.parametrize(
    ("annotations", "offered", "reason"),
    [
        ({"gpu_fraction": "0.3"}, offer(), "49152 MiB and 58982 MiB are asked for"),
        ({"gpu_fraction": "0.2"}, offer(memory=192), "it is not shared"),
        ({"gpu_memory": "1000", "gpu_fraction_num_devices": "2"}, offer(mostPerContainer=1), "gets 1 of it at most"),
        ({"gpu_memory": "1000", "aim.amd.com__isolation": "enforced"}, offer(), "aim.isolation none"),
        ({"aim.amd.com__compute_mode": "CPX"}, offer(), "it is not CPX"),
        ({"aim.amd.com__compute_mode": "SPX"}, offer(), "it is a share"),
    ],
)
def test_what_no_replica_is_gets_refused_with_the_reason(
    annotations: dict[str, str], offered: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as refused:
        review_pod(pod(**annotations), "default", plugins(gpu_node(offered)))
    assert "aimgpu timeslicing apply" in str(refused.value.hint)


def test_a_name_that_is_less_on_another_node_is_not_taken() -> None:
    cluster = plugins(gpu_node(offer(memory=96)), gpu_node(offer(memory=48), name="n2"))
    assert limits(pod(gpu_fraction="0.25"), cluster) == {"amd.com/gpu": "1"}
    with pytest.raises(InvalidInput, match="49152 MiB"):
        review_pod(pod(gpu_fraction="0.5"), "default", cluster)


def test_enforced_replicas_are_taken_by_pods_that_demand_it() -> None:
    item = pod(gpu_memory="1000", **{"aim.amd.com__isolation": "enforced"})
    assert limits(item, plugins(gpu_node(offer(isolation="enforced")))) == {"amd.com/gpu": "1"}


def test_vllm_is_kept_inside_its_replica() -> None:
    item = pod("vllm", "serve", QWEN, **{"aim.amd.com__gpu_sharing": "true"})
    admitted = review_pod(item, "default", plugins(gpu_node(offer())))
    main = apply(item, admitted.patch)["spec"]["containers"][0]
    assert main["resources"]["limits"] == {"amd.com/gpu": "1"}
    (cache,) = [word for word in main["args"] if word.startswith("--kv-cache-memory-bytes=")]
    assert 20 * GIB < int(cache.partition("=")[2]) < 48 * GIB


def test_annotations_that_replicas_cannot_honour_are_warned_of() -> None:
    item = pod(gpu_memory="1000", **{"aim.amd.com__compute": "30%", "aim.amd.com__qos_priority": "high"})
    (warning,) = review_pod(item, "default", plugins(gpu_node(offer()))).warnings
    assert "aim.amd.com/compute and aim.amd.com/qos-priority have no effect" in warning
    (warning,) = review_pod(
        pod(gpu_memory="1000", **{"aim.amd.com__compute": "30%"}), "default", plugins(gpu_node(offer()))
    ).warnings
    assert warning.startswith("aim.amd.com/compute has no effect")


def test_where_any_node_has_the_dra_driver_pods_get_claims() -> None:
    both = plugins(gpu_node(offer()), gpus=PublishedGpus([slice_of(H200)]))
    assert review_pod(pod(gpu_fraction="0.25"), "default", both).template is not None
    empty = plugins(gpu_node(offer()), gpus=PublishedGpus([slice_of()]))  # a node without a GPU publishes an empty slice
    assert review_pod(pod(gpu_fraction="0.25"), "default", empty).template is None


def test_pods_that_kai_places_keep_their_seats() -> None:
    item = pod(gpu_fraction="0.5")
    item["spec"]["schedulerName"] = "kai-scheduler"
    assert review_pod(item, "default", cluster_of(SEAT)).template is not None
    assert review_pod(item, "default", plugins(gpu_node(offer()))).patch == []


def test_a_node_that_is_gone_or_has_no_replicas_any_more_offers_none() -> None:
    offered = OfferedReplicas([gpu_node(offer()), gpu_node(offer("nvidia.com/gpu", 70, 140), name="n2")])
    offered.remove(gpu_node(name="n1"))
    assert set(offered.by_name()) == {"nvidia.com/gpu"}
    offered.put(gpu_node(name="n2"))
    assert not offered.by_name()
