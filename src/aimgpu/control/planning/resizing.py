"""Change what a running model may hold, without restarting it.

The books hold at least as much as the limit at every moment: a larger share is charged first and allowed then, a smaller one is
limited first and given back then. So whatever a crash cuts short, setting the limit to what the books say is always possible,
and is done when the instance is adopted (`Lifecycle.adopt`). Last, the share is kept with the deployment, for its next start.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from aimgpu.control.controller import Controller
from aimgpu.control.planning.new_instance import GONE_HINT
from aimgpu.domain import Grant, Instance, InstanceState
from aimgpu.errors import (
    AimGpuError,
    Conflict,
    HardwareUnavailable,
    InvalidInput,
    NotAllowed,
    ShareInUse,
    UnknownDeployment,
)
from aimgpu.isolation.protocols import Counter, Resizer
from aimgpu.placement import DeviceState
from aimgpu.units import format_bytes

# What each engine makes of a share that changes under it. Anything else that allocates as it goes profits at once.
PROFITS = {
    "vllm": "vLLM takes its memory when it starts: more is used after a restart, and less only if it has not taken it",
    "llamacpp": "llama.cpp takes its memory when it loads the model: more is used after a restart",
    "ollama": "Ollama looks at the free memory whenever it loads a model: the next load uses it",
}
_AT_ONCE = "programs that allocate as they go use it at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One Grant's new size."""

    grant: Grant
    before_bytes: int
    after_bytes: int
    used_bytes: int
    free_bytes: int  # that nobody else was granted or holds, this Grant's own apart

    def to_json(self) -> dict[str, Any]:
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
    deployment: str
    changes: tuple[Change, ...]
    note: str

    def to_json(self) -> dict[str, Any]:
        return {"model": self.deployment, "changes": [change.to_json() for change in self.changes], "note": self.note}


def plan_resize(controller: Controller, name: str, memory_bytes: int) -> Resize:
    """What would change, Grant by Grant; each gets `memory_bytes`. Raises what `apply_resize` would, and changes nothing."""
    instances = _running(controller, name)
    states = {state.device.id: state for _, state in controller.snapshot().devices()}
    changes = tuple(
        _change(controller, grant, states.get(grant.device_id), memory_bytes)
        for instance in instances
        for grant in instance.grants
    )
    return Resize(deployment=name, changes=changes, note=PROFITS.get(instances[0].engine, _AT_ONCE))


def apply_resize(controller: Controller, name: str, memory_bytes: int) -> Resize:
    """All checked before the first is changed; a race that is lost later leaves those that were done."""
    with controller.mutation:
        controller.check_open()
        capacity = {part.id: part.memory_bytes for device in controller.devices() for part in device.layout.partitions}
        with ExitStack() as held:
            for instance in _running(controller, name):
                held.enter_context(controller.holding(instance))
            plan = plan_resize(controller, name, memory_bytes)
            for change in plan.changes:
                (_grow if change.after_bytes > change.before_bytes else _shrink)(controller, change, capacity)
            _keep(controller, name, memory_bytes)
    controller.statistics.count("resize", "ok")
    return plan


def _keep(controller: Controller, name: str, memory_bytes: int) -> None:
    """Whatever stops and starts it from now on starts it with this share."""
    wanted = next(deployment for deployment in controller.deployments() if deployment.name == name)
    controller.parts.ledger.want(replace(wanted, resized_bytes=memory_bytes))


def _running(controller: Controller, name: str) -> list[Instance]:
    if all(deployment.name != name for deployment in controller.deployments()):
        known = ", ".join(sorted(deployment.name for deployment in controller.deployments()))
        raise UnknownDeployment(f"no deployment {name}", hint=f"Running: {known or 'nothing'}.")
    ready = InstanceState.READY
    found = [item for item in controller.instances() if item.deployment == name and item.state is ready and item.grants]
    if not found:
        raise Conflict(f"{name} is not ready, so there is nothing to resize", hint="`aimgpu ps` shows what runs.")
    return found


def _change(controller: Controller, grant: Grant, state: DeviceState | None, memory_bytes: int) -> Change:
    if memory_bytes < 1:
        raise InvalidInput("a share of no memory", hint="Ask for more than 0 bytes.")
    isolator = controller.parts.isolator
    used = isolator.read_used_bytes(grant) if isinstance(isolator, Counter) and not grant.exclusive else None
    if used is None:
        what = "it has the partition for itself" if grant.exclusive else f"it is held by {grant.mechanism or 'nothing'}"
        raise NotAllowed(
            f"the memory of {grant.instance_id} cannot change while it runs: {what}",
            hint="Change its `gpu:` in the stack file and apply it; that restarts it.",
        )
    partition = state.device.partition(grant.partition_id) if state is not None else None
    if state is None or partition is None:
        raise HardwareUnavailable(f"{grant.partition_id}, which {grant.instance_id} has, is not there", hint=GONE_HINT)
    others = sum(other.memory_bytes for other in state.grants if other.partition_id == partition.id and other.id != grant.id)
    free = max(0, partition.memory_bytes - others - state.foreign_on(partition))
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
        )
    return Change(grant=grant, before_bytes=grant.memory_bytes, after_bytes=memory_bytes, used_bytes=used, free_bytes=free)


def _grow(controller: Controller, change: Change, capacity: dict[str, int]) -> None:
    ledger = controller.parts.ledger
    ledger.resize(change.grant.id, change.after_bytes, capacity=capacity)
    try:
        _limit(controller, change.grant, change.after_bytes)
    except AimGpuError:
        ledger.resize(change.grant.id, change.before_bytes, capacity=capacity)
        raise


def _shrink(controller: Controller, change: Change, capacity: dict[str, int]) -> None:
    _limit(controller, change.grant, change.after_bytes)
    try:
        controller.parts.ledger.resize(change.grant.id, change.after_bytes, capacity=capacity)
    except AimGpuError:
        _limit(controller, change.grant, change.before_bytes)
        raise


def _limit(controller: Controller, grant: Grant, memory_bytes: int) -> None:
    if isinstance(controller.parts.isolator, Resizer):
        controller.parts.isolator.resize(grant, memory_bytes)
