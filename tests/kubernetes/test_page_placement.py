"""Why the pods of a model are where they are, on the page of a cluster; and why a share does not change while they run."""

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.kubernetes.page_objects import model, node, pod, share

from aimgpu.domain import DeviceUsage, Grant, Level, Priority
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.models.page.measured import read_measured
from aimgpu.kubernetes.models.page.observed import ClusterObjects, observe
from aimgpu.kubernetes.models.page.placement_reasons import explain_pods
from aimgpu.kubernetes.node.agent.metrics import grant_rows, render
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.units import GIB

FULL = find_product("MI300X").memory_bytes
REFUSED = "0/2 nodes are available: 2 cannot allocate all claims"


def sized(item: dict[str, Any], memory: str = "8GiB") -> dict[str, Any]:
    item["metadata"]["annotations"][labels.ENTRY] = json.dumps({"model": "org/Tiny-1B", "gpu": {"memory": memory}})
    return item


def explained(**objects: Any) -> list[dict[str, Any]]:
    found = ClusterObjects(**objects)
    return explain_pods(found, observe(found, cluster="all", taken_at=1.0), "chat")


def verdicts(one: dict[str, Any]) -> dict[str, str]:
    return {each["device_id"]: each["verdict"] for each in one["devices"]}


def test_the_gpu_that_a_pod_has_is_the_chosen_one_with_what_stays_free_and_the_others_are_judged() -> None:
    held = share("chat-1")
    held["status"]["replicas"][0]["claim"] = "chat-1-gpu-x7"
    placed = pod("chat-1", type="PodScheduled", status="True", lastTransitionTime="2026-11-01T10:00:00Z")
    nodes = [
        node(memoryBytes=FULL),
        node("n2", memoryBytes=FULL, layout="SPX/NPS1"),
        node("n3", memoryBytes=4 << 30, product="X"),
    ]
    (one,) = explained(nodes=nodes, models=[sized(model())], pods=[placed], shares=[held])
    assert one["facts"] == [
        "kube-scheduler chose node n1 at 2026-11-01T10:00:00Z.",
        "ResourceClaim chat-1-gpu-x7 holds 10GiB of gpu-0/cpx-3, which has 22.3GiB, enforced at level hardware.",
    ]
    assert verdicts(one) == {"n1/gpu-0": "chosen", "n2/gpu-0": "would do", "n3/gpu-0": "cannot"}
    assert [each["verdict"] for each in one["devices"]] == ["chosen", "would do", "cannot"], "the chosen one first"
    assert one["devices"][0]["text"].startswith("n1/gpu-0/cpx-3: ")
    assert one["decision"] is None, "what would be decided now is not what was decided"


def test_a_pod_that_waits_has_the_schedulers_words_and_what_each_gpu_lacks() -> None:
    waiting = pod("chat-1", type="PodScheduled", status="False", message=REFUSED)
    waiting["spec"] = {"containers": [{"name": "engine"}], "nodeSelector": {"zone": "a", "disk": "fast"}}
    nodes = [node(memoryBytes=FULL), node("n2", memoryBytes=FULL)]
    (one,) = explained(nodes=nodes, models=[sized(model(), "100GiB")], pods=[waiting])
    assert one["facts"] == [
        f"kube-scheduler has no place for it: {REFUSED}.",
        "Its pod runs only on nodes with disk=fast, zone=a.",
    ]
    assert set(verdicts(one).values()) == {"cannot"}
    assert not one["decision"]["placed"]
    assert one["decision"]["would_fit"], "what would make it fit"


def test_where_the_scheduler_waits_though_a_gpu_has_room_both_are_stated() -> None:
    waiting = pod("chat-1", type="PodScheduled", status="False", message="1 node(s) had untolerated taint {spot}")
    (one,) = explained(nodes=[node(memoryBytes=FULL)], models=[sized(model())], pods=[waiting])
    assert "untolerated taint {spot}." in one["facts"][0]
    assert any("By memory alone a GPU has room" in fact for fact in one["facts"])
    assert one["decision"]["placed"]


def test_a_share_that_the_node_cannot_prepare_gives_the_nodes_reason() -> None:
    held = share("chat-1")
    held["status"]["replicas"][0]["problem"] = "gpu-0: the driver does not answer"
    (one,) = explained(nodes=[node()], models=[sized(model())], pods=[pod("chat-1")], shares=[held])
    assert "The node cannot prepare it: gpu-0: the driver does not answer." in one["facts"]


def test_a_model_without_pods_or_of_unknown_size_is_answered_without_gpus() -> None:
    (asleep,) = explained(nodes=[node()], models=[model(replicas=0)])
    assert asleep["facts"] == ["scaled to zero; a request wakes it."]
    (unknown,) = explained(nodes=[node()], models=[model()], pods=[pod("p", type="Ready", status="False")])
    assert any("What it needs is not known" in fact for fact in unknown["facts"])
    assert (asleep["devices"], unknown["devices"]) == ([], [])
    assert explained(nodes=[node()]) == [], "nor is there anything of a model that is gone"


def test_pods_of_another_namespace_are_not_mixed_in() -> None:
    ours = pod("chat-1", type="PodScheduled", status="False", message="ours")
    theirs = pod("chat-1", namespace="other", type="PodScheduled", status="False", message="theirs")
    (one,) = explained(models=[sized(model())], pods=[theirs, ours], nodes=[node()])
    assert "ours" in one["facts"][0]


def test_on_a_large_cluster_the_chosen_gpu_is_never_among_those_left_out() -> None:
    nodes = [node(f"n{number}", memoryBytes=FULL) for number in range(2, 102)] + [node(memoryBytes=FULL)]
    (one,) = explained(nodes=nodes, models=[sized(model())], pods=[pod("chat-1")], shares=[share("chat-1")])
    assert (len(one["devices"]), one["left_out"]) == (64, 37)
    assert one["devices"][0]["device_id"] == "n1/gpu-0"


def grant(claim: str, instance: str, size: int) -> Grant:
    return Grant(
        id=instance,
        instance_id=instance,
        deployment=claim,
        node="n1",
        device_id="gpu-0",
        partition_id="gpu-0/cpx-3",
        memory_bytes=size,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.RUNTIME,
    )


class Use:
    """Of a tenant, what the agent's metrics have of it."""

    def __init__(self, used: int) -> None:
        self.used_bytes, self.denied, self.waited_seconds, self.overruns = used, 0, 0.25, 0


@given(used=st.lists(st.integers(0, 1 << 45), min_size=1, max_size=4), name=st.text('ab"\\ }\n', min_size=1, max_size=8))
def test_the_page_reads_what_the_agent_writes_whatever_a_claim_is_called(used: list[int], name: str) -> None:
    """The two ends of one path: a sample that one writes and the other cannot read would show as not measured."""
    grants = [grant(f"team/{name}", f"tenant-{number}", GIB) for number in range(len(used))]
    instances = [SimpleNamespace(id=one.instance_id, model="chat", grants=(one,)) for one in grants]
    tenants = {f"tenant-{number}": Use(size) for number, size in enumerate(used)}
    text = render(list(grant_rows("n1", instances, lambda _partition: tenants))).decode()  # type: ignore[arg-type, return-value]
    assert read_measured([text]).claims == {f"team/{name}": (float(sum(used)), 0.25 * len(used))}


def test_metrics_that_are_no_metrics_are_passed_over() -> None:
    texts = ["<html>bad gateway</html>", "", 'aim_gpu_utilization_ratio{node="n1",gpu="gpu-0"} NaN', "aim_x{} not-a-number"]
    found = read_measured(texts)
    assert (found.usage, found.claims) == ({}, {})


def test_a_gpu_of_which_only_the_memory_is_measured_has_no_invented_utilization() -> None:
    text = 'aim_gpu_partition_memory_measured_bytes{node="n1",gpu="gpu-0",partition="gpu-0/spx-0"} 5'
    assert read_measured([text]).usage == {
        "n1/gpu-0": DeviceUsage(
            device_id="n1/gpu-0",
            used_bytes=5,
            used_bytes_by_partition={"n1/gpu-0/spx-0": 5},
            utilization_percent=None,
            processes=(),
        )
    }
