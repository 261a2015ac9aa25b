"""A change of layout: what stops, what comes back, and who is in the way. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aimgpu.control.plan.steps import ChangeLayout, ControlState, Plan, Release, Step, Unload
from aimgpu.domain import Ask, Device, DeviceUsage, Layout, Refusal
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import DriverReloadNeeded, UnknownDevice
from aimgpu.hardware.busy import processes_in_the_way
from aimgpu.placement import Snapshot
from aimgpu.placement.decide import decide_all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayoutChange:
    """What a change of layout would do; an instance that stops either comes back or does not fit any more."""

    device_id: str
    before: str
    after: str
    layouts: Mapping[str, str]  # of every GPU that follows, as they are now: a memory mode takes the whole hive along
    idle: tuple[str, ...]  # partitions that must stay unused meanwhile; a driver reload stops the whole vendor's
    halted: tuple[str, ...]  # the GPUs of these partitions
    needs_reload: bool
    stops: tuple[str, ...]  # instance ids
    returns: tuple[str, ...]  # of those, the ones that fit afterwards
    does_not_fit: tuple[Refusal, ...]

    @property
    def changes_nothing(self) -> bool:
        """Whether the GPU has this layout already."""
        return self.before == self.after

    @property
    def devices(self) -> tuple[str, ...]:
        """GPUs whose layout changes."""
        return tuple(self.layouts)

    def to_json(self) -> dict[str, Any]:
        """As the API and `aimgpu partition plan --json` show it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupants:
    """Processes seen on the GPUs, and which of them belong to us."""

    usage: tuple[DeviceUsage, ...] = ()
    owners: Mapping[int, str] = field(default_factory=dict)  # instance by pid
    helpers: frozenset[int] = frozenset()  # pids of ours that serve several instances

    def holders(self) -> dict[str, list[str]]:
        """Instances by GPU that they hold without a grant there, as a ROCm process holds every GPU it sees."""
        return {
            usage.device_id: sorted(
                {self.owners[one.pid] for one in usage.processes if one.pid in self.owners and one.partition_id is None}
            )
            for usage in self.usage
        }

    def strangers(self, halted: Collection[str], idle: Collection[str]) -> dict[int, str | None]:
        """Names by pid of processes on these partitions of these GPUs that are not ours to stop."""
        ours = self.owners.keys() | self.helpers
        return {
            process.pid: process.name
            for usage in self.usage
            if usage.device_id in halted
            for process in usage.processes
            if process.pid not in ours and (process.partition_id is None or process.partition_id in idle)
        }


def find_layout_change(
    snapshot: Snapshot, device_id: str, layout_name: str, occupants: Occupants | None = None
) -> PlannedLayoutChange:
    """Raises UnknownDevice or UnknownLayout, naming those that exist."""
    devices = {state.device.id: state.device for _, state in snapshot.devices()}
    device = _find_device(devices.values(), device_id)
    layout = find_layout(device, layout_name)
    reload = layout.memory_mode != device.layout.memory_mode
    touched = layout_followers(snapshot, device, reload=reload)
    halted = [other for other in devices.values() if other is device or (reload and other.vendor == device.vendor)]
    staying = set() if reload else {partition.id for partition in layout.partitions}
    idle = tuple(part.id for other in halted for part in other.layout.partitions if part.id not in staying)
    holders = (occupants or Occupants()).holders()
    stops = _stopped(snapshot, idle, [other.id for other in halted], holders) if layout.name != device.layout.name else ()
    layouts = {other.id: layout if other is device else _layout_like(other, layout) for other in touched}
    asks = [_ask_again(snapshot, instance_id) for instance_id in stops]
    decisions = decide_all(_with_layouts(snapshot, layouts, stops), [ask for ask in asks if ask is not None])
    refused = tuple(decision for decision in decisions if isinstance(decision, Refusal))
    lost = {refusal.ask for refusal in refused}
    return PlannedLayoutChange(
        device_id=device.id,
        before=device.layout.name,
        after=layout.name,
        layouts={other.id: other.layout.name for other in touched},
        idle=idle,
        halted=tuple(other.id for other in halted if any(part.id in idle for part in other.layout.partitions)),
        needs_reload=reload,
        stops=stops,
        returns=tuple(instance_id for instance_id in stops if instance_id not in lost),
        does_not_fit=refused,
    )


def plan_layout(change: PlannedLayoutChange, state: ControlState, *, reload_driver: bool) -> Plan:
    """Stop what is in the way, change the layout, place again what was stopped."""
    running = [instance for instance in state.running if instance.id in change.stops]
    ends: list[Step] = [Unload.of(one) if one.sleeps_in_place else Release.of(one) for one in running]
    step = ChangeLayout(
        device_id=change.device_id,
        after=change.after,
        before=tuple(change.layouts.items()),
        idle=change.idle,
        halted=change.halted,
        reload_driver=reload_driver,
    )
    return Plan(
        operation="partition",
        chains=((*ends, step),),
        restarts=tuple(dict.fromkeys(one.deployment for one in running if not one.sleeps_in_place)),
        details={"device": change.device_id, "before": change.before, "after": change.after},
    )


def check_layout_change(change: PlannedLayoutChange, occupants: Occupants, *, reload_driver: bool) -> None:
    """Refuse a change that is sure to fail before anything is stopped for it."""
    if change.needs_reload and not reload_driver:
        raise DriverReloadNeeded(
            f"{change.after} on {change.device_id} takes a driver reload, which stops all GPU work on this machine",
            hint=f"Pass --reload-driver when it may stop. It changes: {', '.join(change.devices)}.",
            page_hint=f"Choose to reload the driver when it may stop. It changes: {', '.join(change.devices)}.",
        )
    strangers = occupants.strangers(change.halted, change.idle)
    if strangers:
        raise processes_in_the_way(change.device_id, change.after, strangers)


def layout_followers(snapshot: Snapshot, device: Device, *, reload: bool) -> list[Device]:
    """GPUs whose layout changes with this one, itself first: a reload sets the memory mode of its whole hive."""
    devices = [state.device for _, state in snapshot.devices()]
    return [device, *(one for one in devices if one.id != device.id and reload and device.hive and one.hive == device.hive)]


def _stopped(
    snapshot: Snapshot, idle: tuple[str, ...], halted: list[str], holders: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    granted = [
        grant.instance_id for _, state in snapshot.devices() for grant in state.grants if grant.partition_id in set(idle)
    ]
    return tuple(dict.fromkeys([*granted, *(instance_id for device in halted for instance_id in holders.get(device, ()))]))


def _find_device(devices: Iterable[Device], wanted: str) -> Device:
    found = list(devices)
    for device in found:
        if wanted in (device.id, str(device.index)):
            return device
    known = ", ".join(f"{device.index} ({device.id})" for device in found) or "none"
    raise UnknownDevice(f"there is no GPU {wanted!r}", hint=f"GPUs here: {known}.")


def _with_layouts(snapshot: Snapshot, layouts: Mapping[str, Layout], stopped: Iterable[str]) -> Snapshot:
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
    """The same layout of another GPU of the hive: a reload sets the memory mode, and the compute mode follows it."""
    return next((own for own in device.layouts if own.name == layout.name), device.layout)


def _ask_again(snapshot: Snapshot, instance_id: str) -> Ask | None:
    ask = snapshot.running.get(instance_id)
    if ask is None:
        return None
    granted = [grant for _, state in snapshot.devices() for grant in state.grants if grant.instance_id == instance_id]
    least = max((grant.memory_bytes for grant in granted), default=ask.footprint_bytes)
    return replace(ask, name=instance_id, footprint_bytes=least, partition_id=None)
