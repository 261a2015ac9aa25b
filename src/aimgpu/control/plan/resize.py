"""Change what a running model may hold, without restarting it. Pure.

The ledger holds at least as much as the limit at every moment: a larger share is charged first and allowed then, a smaller one
is limited first and given back then. So whatever a crash cuts short, setting the limit to what the ledger holds is always
possible, and is done when the instance is adopted (`Lifecycle.adopt`). The new share is kept with the deployment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aimgpu.control.plan.new_instance import GONE_HINT, GONE_PAGE_HINT
from aimgpu.control.plan.steps import ControlState, Plan, ResizeGrant
from aimgpu.domain import Grant, Instance, InstanceState
from aimgpu.errors import Conflict, HardwareUnavailable, InvalidInput, NotAllowed, ShareInUse, UnknownDeployment
from aimgpu.placement import DeviceState
from aimgpu.placement.fit import free_bytes
from aimgpu.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """One grant's new size."""

    grant: Grant
    before_bytes: int
    after_bytes: int
    used_bytes: int
    free_bytes: int  # neither granted to others nor held by them, this grant's own included

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "instance": self.grant.instance_id,
            "device": self.grant.device_id,
            "partition": self.grant.partition_id,
            "mechanism": self.grant.mechanism,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "used_bytes": self.used_bytes,
            "free_bytes": self.free_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """What resizing a model changes, and what its engine makes of that."""

    deployment: str
    changes: tuple[ShareChange, ...]
    note: str

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
        return {"model": self.deployment, "changes": [change.to_json() for change in self.changes], "note": self.note}


def resizable_instances(state: ControlState, name: str) -> tuple[Instance, ...]:
    """Those that are ready and hold something; raises UnknownDeployment, or Conflict where there is none."""
    if name not in state.wanted:
        raise UnknownDeployment.of(name, known=state.wanted)
    found = tuple(item for item in state.of(name) if item.state is InstanceState.READY and item.grants)
    if not found:
        raise Conflict(
            f"{name} is not ready, so there is nothing to resize",
            hint="`aimgpu ps` shows what runs.",
            page_hint="Load it first, or edit it.",
        )
    return found


def find_resize(state: ControlState, name: str, memory_bytes: int, used: Mapping[str, int | None]) -> tuple[ShareChange, ...]:
    """What would change, grant by grant; each gets `memory_bytes`. `used`: measured bytes by grant, None: not enforced."""
    if memory_bytes < 1:
        raise InvalidInput("a share of no memory", hint="Ask for more than 0 bytes.")
    devices = {item.device.id: item for _, item in state.snapshot.devices()}
    return tuple(
        _change(grant, devices.get(grant.device_id), memory_bytes, used.get(grant.id))
        for instance in resizable_instances(state, name)
        for grant in instance.grants
    )


def plan_resize(state: ControlState, name: str, memory_bytes: int, changes: tuple[ShareChange, ...]) -> Plan:
    """All checked before the first is changed; undone where one of them fails."""
    steps = tuple(
        ResizeGrant(
            deployment=name,
            instance_id=change.grant.instance_id,
            grant_id=change.grant.id,
            partition_id=change.grant.partition_id,
            before_bytes=change.before_bytes,
            after_bytes=change.after_bytes,
        )
        for change in changes
    )
    wanted = replace(state.wanted[name], resized_bytes=memory_bytes)
    return Plan(operation="resize", chains=(steps,), keeps=(wanted,))


def _change(grant: Grant, state: DeviceState | None, memory_bytes: int, used: int | None) -> ShareChange:
    if used is None:
        held = f"it is held by {grant.mechanism}" if grant.mechanism not in (None, "none") else "nothing enforces its share"
        what = "it has the partition for itself" if grant.exclusive else held
        raise NotAllowed(
            f"the memory of {grant.instance_id} cannot change while it runs: {what}",
            hint="Change its `gpu:` in the stack file and apply it; that restarts it.",
            page_hint="Edit it instead: that restarts it.",
        )
    partition = state.device.partition(grant.partition_id) if state is not None else None
    if state is None or partition is None:
        raise HardwareUnavailable(
            f"{grant.partition_id}, which {grant.instance_id} has, is not there", hint=GONE_HINT, page_hint=GONE_PAGE_HINT
        )
    others = tuple(other for other in state.grants if other.id != grant.id)
    free = max(0, free_bytes(replace(state, grants=others), partition))
    if memory_bytes < used:
        raise ShareInUse(
            f"{grant.instance_id} uses {format_bytes(used)} of its {format_bytes(grant.memory_bytes)} on {partition.id}:"
            f" it cannot fall to {format_bytes(memory_bytes)}",
            hint="Let it free memory first, or stop it.",
        )
    if memory_bytes > max(free, grant.memory_bytes):
        raise Conflict(
            f"{partition.id} has {format_bytes(free)} for {grant.instance_id}, its own {format_bytes(grant.memory_bytes)}"
            f" included; {format_bytes(memory_bytes)} were asked for",
            hint="Ask for less, or stop or shrink another model there: `aimgpu ps`.",
            page_hint="Ask for less, or stop or resize another model there.",
        )
    return ShareChange(grant=grant, before_bytes=grant.memory_bytes, after_bytes=memory_bytes, used_bytes=used, free_bytes=free)
