"""What the page of a cluster makes of the API server's objects."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.kubernetes.page_objects import GB, finished, model, node, pod, share
from tests.web.test_model_state import states

from aimgpu.control.plan.prepared import ask_for
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.domain import Placement, Priority, Vendor
from aimgpu.errors import InvalidInput, NotAuthenticated, UnknownDevice
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.models.page.callers import ClusterAuthority
from aimgpu.kubernetes.models.page.cluster_activity import ClusterActivity
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.models.page.layout_plans import describe_plans, plan_layout, preview_layout
from aimgpu.kubernetes.models.page.measured import read_measured
from aimgpu.kubernetes.models.page.observed import ClusterObjects, observe
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.manifests import RenderOptions, render_model
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.served_model import find_model, size_model
from aimgpu.placement.decide import decide_all
from aimgpu.sizing import built_in
from aimgpu.web.gpu_rows import describe_gpus

LOCAL = {"client": ("127.0.0.1", 5), "headers": [(b"x-aimgpu-page", b"1")]}


def look(**objects: Any) -> Any:
    return observe(ClusterObjects(**objects), cluster="all", taken_at=1.0)


def test_a_model_stands_on_the_partition_that_its_pod_has_a_share_of() -> None:
    seen = look(nodes=[node()], models=[model()], pods=[pod("chat-1")], shares=[share("chat-1")])
    (gpu,) = describe_gpus(seen, {})
    first, rest = gpu["partitions"]
    assert (first["id"], first["memory_bytes"], first["granted_bytes"]) == ("n1/gpu-0/cpx-3", 24 * GB, 10 << 30)
    assert [one["model"] for one in first["shares"]] == ["chat"]
    assert rest["memory_bytes"] == 168 * GB
    assert gpu["name"] == "MI300X on n1"
    assert states(seen, {}) == {"chat": ("ready", None)}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ({"models": [model(replicas=0)]}, ("sleeping", "scaled to zero; a request wakes it")),
        ({"models": [model()]}, ("queued", "its pods are being made")),
        (
            {"models": [model()], "pods": [pod("p", type="PodScheduled", status="False", message="no GPU has room")]},
            ("queued", "no GPU has room"),
        ),
        ({"models": [model()], "pods": [pod("p", type="Ready", status="False")]}, ("loading", None)),
    ],
)
def test_what_does_not_run_gives_the_reason_that_kubernetes_gives(objects: Any, expected: tuple[str, str | None]) -> None:
    assert states(look(**objects), {})["chat"] == expected


def test_of_two_models_of_one_name_each_is_shown_with_its_namespace() -> None:
    later = model(namespace="other", created="2026-02-01T00:00:00Z")
    seen = look(models=[later, model()], pods=[pod("a"), pod("b", namespace="other", type="Ready", status="False")])
    assert states(seen, {}) == {"team/chat": ("ready", None), "other/chat": ("loading", None)}


def test_a_gpu_that_is_not_well_is_named_and_one_without_shares_is_one_free_piece() -> None:
    seen = look(nodes=[node(unhealthy="ECC errors"), node("n2")])
    assert (seen.problem, seen.error_of("n1/gpu-0")) == ("n1/gpu-0: ECC errors", "ECC errors")
    assert [gpu["free_bytes"] for gpu in describe_gpus(seen, {})] == [192 * GB, 192 * GB]


def test_in_a_pod_a_browser_may_look_and_changes_with_a_token_of_its_own() -> None:
    authority = ClusterAuthority(own_rights=False)
    assert (authority.access(LOCAL).read, authority.access(LOCAL).write) == (True, False)
    with_token = {**LOCAL, "headers": [*LOCAL["headers"], (b"authorization", b"Bearer someone")]}
    assert authority.access(with_token).write
    with pytest.raises(NotAuthenticated, match="your own Kubernetes token"):
        authority.check_write(LOCAL)
    elsewhere = {"client": ("10.0.0.7", 5), "headers": [(b"authorization", b"Bearer someone")]}
    assert (authority.access(elsewhere).read, authority.access(elsewhere).write) == (False, False)


def test_a_model_that_was_applied_is_read_back_as_it_was_written() -> None:
    fields = {"model": "org/Tiny-1B", "engine": "vllm", "gpu": {"memory": "2GiB"}, "context": 2048}
    (wanted,) = parse_stack(json.dumps({"models": {"chat": fields}})).deployments
    options = RenderOptions(images=ServingImages(own="own", vendor="amd"))
    (item,) = (one for one in render_model(wanted, options) if one["kind"] == "Deployment")
    item["metadata"]["namespace"] = "team"
    item["metadata"]["annotations"][labels.PRIORITY] = "low"  # changed since, on the page
    (found,) = look(models=[item]).deployments
    assert found == replace(wanted, ask=replace(wanted.ask, priority=Priority.LOW))


def test_a_known_gpu_has_the_partitions_of_its_layout() -> None:
    seen = look(nodes=[node(memoryBytes=find_product("MI300X").memory_bytes)], shares=[share("other")])
    (gpu,) = describe_gpus(seen, {})
    assert len(gpu["partitions"]) == 8
    assert [one["foreign_bytes"] for one in gpu["partitions"]] == [0, 0, 0, 10_737 * GB // 1000, 0, 0, 0, 0]


def test_pods_that_share_a_claim_hold_its_memory_once() -> None:
    both = [share(name) for name in ("one", "two")]
    for each in both:
        each["status"]["replicas"][0]["claim"] = "common"
    seen = look(nodes=[node(memoryBytes=find_product("MI300X").memory_bytes)], shares=both)
    (gpu,) = describe_gpus(seen, {})
    assert sum(one["foreign_bytes"] for one in gpu["partitions"]) == 10_737 * GB // 1000


def test_what_other_namespaces_hold_is_known_by_what_the_nodes_granted() -> None:
    sizes = [
        {"id": f"gpu-0/cpx-{at}", "memoryBytes": 24 * GB, "grantedBytes": held} for at, held in ((3, 12 << 30), (4, 1 << 30))
    ]
    there = node(memoryBytes=find_product("MI300X").memory_bytes, partitions=sizes)
    objects = {"nodes": [there], "models": [model()], "pods": [pod("chat-1")], "shares": [share("chat-1")]}
    (gpu,) = describe_gpus(look(**objects, one_namespace=True), {})
    assert [one["foreign_bytes"] for one in gpu["partitions"]] == [0, 0, 0, 2 << 30, 1 << 30, 0, 0, 0]
    (gpu,) = describe_gpus(look(**objects), {})  # with the shares of all namespaces in sight nothing is hidden
    assert sum(one["foreign_bytes"] for one in gpu["partitions"]) == 0


def test_what_would_fit_is_decided_on_what_the_objects_show() -> None:
    seen = look(nodes=[node(memoryBytes=find_product("MI300X").memory_bytes)])

    def fits(**fields: Any) -> bool:
        (wanted,) = parse_stack(json.dumps({"models": {"new": fields}})).deployments
        prepared = size_in_cluster(wanted, seen)
        (decision,) = decide_all(snapshot_of(seen), [ask_for(prepared, 0)])
        return isinstance(decision, Placement)

    assert fits(model="Qwen/Qwen2.5-7B-Instruct", context=2048)
    assert not fits(model="Qwen/Qwen2.5-32B-Instruct", context=2048)  # no partition of 24 GB holds it
    assert fits(model="org/unknown", gpu={"memory": "8GiB"})
    with pytest.raises(InvalidInput, match="nothing is known"):
        fits(model="org/unknown")


def test_requests_of_all_gateways_make_one_list_and_one_timeline() -> None:
    activity = ClusterActivity()
    activity.take(
        {"a": {"latest": 2, "requests": [finished(10.0), finished(12.0)]}, "b": {"latest": 1, "requests": [finished(10.5)]}}
    )
    activity.take({"a": {"latest": 3, "requests": [finished(20.0, "team/chat-2")]}})
    assert [entry.ended for entry in activity.requests()] == [10.0, 10.5, 12.0, 20.0]
    assert (activity.read_up_to("a"), activity.read_up_to("b"), activity.read_up_to("c")) == (3, 1, 0)
    assert [(turn.instance_id, turn.began, turn.ended) for turn in activity.turns(0.0)] == [
        ("chat-1", 9.0, 10.5),
        ("chat-1", 11.0, 12.0),
        ("chat-2", 19.0, 20.0),
    ]
    assert activity.last_used() == {"chat": 20.0}


def test_a_layout_is_previewed_for_the_whole_node_and_becomes_a_plan() -> None:
    full = find_product("MI300X").memory_bytes
    objects = {
        "nodes": [node(memoryBytes=full, layout="SPX/NPS1", layouts=["SPX/NPS1", "CPX/NPS1"], index=3)],
        "models": [model()],
        "pods": [pod("chat-1")],
        "shares": [share("chat-1")],
    }
    objects["models"][0]["metadata"]["annotations"][labels.ENTRY] = json.dumps(
        {"model": "org/Tiny-1B", "engine": "vllm", "gpu": {"memory": "40GiB"}}
    )
    planned = preview_layout(look(**objects), "n1/gpu-0", "CPX/NPS1")
    assert (planned.stops, planned.returns) == (("chat-1",), ())
    assert [one.ask for one in planned.does_not_fit] == ["chat-0"], "no partition of a CPX layout has 40 GiB"
    spec = plan_layout(objects["nodes"], look(**objects), "n1/gpu-0", "CPX/NPS1")["spec"]
    assert (spec["nodeSelector"], spec["gpus"]) == ({"kubernetes.io/hostname": "n1"}, [3])
    assert spec["layout"] == {"computeMode": "CPX", "memoryMode": "NPS1"}
    with pytest.raises(UnknownDevice, match="n9"):
        preview_layout(look(**objects), "n9/gpu-0", "CPX/NPS1")


def test_plans_under_way_and_failed_ones_are_notes() -> None:
    plans = [
        {"metadata": {"name": name}, "spec": {"layout": {"computeMode": "CPX"}}, "status": {"phase": phase, "message": "m"}}
        for name, phase in (("a", "Draining"), ("b", "Succeeded"), ("c", "Failed"))
    ]
    assert describe_plans(plans) == ["PartitionPlan a: Draining. m", "PartitionPlan c: Failed. m"]


METRICS = """
# TYPE aim_gpu_utilization_ratio gauge
aim_gpu_utilization_ratio{node="n1",gpu="gpu-0"} 0.71
aim_gpu_partition_memory_measured_bytes{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3"} 9000000000
aim_model_memory_used_bytes{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3",model="chat",instance_id="team/claim-1.g"} 8000000000
aim_model_gate_wait_seconds_total{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3",model="chat",instance_id="team/claim-1.g"} 1.5
aim_model_memory_used_bytes{node="n1",gpu="gpu-0",partition="gpu-0/cpx-3",model="other",instance_id="team/other.gpu"} 1000
"""


def test_what_the_agents_measured_stands_beside_what_was_granted() -> None:
    held = share("chat-1")
    held["status"]["replicas"][0]["claim"] = "claim-1"
    measured = read_measured([METRICS])
    seen = look(nodes=[node()], models=[model()], pods=[pod("chat-1")], shares=[held], measured=measured)
    (gpu,) = describe_gpus(seen, {})
    assert (gpu["utilization_percent"], gpu["measured_bytes"]) == (71, 9 * GB)
    assert gpu["partitions"][0]["shares"][0]["measured_bytes"] == 8 * GB
    assert seen.tenants["chat-1"].waited_seconds == 1.5


def test_a_model_that_runs_is_taken_out_where_it_would_be_replaced() -> None:
    item = model()
    item["metadata"]["annotations"][labels.ENTRY] = json.dumps({"model": "org/Tiny-1B", "gpu": {"memory": "8GiB"}})
    seen = look(nodes=[node()], models=[item], pods=[pod("chat-1")], shares=[share("chat-1")])
    snapshot = snapshot_of(seen)
    assert {name: ask.deployment for name, ask in snapshot.running.items()} == {"chat-1": "chat"}
    assert [state.grants for _, state in snapshot.without_instance("chat-1").devices()] == [()]


def test_the_page_sizes_a_model_as_admission_sizes_its_pods() -> None:
    fields = {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": "vllm", "context": 8192, "concurrency": 8}
    (wanted,) = parse_stack(json.dumps({"models": {"chat": fields}})).deployments
    options = RenderOptions(images=ServingImages(own="own", vendor="amd"))
    (item,) = (one for one in render_model(wanted, options) if one["kind"] == "Deployment")
    template = item["spec"]["template"]
    found = find_model(template["metadata"]["annotations"], template["spec"], "engine")
    assert found is not None
    footprint = size_model(found, built_in(), Vendor.AMD)
    assert footprint == size_in_cluster(wanted, look(nodes=[node()])).footprint
    assert footprint.kv_tokens is not None
    assert footprint.kv_tokens >= 8 * 8192, "each of the requests at once has its whole context"
