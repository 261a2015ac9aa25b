"""Where an instance goes: Snapshot and ask in, placement or refusal out.

Start at `decide.decide`; a caller that decides often keeps a `session.PlacementSession`; `preemption.planner` plans what would
have to move, stop or be laid out differently. Not here: reading hardware, charging the ledger, starting anything. Pure: the
same snapshot and asks give the same answer in every process.

Only what needs no numpy is imported here, because commands that only look at GPUs read snapshots too.
"""

from aimgpu.placement.preemption.move_plan import Cost, MoveKind, MovePlan, MoveStep, apply_plan, canonical, undo_plan
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.placement.snapshot_json import (
    ask_from_json,
    ask_to_json,
    decision_to_json,
    snapshot_from_json,
    snapshot_to_json,
)

__all__ = [
    "Cost",
    "DeviceState",
    "MoveKind",
    "MovePlan",
    "MoveStep",
    "NodeState",
    "ReasonCode",
    "Snapshot",
    "apply_plan",
    "ask_from_json",
    "ask_to_json",
    "canonical",
    "decision_to_json",
    "snapshot_from_json",
    "snapshot_to_json",
    "undo_plan",
]
