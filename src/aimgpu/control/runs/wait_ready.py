"""Waiting for instances that somebody else is starting: another apply, or a restart after a crash."""

import threading
import time
from collections.abc import Callable, Iterable

from aimgpu.control.events import Emit
from aimgpu.control.runs.instance_recorder import state_event
from aimgpu.domain import Instance, InstanceState

_UNSETTLED = frozenset({InstanceState.QUEUED, InstanceState.LOADING})
_LOOK_SECONDS = 0.2  # a change that was told between two looks is seen at the next


def wait_until_ready(
    read: Callable[[], Iterable[Instance]], changed: threading.Condition, emit: Emit, *, timeout_seconds: float
) -> None:
    """Returns when none of them is queued or loading; tells what state each came to."""
    deadline = time.monotonic() + timeout_seconds
    told: dict[str, InstanceState] = {}
    while time.monotonic() < deadline:
        found = list(read())
        unsettled = [instance for instance in found if instance.state in _UNSETTLED]
        for instance in found:
            if instance in unsettled or instance.id in told:
                _tell(instance, told, emit)
        if not unsettled:
            return
        with changed:
            changed.wait(_LOOK_SECONDS)


def _tell(instance: Instance, told: dict[str, InstanceState], emit: Emit) -> None:
    if told.get(instance.id) is not instance.state:
        told[instance.id] = instance.state
        emit(state_event(instance))
