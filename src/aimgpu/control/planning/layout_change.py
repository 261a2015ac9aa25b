"""Change a Device's Layout: show what would stop and come back, then drain, change, verify, and bring back."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aimgpu.control.controller import Controller
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.planning.layout_names import find_layout
from aimgpu.control.snapshots import process_owners
from aimgpu.domain import Ask, Device, Layout, Refusal
from aimgpu.errors import AimGpuError, DriverReloadNeeded, LayoutNotApplied, PartitionBusy, UnknownDevice
from aimgpu.placement import Snapshot
from aimgpu.placement.decide import decide_all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayoutChange:
    """What a change of Layout would do; an instance that stops either comes back or does not fit any more."""

    device_id: str
    before: str
    after: str
    devices: tuple[str, ...]  # a memory mode takes the whole hive along
    idle: tuple[str, ...]  # Partitions that nobody may use meanwhile; a driver reload stops the whole vendor's
    needs_reload: bool
    stops: tuple[str, ...]  # instance ids
    returns: tuple[str, ...]  # of those, the ones that fit afterwards
    does_not_fit: tuple[Refusal, ...]

    @property
    def changes_nothing(self) -> bool:
        return self.before == self.after

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device_id,
            "before": self.before,
            "after": self.after,
            "devices": list(self.devices),
            "idle": [] if self.changes_nothing else list(self.idle),
            "needs_reload": self.needs_reload,
            "stops": list(self.stops),
            "returns": list(self.returns),
            "does_not_fit": [{"instance": refusal.ask, "why": refusal.summary} for refusal in self.does_not_fit],
        }


def plan_layout(
    snapshot: Snapshot, device_id: str, layout_name: str, *, holders: Mapping[str, Collection[str]] | None = None
) -> PlannedLayoutChange:
    """Pure. `holders`: instances by Device that they hold without a Grant there, as a ROCm process holds every GPU it sees.

    Raises UnknownDevice or UnknownLayout, naming those that exist.
    """
    devices = {state.device.id: state.device for _, state in snapshot.devices()}
    device = _find_device(devices, device_id)
    layout = find_layout(device, layout_name)
    reload = layout.memory_mode != device.layout.memory_mode
    touched = [other for other in devices.values() if other is device or (reload and device.hive and other.hive == device.hive)]
    halted = [other for other in devices.values() if other is device or (reload and other.vendor == device.vendor)]
    staying = set() if reload else {part.id for part in layout.partitions}
    idle = tuple(part.id for other in halted for part in other.layout.partitions if part.id not in staying)
    stops = _stopped(snapshot, idle, [other.id for other in halted], holders or {}) if layout.name != device.layout.name else ()
    after = _with_layouts(
        snapshot, {other.id: layout if other is device else _layout_like(other, layout) for other in touched}, stops
    )
    asks = [_ask_again(snapshot, instance_id) for instance_id in stops]
    decisions = decide_all(after, [ask for ask in asks if ask is not None])
    refused = tuple(decision for decision in decisions if isinstance(decision, Refusal))
    lost = {refusal.ask for refusal in refused}
    return PlannedLayoutChange(
        device_id=device.id,
        before=device.layout.name,
        after=layout.name,
        devices=tuple(other.id for other in touched),
        idle=idle,
        needs_reload=reload,
        stops=stops,
        returns=tuple(instance_id for instance_id in stops if instance_id not in lost),
        does_not_fit=refused,
    )


def plan_change(controller: Controller, device_id: str, layout_name: str) -> PlannedLayoutChange:
    """`plan_layout` on the machine as it is now, with what our processes were seen to hold."""
    owners = process_owners(controller.parts)
    holders: dict[str, list[str]] = {}
    for usage in controller.parts.hardware.read_usage():
        seen = {owners[process.pid] for process in usage.processes if process.pid in owners and process.partition_id is None}
        holders[usage.device_id] = sorted(seen)
    return plan_layout(controller.snapshot(), device_id, layout_name, holders=holders)


def apply_layout(
    controller: Controller, device_id: str, layout_name: str, *, reload_driver: bool = False, emit: Emit = ignore
) -> Device:
    """Returns the Device as read back. On failure what ran comes back under the Layout that is really there."""
    names: set[str] = set()
    ledger, operation = controller.parts.ledger, None
    try:
        with controller.mutation:  # nothing is placed on what is about to change
            change = plan_change(controller, device_id, layout_name)
            if change.changes_nothing:
                return _find_device({device.id: device for device in controller.devices()}, change.device_id)
            _refuse_in_vain(controller, change, reload_driver=reload_driver)
            names |= {instance.deployment for instance in controller.instances() if instance.id in change.stops}
            intent = {"device": change.device_id, "before": change.before, "after": change.after}
            operation = ledger.begin("partition", intent)
            return _carry_out(controller, change, emit, reload_driver=reload_driver)
    finally:
        controller.redeploy(names, emit=emit)
        if operation is not None:
            ledger.finish(operation)


def _carry_out(controller: Controller, change: PlannedLayoutChange, emit: Emit, *, reload_driver: bool) -> Device:
    before = {device.id: device.layout.name for device in controller.devices() if device.id in change.devices}
    try:
        _say(emit, f"stopping {_count(change.stops)} on {', '.join(change.devices)}")
        controller.suspend(change.stops, emit=emit)
        _dismiss(controller, change, emit)
        _say(emit, f"changing {change.device_id} from {change.before} to {change.after}")
        device = _change(controller, change, reload_driver=reload_driver)
    except AimGpuError:
        controller.statistics.count("partition", "failed")
        for device_id in sorted(
            before, key=lambda name: name != change.device_id
        ):  # it takes the memory mode of its hive along
            _restore(controller, (device_id, before[device_id]), emit, reload_driver=reload_driver)
        raise
    controller.statistics.count("partition", "ok")
    return device


def _dismiss(controller: Controller, change: PlannedLayoutChange, emit: Emit) -> None:
    """What served our tenants on Partitions that go: it would hold the Device, and comes back with the tenants."""
    parts = (part for device in controller.devices() for part in device.layout.partitions if part.id in set(change.idle))
    ended = controller.parts.attendants.dismiss([part.uuid for part in parts if part.uuid is not None])
    if ended:
        _say(emit, f"stopped MPS on {', '.join(ended)}")


def _refuse_in_vain(controller: Controller, change: PlannedLayoutChange, *, reload_driver: bool) -> None:
    """What is sure to be refused is refused before anything of ours is stopped for it."""
    if change.needs_reload and not reload_driver:
        raise DriverReloadNeeded(
            f"{change.after} on {change.device_id} takes a driver reload, which stops all GPU work on this machine",
            hint=f"Pass --reload-driver when it may stop. It changes: {', '.join(change.devices)}.",
        )
    ours, idle = process_owners(controller.parts).keys() | controller.parts.attendants.pids(), set(change.idle)
    halted = {partition_id.rpartition("/")[0] for partition_id in idle}
    strangers = [
        f"pid {process.pid} ({process.name})" if process.name else f"pid {process.pid}"
        for usage in controller.parts.hardware.read_usage()
        if usage.device_id in halted
        for process in usage.processes
        if process.pid not in ours and (process.partition_id is None or process.partition_id in idle)
    ]
    if strangers:
        raise PartitionBusy(
            f"cannot set {change.after} on {change.device_id}: {', '.join(strangers)} in the way",
            hint="They are not ours to stop: stop them, then try again. Nothing was changed.",
        )


def _stopped(
    snapshot: Snapshot, idle: tuple[str, ...], halted: list[str], holders: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    granted = [
        grant.instance_id for _, state in snapshot.devices() for grant in state.grants if grant.partition_id in set(idle)
    ]
    return tuple(dict.fromkeys([*granted, *(instance_id for device in halted for instance_id in holders.get(device, ()))]))


def _change(controller: Controller, change: PlannedLayoutChange, *, reload_driver: bool) -> Device:
    device = controller.parts.hardware.apply_layout(change.device_id, change.after, reload_driver=reload_driver)
    if device.layout.name != change.after:
        raise LayoutNotApplied(f"{device.id} reads {device.layout.name} after {change.after} was asked for")
    return device


def _restore(controller: Controller, was: tuple[str, str], emit: Emit, *, reload_driver: bool) -> None:
    """Undo a half-done change; where that fails too, what is read back is what will be reported."""
    device_id, layout_name = was
    now = {device.id: device.layout.name for device in controller.devices()}
    if now.get(device_id, layout_name) != layout_name:
        try:
            controller.parts.hardware.apply_layout(device_id, layout_name, reload_driver=reload_driver)
        except AimGpuError as error:
            _say(emit, f"{device_id} could not be set back to {layout_name}: {error.message}")


def _find_device(devices: dict[str, Device], wanted: str) -> Device:
    for device in devices.values():
        if wanted in (device.id, str(device.index)):
            return device
    known = ", ".join(f"{device.index} ({device.id})" for device in devices.values()) or "none"
    raise UnknownDevice(f"no device {wanted!r}", hint=f"Devices here: {known}.")


def _with_layouts(snapshot: Snapshot, layouts: dict[str, Layout], stopped: tuple[str, ...]) -> Snapshot:
    for instance_id in stopped:
        snapshot = snapshot.without_instance(instance_id)
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                replace(state, device=replace(state.device, layout=layouts.get(state.device.id, state.device.layout)))
                for state in node.devices
            ),
        )
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=nodes)


def _layout_like(device: Device, layout: Layout) -> Layout:
    """The same Layout of another Device of the hive: a reload sets the memory mode, and the compute mode follows it."""
    return next((own for own in device.layouts if own.name == layout.name), device.layout)


def _ask_again(snapshot: Snapshot, instance_id: str) -> Ask | None:
    ask = snapshot.running.get(instance_id)
    if ask is None:
        return None
    granted = [grant for _, state in snapshot.devices() for grant in state.grants if grant.instance_id == instance_id]
    return replace(ask, name=instance_id, footprint_bytes=max(grant.memory_bytes for grant in granted), partition_id=None)


def _say(emit: Emit, text: str) -> None:
    emit(Event(kind=EventKind.STEP, text=text))


def _count(instances: Collection[str]) -> str:
    return f"{len(instances)} instance{'' if len(instances) == 1 else 's'}"
