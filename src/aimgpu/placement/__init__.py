"""Where an instance goes: Snapshot and Ask in, Placement or Refusal out.

Here: the Snapshot, choosing, layouts, preemption, explanations. Not here: reading hardware, charging the books, starting
anything. Pure: the same snapshot and Asks give the same answer in every process. Start at `decide`.
"""

from aimgpu.placement.decide import decide, decide_all
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.placement.snapshot_json import snapshot_from_json, snapshot_to_json

__all__ = [
    "DeviceState",
    "NodeState",
    "Snapshot",
    "decide",
    "decide_all",
    "snapshot_from_json",
    "snapshot_to_json",
]
