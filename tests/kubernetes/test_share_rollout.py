"""Another share for a model on a cluster: what is written, what its pods go through, and what is refused."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kubernetes.applied_objects import applied, fields_of, rendered
from tests.kubernetes.page_objects import node, pod

from aimgpu.domain import Memory
from aimgpu.errors import Conflict, InvalidInput, NotAllowed
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.models.page.observed import ClusterObjects, observe
from aimgpu.kubernetes.models.page.share_rollout import ShareRollout, plan_rollout
from aimgpu.kubernetes.models.serving.owned_fields import owned_fields
from aimgpu.kubernetes.models.serving.share_rewrite import is_rolled_out, restore_strategy, rewrite_share, strategy_of
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.units import GIB, format_bytes

FULL = find_product("MI300X").memory_bytes
ENTRY = "{model: org/Tiny-1B, engine: vllm, gpu: {memory: 60GiB}}"


def held(number: int, memory_bytes: int, served: str = "chat") -> dict[str, Any]:
    """The share of one pod, on the only partition."""
    info = {"partitionId": "gpu-0/spx-0", "partitionSizeGB": FULL / 10**9, "allocatedMemoryGB": memory_bytes / 10**9}
    replica = {"pod": f"{served}-{number}", "node": "n1", "gpu": "gpu-0", "level": "runtime", "partitionInfo": info}
    return {"metadata": {"name": f"{served}-{number}", "namespace": "team"}, "status": {"replicas": [replica]}}


def plan(
    memory_bytes: int, entry: str = ENTRY, *, pods: int = 1, now: int = 60 * GIB, item: dict[str, Any] | None = None
) -> ShareRollout:
    """On one empty MI300X, but for the model's own pods."""
    found = item or applied(rendered(entry))
    objects = ClusterObjects(
        nodes=[node(memoryBytes=FULL, layout="SPX/NPS1", layouts=["SPX/NPS1"])],
        models=[found],
        pods=[pod(f"chat-{number}") for number in range(pods)],
        shares=[held(number, now) for number in range(pods)],
    )
    return plan_rollout(observe(objects, cluster="all", taken_at=1.0), found, "chat", memory_bytes)


def test_with_room_for_both_the_old_pod_answers_until_the_new_one_is_ready() -> None:
    found = plan(80 * GIB)
    shown = found.to_json()
    assert (found.surge, shown["rollout"]) == (True, {"restarts": True, "old_serves": True, "changed": True})
    assert "restarted with 80GiB on n1/gpu-0/" in shown["note"]
    assert "The old pod answers until the new one is ready" in shown["note"]
    (change,) = shown["changes"]
    assert (change["before_bytes"], change["after_bytes"], change["used_bytes"]) == (60 * GIB, 80 * GIB, None)
    assert change["free_bytes"] > 180 * GIB


def test_without_room_for_both_the_old_pod_ends_first_and_the_preview_reports_it() -> None:
    found = plan(140 * GIB)
    assert not found.surge
    assert "the old pod ends first, and the model does not answer until the new one is ready" in found.to_json()["note"]


def test_several_pods_are_replaced_one_at_a_time() -> None:
    entry = ENTRY.replace("engine: vllm", "engine: vllm, replicas: 3")
    found = plan(61 * GIB, entry, pods=3, now=60 * GIB)
    assert not found.surge
    assert "Its 3 pods are restarted with 61GiB" in found.notes[0]
    assert "answers with 2 of 3 copies" in found.notes[1]
    with pytest.raises(Conflict, match="no GPU of the cluster has room"):
        plan(66 * GIB, entry, pods=3)  # two of the new size fit, and not the third


def test_a_share_that_no_gpu_has_is_refused_with_the_largest_that_would_fit() -> None:
    with pytest.raises(Conflict) as refused:
        plan(900 * GIB)
    assert "room for a pod of chat with 900GiB: n1/gpu-0 " in refused.value.message
    largest = plan(80 * GIB).largest_bytes
    assert largest is not None
    assert refused.value.hint == f"Up to {format_bytes(largest)} would fit now."
    assert plan(largest).memory_bytes >= largest, "what is named as possible is possible"


def test_less_than_the_model_takes_to_start_is_refused_with_what_it_takes() -> None:
    entry = "{model: Qwen/Qwen2.5-7B-Instruct, engine: vllm, context: 2048, concurrency: 4}"
    with pytest.raises(Conflict, match=r"chat needs 1.*GiB to start; 1GiB is less") as refused:
        plan(GIB, entry)
    assert (refused.value.hint or "").startswith("Ask for 1")


def test_downloads_on_a_volume_of_one_node_are_not_mounted_twice() -> None:
    found = plan(70 * GIB, item=applied(rendered(ENTRY, cache="10Gi")))
    assert not found.surge
    assert "a volume that one node mounts at a time, so the old pod ends first" in found.notes[1]


def test_a_model_without_pods_starts_with_the_new_share() -> None:
    found = plan(8 * GIB, pods=0)
    assert found.to_json()["rollout"] == {"restarts": False, "old_serves": False, "changed": True}
    assert found.notes[0].startswith("No pod runs: the next one starts with 8GiB")


def test_the_share_that_it_has_changes_nothing() -> None:
    found = plan(60 * GIB)
    assert (found.changed, found.notes) == (False, ("It asks for 60GiB already: nothing changes.",))


def test_where_gpus_cannot_be_seen_it_is_not_claimed_to_fit() -> None:
    item = applied(rendered(ENTRY))
    seen = observe(ClusterObjects(models=[item], pods=[pod("chat-0")]), cluster="all", taken_at=1.0)
    found = plan_rollout(seen, item, "chat", 900 * GIB)
    assert (found.surge, found.largest_bytes) == (False, None)
    assert any("was not checked" in note for note in found.notes)


@pytest.mark.parametrize(
    ("entry", "size", "error", "words"),
    [
        (ENTRY, 0, InvalidInput, "no memory"),
        (ENTRY.replace("{memory: 60GiB}", "{whole: 1}"), GIB, NotAllowed, "asks for whole GPUs"),
        (ENTRY.replace("{memory: 60GiB}", "{partition: cpx}"), GIB, NotAllowed, "partitions of kind cpx"),
    ],
)
def test_what_has_no_size_to_change_is_refused(entry: str, size: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(size, entry)


def test_what_aimgpu_did_not_apply_is_refused_with_where_to_change_it() -> None:
    item = applied(rendered(ENTRY))
    del item["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    with pytest.raises(NotAllowed) as refused:
        plan(GIB, item=item)
    assert "gpu-memory" in (refused.value.hint or "")
    with pytest.raises(NotAllowed, match="was not applied by aimgpu"):
        rewrite_share(applied(rendered(ENTRY), manager="kubectl"), plan(70 * GIB).wanted, surge=False)


@pytest.mark.parametrize("before", ["{memory: 60GiB}", "{fraction: 0.3}", "auto"])
def test_only_the_share_the_strategy_and_the_entry_are_written(before: str) -> None:
    model = "Qwen/Qwen2.5-7B-Instruct"
    entry = f"{{model: {model}, engine: vllm, gpu: {before}, compute: 40%, concurrency: 4}}"
    source = applied(rendered(entry))
    written = rewrite_share(source, plan(70 * GIB, entry).wanted, surge=True)
    expected = copy.deepcopy(rendered(entry.replace(before, "{memory: 70GiB}")))
    expected["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 1, "maxUnavailable": 0}
    _add_protocols(expected)
    expected["metadata"]["namespace"] = "team"
    entries = [json.loads(one["metadata"]["annotations"].pop(labels.ENTRY)) for one in (written, expected)]
    assert written == expected, "as if the stack file had asked for it, and nothing of a controller's fields"
    assert entries[0] == entries[1]


def test_an_inference_service_is_rewritten_where_kserve_reads_it() -> None:
    entry = ENTRY.replace("engine: vllm", "engine: vllm, concurrency: 4")
    source = applied(rendered(entry, "InferenceService"))
    written = rewrite_share(source, plan(70 * GIB, entry).wanted, surge=False)
    annotations = written["metadata"]["annotations"]
    assert (annotations["gpu-memory"], annotations[labels.CONCURRENCY]) == (str(70 * 1024), "4")
    assert written["spec"]["predictor"]["deploymentStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert json.loads(annotations[labels.ENTRY])["gpu"] == {"memory": "70GiB"}


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_after_a_rollout_pods_are_replaced_as_before(kind: str) -> None:
    source = applied(rendered(ENTRY, kind))
    before = strategy_of(source)
    during = applied(rewrite_share(source, plan(70 * GIB).wanted, surge=True))
    after = restore_strategy(during, before)
    assert strategy_of(after) == before
    assert strategy_of(during) == before, "what an earlier rollout left is not taken for the user's"
    by_hand = {"type": "Recreate"}
    place = source["spec"] if kind == "Deployment" else source["spec"]["predictor"]
    place["strategy" if kind == "Deployment" else "deploymentStrategy"] = by_hand
    assert strategy_of(source) == by_hand


def test_a_rollout_is_done_when_every_pod_has_the_new_share_and_none_of_before_is_left() -> None:
    wanted = plan(70 * GIB).wanted
    item = rewrite_share(applied(rendered(ENTRY)), wanted, surge=True)
    item["metadata"]["generation"] = 2
    done = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}
    assert is_rolled_out({**item, "status": done}, wanted)
    for field, value in {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 0, "availableReplicas": 0}.items():
        assert not is_rolled_out({**item, "status": {**done, field: value}}, wanted)
    before = applied(rendered(ENTRY))
    assert not is_rolled_out({**before, "status": done}, wanted), "KServe has not followed yet"
    assert isinstance(wanted.ask.want, Memory)


NAMES = st.text("abc./-", min_size=1, max_size=4)
SCALARS = st.one_of(st.integers(0, 9), st.booleans(), st.text("xyz", max_size=3))
VALUES = st.recursive(
    SCALARS, lambda below: st.one_of(st.lists(SCALARS, max_size=3), st.dictionaries(NAMES, below, max_size=3))
)


@given(ours=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), theirs=st.dictionaries(st.text("d", min_size=1), VALUES))
def test_what_is_read_back_is_what_was_applied_and_nothing_of_others(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    containers = [{"name": "engine", **{f"own{key}": value for key, value in ours.items()}}]
    manifest = {"spec": {"template": {**ours, "containers": containers}}}
    entry = {"manager": "aimgpu", "operation": "Apply", "apiVersion": "v1", "fieldsV1": fields_of(manifest)}
    kept = copy.deepcopy(manifest)
    kept["spec"]["template"] |= {f"theirs{key}": value for key, value in theirs.items()}
    kept["spec"]["template"]["containers"][0] |= {f"theirs{key}": value for key, value in theirs.items()}
    kept["spec"]["template"]["containers"].insert(0, {"name": "sidecar"})
    metadata = {"name": "chat", "namespace": "team", "managedFields": [entry]}
    found = owned_fields({"kind": "Deployment", "metadata": metadata, **kept}, "aimgpu")
    assert found is not None
    assert found["spec"] == manifest["spec"]
    assert (found["metadata"], found["kind"]) == ({"name": "chat", "namespace": "team"}, "Deployment")
    assert owned_fields({"kind": "Deployment", "metadata": metadata, **kept}, "kubectl") is None


def test_members_of_sets_and_places_in_lists_are_read_back() -> None:
    fields: dict[str, Any] = {"f:metadata": {"f:finalizers": {'v:"ours"': {}}}, "f:spec": {"f:words": {"i:1": {}}}}
    entry = {"manager": "aimgpu", "operation": "Apply", "apiVersion": "v1", "fieldsV1": fields}
    item = {
        "kind": "Pod",
        "metadata": {"name": "x", "finalizers": ["theirs", "ours"], "managedFields": [entry]},
        "spec": {"words": ["a", "b"]},
    }
    found = owned_fields(item, "aimgpu")
    assert found is not None
    assert (found["metadata"]["finalizers"], found["spec"]) == (["ours"], {"words": ["b"]})


def _add_protocols(item: dict[str, Any]) -> None:
    for port in item["spec"]["template"]["spec"]["containers"][0]["ports"]:
        port["protocol"] = "TCP"
