"""One node of a PartitionPlan, phase by phase, without a cluster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.kubernetes.cluster.operator.plan_phases import advance, whole_phase
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import PLAN_TAINT, NodeView, PlanAction

LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1", "CPX/NPS4"]
SPEC: dict[str, Any] = {"layout": {"computeMode": "CPX"}, "drainTimeoutSeconds": 60}
START = {"name": "n1", "phase": "Pending"}


def view(layout: str = "SPX/NPS1", **changes: Any) -> NodeView:
    gpu = {"id": "g0", "index": 0, "product": "MI300X", "layout": layout, "layouts": LAYOUTS}
    fresh = NodeView(name="n1", gpus=[gpu], wanted={}, refused=None, observed=True, cordoned=True, pods=())
    return replace(fresh, taints=(PLAN_TAINT,), **changes)


def test_a_plan_drains_applies_reads_back_and_lets_pods_in_again() -> None:
    step = advance(SPEC, START, view(pods=("ns/a",), cordoned=False), 0)
    assert (step.status["phase"], step.actions) == ("Draining", (PlanAction.CORDON,))
    assert step.status["before"] == {"g0": "SPX/NPS1"}
    step = advance(SPEC, step.status, view(pods=("ns/a",)), 1)
    assert (step.status["phase"], step.actions) == ("Draining", (PlanAction.EVICT,))
    step = advance(SPEC, step.status, view(), 2)
    assert (step.status["phase"], step.actions, step.layouts) == ("Applying", (PlanAction.WANT,), {"g0": "CPX/NPS1"})
    step = advance(SPEC, step.status, view(wanted={"g0": "CPX/NPS1"}), 3)
    assert step.status["phase"] == "Verifying"
    assert advance(SPEC, step.status, view(), 4).status["phase"] == "Verifying"  # not read back yet
    step = advance(SPEC, step.status, view("CPX/NPS1"), 5)
    assert (step.status["phase"], step.actions) == ("Verifying", ())  # kube-scheduler may not have seen it yet
    step = advance(SPEC, step.status, view("CPX/NPS1"), 9)
    assert (step.status["phase"], step.actions) == ("Succeeded", (PlanAction.UNCORDON,))


def test_a_layout_that_is_there_already_changes_nothing() -> None:
    step = advance(SPEC, START, view("CPX/NPS1", pods=("ns/a",)), 0)
    assert (step.status["phase"], step.actions) == ("Succeeded", ())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"layout": {"computeMode": "TPX"}}, "cannot have TPX/NPS1; it can have SPX/NPS1"),
        ({"layout": {"computeMode": "CPX"}, "gpus": [7]}, "no GPU that the plan names"),
    ],
)
def test_what_a_node_cannot_have_fails_before_anything_is_touched(spec: dict[str, Any], reason: str) -> None:
    step = advance(spec, START, view(pods=("ns/a",)), 0)
    assert (step.status["phase"], step.actions) == ("Failed", ())
    assert reason in step.status["message"]


def test_pods_that_stay_and_an_agent_that_refuses_restore_the_node() -> None:
    draining = advance(SPEC, START, view(pods=("ns/a",)), 0).status
    late = advance(SPEC, draining, view(pods=("ns/a",)), 100)
    assert (late.status["phase"], late.actions) == ("Failed", (PlanAction.RESTORE, PlanAction.UNCORDON))
    assert late.layouts == {"g0": "SPX/NPS1"}
    verifying = {**draining, "phase": "Verifying", "since": "0"}
    soon = advance(SPEC, verifying, view(refused="it is in use"), 1)  # a share may be given back in a moment
    assert soon.status["phase"] == "Verifying"
    refused = advance(SPEC, verifying, view(refused="the driver is busy"), 16)
    assert refused.status["phase"] == "Failed"
    assert "the driver is busy" in refused.status["message"]
    assert PlanAction.RESTORE in refused.actions


@given(st.lists(st.sampled_from(["pods", "none", "applied", "refused", "uncordoned", "late"]), max_size=30))
def test_every_course_ends_with_the_node_open_or_still_under_way(course: list[str]) -> None:
    status, now, cordoned = dict(START), 0.0, False
    for what in course:
        now += 1000 if what == "late" else 1
        seen = view(
            "CPX/NPS1" if what == "applied" else "SPX/NPS1",
            pods=("ns/a",) if what == "pods" else (),
            refused="busy" if what == "refused" else None,
            cordoned=cordoned and what != "uncordoned",
            wanted={"g0": "CPX/NPS1"},
        )
        step = advance(SPEC, status, seen, now)
        for action in step.actions:
            cordoned = {PlanAction.CORDON: True, PlanAction.UNCORDON: False}.get(action, cordoned)
        status = step.status
        if status["phase"] in ("Succeeded", "Failed"):
            assert not cordoned
    assert whole_phase([status], 1)[0] == status["phase"]
