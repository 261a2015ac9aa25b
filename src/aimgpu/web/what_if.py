"""What would happen if models were added or removed or a layout changed: decided on a snapshot, nothing is done."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from aimgpu.control.plan.prepared import ask_for
from aimgpu.domain import Ask, Deployment, Device, Layout
from aimgpu.domain.codec import encode
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import InvalidInput, UnknownDeployment, UnknownDevice
from aimgpu.placement import DeviceState, MoveKind, Snapshot, apply_plan, decision_to_json
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.planner import ask_again, plan_all
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.units import format_bytes
from aimgpu.web.deploy_check import read_deployment
from aimgpu.web.request_body import refuse_unknown
from aimgpu.web.sources import Json, Sources

_MOST_ADDED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Supposition:
    add: Sequence[Mapping[str, Any]] = ()  # {name, fields}
    remove: Sequence[str] = ()  # deployments
    layouts: Mapping[str, str] | None = None  # by device
    may_move: bool = True
    may_stop: bool = False

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "Supposition":
        refuse_unknown(body, [one.name for one in fields(cls)])
        add, remove, layouts = body.get("add", []), body.get("remove", []), body.get("layouts", {})
        if not isinstance(add, list) or len(add) > _MOST_ADDED or not all(isinstance(one, Mapping) for one in add):
            raise InvalidInput(f"`add` is a list of at most {_MOST_ADDED} {{name, fields}}")
        for one in add:
            refuse_unknown(one, ("name", "fields"), "in an entry of `add`")
        if not isinstance(remove, list) or not all(isinstance(one, str) for one in remove):
            raise InvalidInput("`remove` is a list of names")
        if not isinstance(layouts, Mapping) or not all(isinstance(one, str) for one in layouts.values()):
            raise InvalidInput("`layouts` maps a device to the name of a layout")
        may_move, may_stop = body.get("may_move", True), body.get("may_stop", False)
        if not isinstance(may_move, bool) or not isinstance(may_stop, bool):
            raise InvalidInput("`may_move` and `may_stop` are true or false")
        return cls(add=add, remove=remove, layouts=dict(layouts), may_move=may_move, may_stop=may_stop)


def suppose(sources: Sources, given: Supposition, check: Callable[[Deployment], None] = lambda _: None) -> Json:
    """`check` refuses an added model that this caller may not have read."""
    before = sources.take_snapshot()
    changed = _without(before, given.remove)
    changed, displaced = _with_layouts(changed, given.layouts or {})
    asks = [*displaced, *_asks(sources, given.add, check)]
    # A plan that undoes the layouts that were supposed would answer another question.
    limits = Limits(may_move=given.may_move, may_stop=given.may_stop, may_change_layouts=not given.layouts)
    batch = plan_all(changed, asks, limits)
    after = apply_plan(changed, batch.plan)
    layouts = [f"set {device} to {name}" for device, name in (given.layouts or {}).items()]
    return {
        "fits": not batch.refusals,
        "because": batch.plan.because,
        "steps": [
            *(f"stop {name}" for name in given.remove),
            *_held_by_others(before, given.layouts or {}),
            *layouts,
            *(f"restart {ask.name}, which the new layout stops" for ask in displaced),
            *(step.text for step in batch.plan.steps if step.kind is not MoveKind.PLACE),
        ],
        "placements": encode(batch.plan.placements),
        "refusals": [decision_to_json(refusal) for refusal in batch.refusals],
        "before": describe_bars(before),
        "after": describe_bars(after),
    }


def _held_by_others(snapshot: Snapshot, layouts: Mapping[str, str]) -> list[str]:
    """A step for each GPU on which foreign processes must end before its layout can change."""
    held = {state.device.id: (state.foreign_kind, sum(state.foreign_bytes.values())) for _, state in snapshot.devices()}
    return [
        f"wait until other {kind} on {device}, which hold {format_bytes(size)}, have ended"
        for device in layouts
        for kind, size in [held.get(device, ("", 0))]
        if size
    ]


def describe_bars(snapshot: Snapshot) -> list[Json]:
    """What the page draws: each GPU's partitions with their shares, granted bytes only."""
    states = sorted((state for _, state in snapshot.devices()), key=lambda state: state.device.index)
    return [_bar(state) for state in states]


def _bar(state: DeviceState) -> Json:
    return {
        "id": state.device.id,
        "index": state.device.index,
        "name": state.device.market_name or state.device.product,
        "layout": state.device.layout.name,
        "memory_bytes": state.device.memory_bytes,
        "partitions": [
            {
                "id": part.id,
                "kind": part.kind,
                "memory_bytes": part.memory_bytes,
                "foreign_bytes": state.foreign_on(part),
                "shares": [
                    {"instance": one.instance_id, "model": one.deployment, "memory_bytes": one.memory_bytes, "terms": []}
                    for one in state.grants
                    if one.partition_id == part.id
                ],
            }
            for part in state.device.layout.partitions
        ],
    }


def _without(snapshot: Snapshot, names: Sequence[str]) -> Snapshot:
    held = {grant.instance_id: grant.deployment for _, state in snapshot.devices() for grant in state.grants}
    for name in names:
        mine = [instance_id for instance_id, owner in held.items() if owner == name]
        if not mine:
            names = ", ".join(sorted(set(held.values()))) or "none"
            raise UnknownDeployment(f"{name} holds nothing on a GPU", hint=f"Models that do: {names}.")
        for instance_id in mine:
            snapshot = snapshot.without_instance(instance_id)
    return snapshot


def _with_layouts(snapshot: Snapshot, wanted: Mapping[str, str]) -> tuple[Snapshot, list[Ask]]:
    """The snapshot with these layouts, and the asks of the instances that such a change stops."""
    devices = {state.device.id: state.device for _, state in snapshot.devices()}
    layouts: dict[str, Layout] = {}
    for device_id, name in wanted.items():
        if device_id not in devices:
            raise UnknownDevice(f"there is no GPU {device_id!r}", hint=f"GPUs here: {', '.join(devices)}.")
        layout = find_layout(devices[device_id], name)
        if layout.name != devices[device_id].layout.name:
            layouts[device_id] = layout
    gone = {part.id for device_id in layouts for part in devices[device_id].layout.partitions} - {
        part.id for layout in layouts.values() for part in layout.partitions
    }
    stopped = list(
        dict.fromkeys(
            grant.instance_id for _, state in snapshot.devices() for grant in state.grants if grant.partition_id in gone
        )
    )
    displaced = [ask_again(snapshot, instance_id) for instance_id in stopped if instance_id in snapshot.running]
    for instance_id in stopped:
        snapshot = snapshot.without_instance(instance_id)
    nodes = tuple(
        replace(node, devices=tuple(_relaid(state, layouts.get(state.device.id)) for state in node.devices))
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes), displaced


def _relaid(state: DeviceState, layout: Layout | None) -> DeviceState:
    if layout is None:
        return state
    device: Device = replace(state.device, layout=layout)
    others = sum(state.foreign_bytes.values())  # on which of the new partitions they would be is not known
    return replace(state, device=device, foreign_bytes={UNKNOWN_PARTITION: others} if others else {})


def _asks(sources: Sources, added: Sequence[Mapping[str, Any]], check: Callable[[Deployment], None]) -> list[Ask]:
    found = []
    for one in added:
        deployment = read_deployment(one.get("name"), one.get("fields"))
        check(deployment)
        prepared = sources.size(deployment)
        found += [ask_for(prepared, replica) for replica in range(prepared.deployment.replicas)]
    return found
