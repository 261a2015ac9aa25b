"""Waiting for instances that another operation is starting: another apply, or a restart after a crash."""

import time
from collections.abc import Callable, Iterable

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.events import Emit
from aimgpu.control.runs.instance_recorder import state_event
from aimgpu.domain import Instance, InstanceState

_UNSETTLED = frozenset({InstanceState.QUEUED, InstanceState.LOADING})
_LOOK_SECONDS = 1.0


def wait_until_ready(
    read: Callable[[], Iterable[Instance]], changes: ChangeCounter, emit: Emit, *, timeout_seconds: float
) -> None:
    """Returns when none of them is queued or loading; emits the state that each came to. An error of `read` ends the wait."""
    deadline = time.monotonic() + timeout_seconds
    shown: dict[str, InstanceState] = {}
    seen = changes.version
    while time.monotonic() < deadline:
        found = list(read())
        unsettled = [instance for instance in found if instance.state in _UNSETTLED]
        for instance in found:
            if instance in unsettled or instance.id in shown:
                _emit_state(instance, shown, emit)
        if not unsettled:
            return
        seen = changes.wait(seen, _LOOK_SECONDS)


def _emit_state(instance: Instance, shown: dict[str, InstanceState], emit: Emit) -> None:
    if shown.get(instance.id) is not instance.state:
        shown[instance.id] = instance.state
        emit(state_event(instance))
