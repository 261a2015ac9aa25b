"""What happened to models and GPUs, in sentences, found by comparing one look with the next."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.domain import Instance, InstanceState, Level
from aimgpu.units import format_bytes

_MOST = 500
_STATES = {
    InstanceState.QUEUED: "queued",
    InstanceState.LOADING: "loading",
    InstanceState.READY: "ready",
    InstanceState.SLEEPING: "asleep",
    InstanceState.DRAINING: "draining: requests in flight finish",
    InstanceState.ENDED: "ended",
    InstanceState.FAILED: "failed",
    InstanceState.ABSENT: "gone",
}


@dataclass(frozen=True, slots=True)
class JournalEntry:
    number: int
    at: float  # seconds since the epoch
    model: str | None
    kind: str  # state | refused | layout | device | pressure
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "at": self.at, "model": self.model, "kind": self.kind, "text": self.text}


class EventJournal:
    """Bounded; one writer at a time."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: deque[JournalEntry] = deque(maxlen=_MOST)
        self._numbers = itertools.count(1)
        self._before: Observation | None = None
        self._waiting: Mapping[str, str] = {}
        self._pressure: Mapping[str, str] = {}

    def entries(self, after: int = 0) -> tuple[JournalEntry, ...]:
        return tuple(entry for entry in tuple(self._entries) if entry.number > after)

    def compare(self, seen: Observation, waiting: Mapping[str, str], pressure: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what is new since the last call; what was there at the first call is not news."""
        before = self._before
        reasons = {device: str(one.get("reason") or "") for device, one in pressure.items()}
        if before is not None:
            for model, kind, text in itertools.chain(
                _instance_changes(before, seen),
                _waiting_changes(self._waiting, waiting),
                _device_changes(before, seen),
                _pressure_changes(self._pressure, reasons),
            ):
                self._entries.append(JournalEntry(next(self._numbers), self._now(), model, kind, text))
        self._before, self._waiting, self._pressure = seen, dict(waiting), reasons


_Change = tuple[str | None, str, str]


def _instance_changes(before: Observation, after: Observation) -> Iterator[_Change]:
    was = {instance.id: instance for instance in before.instances}
    now = {instance.id: instance for instance in after.instances}
    for instance in after.instances:
        old = was.get(instance.id)
        if old is None or old.state is not instance.state:
            yield instance.deployment, "state", _describe(instance, old)
        elif _held(old) != _held(instance):
            yield instance.deployment, "state", _describe_change(_held(old), _held(instance))
        elif _levels(old) != _levels(instance):
            yield instance.deployment, "level", f"is enforced at {_levels(instance)} instead of {_levels(old)}"
    left = {instance.deployment for instance in after.instances}
    for instance in before.instances:
        if instance.id not in now and (_held(instance) or instance.deployment not in left):
            given = f"; {format_bytes(_held(instance))} given back" if _held(instance) else ""
            yield instance.deployment, "state", f"stopped{given}"


def _describe_change(before: int, after: int) -> str:
    if not before:
        return f"was granted {format_bytes(after, up=True)}"
    if not after:
        return f"gave {format_bytes(before)} back"
    return f"resized from {format_bytes(before, up=True)} to {format_bytes(after, up=True)}"


def _describe(instance: Instance, old: Instance | None) -> str:
    text = _STATES[instance.state]
    if instance.reason:
        text += f": {instance.reason}"
    if instance.state is InstanceState.READY and instance.grants:
        grant = instance.grants[0]
        text += f" on {grant.partition_id} with {format_bytes(_held(instance), up=True)}"
        text += ", not enforced" if grant.level is Level.NONE else f", enforcement {grant.level.value}"
    if instance.state is InstanceState.SLEEPING and old is not None and _held(old) > _held(instance):
        text += f"; {format_bytes(_held(old) - _held(instance))} given back"
    return text


def _held(instance: Instance) -> int:
    return sum(grant.memory_bytes for grant in instance.grants)


def _levels(instance: Instance) -> str:
    return ", ".join(sorted({grant.level.value for grant in instance.grants if grant.mechanism}))


def _waiting_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[_Change]:
    for name, reason in after.items():
        if before.get(name) != reason:
            yield name, "refused", f"waits: {reason}"


def _device_changes(before: Observation, after: Observation) -> Iterator[_Change]:
    was = {device.id: device for device in before.devices}
    for device in after.devices:
        old = was.get(device.id)
        if old is not None and old.layout.name != device.layout.name:
            yield None, "layout", f"{device.id} changed from {old.layout.name} to {device.layout.name}"
    if after.problem and after.problem != before.problem:
        yield None, "device", f"GPUs cannot be read: {after.problem}"
    if before.problem and not after.problem:
        yield None, "device", "GPUs can be read again"


def _pressure_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[_Change]:
    for device, reason in after.items():
        if before.get(device) != reason:
            yield None, "pressure", f"{device}: {reason}"
    for device in before:
        if device not in after:
            yield None, "pressure", f"{device}: low-priority work runs freely again"
