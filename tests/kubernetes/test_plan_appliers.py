"""Plans by AMD's Device Config Manager or found from pending pods, and claim templates that no pod uses."""

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.kubernetes.cluster.operator.claim_templates import plan_sweep
from aimgpu.kubernetes.cluster.operator.config_manager import DCM_TAINT, node_order
from aimgpu.kubernetes.cluster.operator.pending_pods import PendingPod, find_pending
from aimgpu.kubernetes.cluster.operator.plan_phases import advance
from aimgpu.kubernetes.cluster.operator.plan_proposals import plan_for, propose
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import PLAN_TAINT, NodeView, PlanAction
from aimgpu.kubernetes.vocabulary.names import UNUSED_SINCE

LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1", "CPX/NPS4"]
SPEC: dict[str, Any] = {"layout": {"computeMode": "CPX", "memoryMode": "NPS4"}, "applier": "DeviceConfigManager"}
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def view(*layouts: str, name: str = "n1", **changes: Any) -> NodeView:
    gpus = [
        {"id": f"g{n}", "index": n, "product": "MI300X", "layout": layout, "layouts": LAYOUTS, "memoryBytes": 192 << 30}
        for n, layout in enumerate(layouts or ("SPX/NPS1",))
    ]
    fresh = NodeView(name=name, gpus=gpus, wanted={}, refused=None, observed=True, cordoned=True, pods=())
    return replace(fresh, **{"taints": (PLAN_TAINT,), **changes})


def test_the_device_config_manager_gets_a_taint_and_a_profile_and_is_waited_for() -> None:
    step = advance(SPEC, {"name": "n1", "phase": "Pending"}, view(pods=("a/b",)), 0)
    step = advance(SPEC, step.status, view(), 1)
    assert (step.status["phase"], step.actions, step.profile) == ("Applying", (PlanAction.SET_PROFILE,), "cpx_nps4_all")
    order = node_order(
        view(version="7", taints=({"key": "other", "effect": "NoSchedule"},)), PlanAction.SET_PROFILE, step.profile
    )
    assert order["spec"]["taints"] == [{"key": "other", "effect": "NoSchedule"}, DCM_TAINT]
    assert order["metadata"]["resourceVersion"] == "7"
    ordered = view(profile="cpx_nps4_all", taints=(DCM_TAINT,))
    step = advance(SPEC, step.status, ordered, 2)
    assert step.status["phase"] == "WaitingForDriver"
    assert advance(SPEC, step.status, ordered, 3).status["phase"] == "WaitingForDriver"
    step = advance(SPEC, step.status, replace(ordered, gpus=view("CPX/NPS4").gpus), 4)
    assert step.status["phase"] == "Verifying"
    assert advance(SPEC, step.status, replace(ordered, gpus=view("CPX/NPS4").gpus), 5).status["phase"] == "Verifying"
    step = advance(SPEC, step.status, replace(ordered, gpus=view("CPX/NPS4").gpus), 8)
    assert (step.status["phase"], step.actions) == ("Succeeded", (PlanAction.RELEASE, PlanAction.UNCORDON))


def test_a_manager_that_does_not_act_gets_its_old_profile_back() -> None:
    waiting = {"name": "n1", "phase": "WaitingForDriver", "since": "0", "profileBefore": "default"}
    step = advance(SPEC, waiting, view(profile="cpx_nps4_all"), 1000)
    assert (step.status["phase"], step.profile) == ("Failed", "default")
    assert step.actions == (PlanAction.RESTORE_PROFILE, PlanAction.RELEASE, PlanAction.UNCORDON)


@pytest.mark.parametrize(
    ("spec", "profile", "reason"),
    [
        ({"layout": {"computeMode": "CPX"}}, "default", "set applier: DeviceConfigManager"),
        ({**SPEC, "gpus": [0]}, None, "leave gpus out"),
    ],
)
def test_never_both_appliers_on_one_node(spec: dict[str, Any], profile: str | None, reason: str) -> None:
    step = advance(spec, {"name": "n1", "phase": "Pending"}, view(profile=profile), 0)
    assert (step.status["phase"], step.actions) == ("Failed", ())
    assert reason in step.status["message"]


def pod(name: str, since: int = 0, **annotations: str) -> dict[str, Any]:
    keys = {"compute_mode": "aim.amd.com/compute-mode", "memory": "gpu-memory", "fraction": "gpu-fraction"}
    waits = {"type": "PodScheduled", "status": "False", "lastTransitionTime": f"2026-01-01T00:00:{since:02}Z"}
    return {
        "metadata": {
            "namespace": "a",
            "name": name,
            "labels": {"aim.amd.com/gpu-share": "true"},
            "annotations": {keys[key]: value for key, value in annotations.items()},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"containers": [{"name": "main"}]},
        "status": {"conditions": [waits]},
    }


def pending(*pods: dict[str, Any], now: float = 1000, least: float = 60) -> list[PendingPod]:
    begin = NOW.timestamp()
    return find_pending(pods, {}, lambda text: dt.datetime.fromisoformat(text).timestamp(), begin + now - least)


def test_partitions_that_pods_wait_for_are_proposed_on_idle_nodes_only() -> None:
    waiting = pending(*(pod(f"p{n}", compute_mode="CPX") for n in range(9)))
    busy, idle = view(name="busy", pods=("a/x",), cordoned=False), view("SPX/NPS1", "SPX/NPS1", name="idle", cordoned=False)
    (found,) = propose(waiting, [busy, idle])
    assert (found.node, found.gpus, len(found.pods)) == ("idle", (0, 1), 9)
    assert found.layout.startswith("CPX/")
    auto = {"apiVersion": "v", "metadata": {"name": "auto", "uid": "u"}, "spec": {"auto": {}}}
    plan = plan_for(found, auto)
    assert plan["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "idle"}
    assert plan["metadata"]["name"] == plan_for(found, auto)["metadata"]["name"]


def test_a_pod_that_needs_more_than_a_partition_gets_a_whole_gpu_and_one_that_fits_gets_nothing() -> None:
    cut = view("CPX/NPS1", cordoned=False)
    (found,) = propose(pending(pod("large", memory="102400")), [cut])
    assert found.layout in ("SPX/NPS1", "DPX/NPS1")
    small = propose(pending(pod("small", memory="1024")), [cut])
    assert small == []  # it waits for something else
    assert propose(pending(pod("huge", memory="999999")), [cut]) == []
    assert pending(pod("new", compute_mode="CPX"), now=10) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000) | st.none(), st.integers(0, 2000)), max_size=20))
def test_a_template_that_a_pod_uses_is_never_deleted(rows: list[tuple[bool, int | None, int]]) -> None:
    templates, used = [], set()
    for number, (in_use, marked, age) in enumerate(rows):
        since = {UNUSED_SINCE: (NOW - dt.timedelta(seconds=marked)).isoformat()} if marked is not None else {}
        created = (NOW - dt.timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata = {"namespace": "a", "name": f"t{number}", "annotations": since, "creationTimestamp": created}
        templates.append({"metadata": metadata})
        if in_use:
            used.add(("a", f"t{number}"))
    sweep = plan_sweep(templates, used, NOW, 600)
    for item in (*sweep.delete, *sweep.mark):
        assert ("a", item["metadata"]["name"]) not in used
    for item in sweep.delete:
        assert item["metadata"]["annotations"]  # marked before, for longer than it is kept
    for item in sweep.unmark:
        assert ("a", item["metadata"]["name"]) in used
