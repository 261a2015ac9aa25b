"""Where an instance goes: Snapshot and Ask in, Placement or Refusal out.

Here: the Snapshot, choosing, layouts, preemption, explanations. Not here: reading hardware, charging the books, starting
anything. Pure: the same snapshot and Asks give the same answer in every process. Start at `decide`; who decides often keeps an
`Engine`; `plan_for` and `plan_all` say what would have to move, stop or be laid out differently.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aimgpu.domain.plain import encode
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot

if TYPE_CHECKING:
    from aimgpu.placement.capacity import Capacity, plan_capacity
    from aimgpu.placement.clearing import Limits
    from aimgpu.placement.deciding import decide, decide_all
    from aimgpu.placement.engine import Engine
    from aimgpu.placement.explaining import DeviceVerdict, Explanation, Verdict, explain, explain_planned
    from aimgpu.placement.mix import Mix
    from aimgpu.placement.plan import Cost, MovePlan, Step, StepKind, apply_plan, canonical, undo_plan
    from aimgpu.placement.planner import BatchPlan, ask_again, plan_all, plan_consolidation, plan_for
    from aimgpu.placement.rates import RatePlan, Service, fewest_devices
    from aimgpu.placement.reasons import ReasonCode
    from aimgpu.placement.replay import record_decisions, replay_decisions
    from aimgpu.placement.reservation import reserve_nodes
    from aimgpu.placement.snapshot_json import (
        ask_from_json,
        ask_to_json,
        decision_to_json,
        snapshot_from_json,
        snapshot_to_json,
    )
    from aimgpu.placement.weights import COMING_AND_GOING, FILLING_UP, Weights

__all__ = [
    "COMING_AND_GOING",
    "FILLING_UP",
    "BatchPlan",
    "Capacity",
    "Cost",
    "DeviceState",
    "DeviceVerdict",
    "Engine",
    "Explanation",
    "Limits",
    "Mix",
    "MovePlan",
    "NodeState",
    "RatePlan",
    "ReasonCode",
    "Service",
    "Snapshot",
    "Step",
    "StepKind",
    "Verdict",
    "Weights",
    "apply_plan",
    "ask_again",
    "ask_from_json",
    "ask_to_json",
    "canonical",
    "decide",
    "decide_all",
    "decision_to_json",
    "encode",
    "explain",
    "explain_planned",
    "fewest_devices",
    "plan_all",
    "plan_capacity",
    "plan_consolidation",
    "plan_for",
    "record_decisions",
    "replay_decisions",
    "reserve_nodes",
    "snapshot_from_json",
    "snapshot_to_json",
    "undo_plan",
]

_NAMES = {
    "capacity": ("Capacity", "plan_capacity"),
    "clearing": ("Limits",),
    "deciding": ("decide", "decide_all"),
    "engine": ("Engine",),
    "explaining": ("DeviceVerdict", "Explanation", "Verdict", "explain", "explain_planned"),
    "mix": ("Mix",),
    "plan": ("Cost", "MovePlan", "Step", "StepKind", "apply_plan", "canonical", "undo_plan"),
    "planner": ("BatchPlan", "ask_again", "plan_all", "plan_consolidation", "plan_for"),
    "rates": ("RatePlan", "Service", "fewest_devices"),
    "reasons": ("ReasonCode",),
    "replay": ("record_decisions", "replay_decisions"),
    "reservation": ("reserve_nodes",),
    "snapshot_json": ("ask_from_json", "ask_to_json", "decision_to_json", "snapshot_from_json", "snapshot_to_json"),
    "weights": ("COMING_AND_GOING", "FILLING_UP", "Weights"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has this name
    """Imported when first used: choosing needs numpy, and a command that only shows GPUs would wait for it longest."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return found
