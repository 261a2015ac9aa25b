"""Faults that control had, or could have, put back one at a time: the simulation must find each."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aimgpu.control import controller, waiting
from aimgpu.control.apply import Applier
from aimgpu.control.controller import Controller
from aimgpu.control.events import Emit
from aimgpu.control.instance import in_place
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.instance.recorder import InstanceRecorder
from aimgpu.control.reservations import Reservations
from aimgpu.control.restarts import Restarts
from aimgpu.domain import Instance, InstanceState
from aimgpu.placement import Snapshot

_find_diverged = waiting.find_diverged
_free = InstanceRecorder.free
_release = Lifecycle.release


def _free_without_retry(self: InstanceRecorder, instance: Instance, *, keep: Instance | None, retry: Any = None) -> None:
    _free(self, instance, keep=keep)


def _failed_is_settled(deployments: Iterable[Any], instances: Iterable[Any], _recorded: Any = ()) -> Any:
    known = list(deployments)
    return _find_diverged(known, instances, {one.name for one in known})


def _end_freed_first(self: InstanceRecorder, ended: Instance, instance: Instance, emit: Emit, retry: Any = None) -> Instance:
    self.free(instance, keep=ended, retry=retry)
    self.stop(instance)
    self.announce(ended, emit)
    return ended


def _grants_as_before(instance: Instance, _measured: Any) -> Any:
    return instance.grants


def _as_it_is(_: object, snapshot: Snapshot) -> Snapshot:
    return snapshot


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _release_without_cancel(self: Lifecycle, instance: Instance, emit: Emit, *, drain: bool = True) -> None:
    current = self._dependencies.ledger.instance(instance.id)
    if current is not None and current.state is not InstanceState.LOADING:
        _release(self, instance, emit, drain=drain)


def _lost_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InstanceRecorder, "free", _free_without_retry)
    patch.setattr(controller, "find_diverged", _failed_is_settled)


def _kept_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Applier, "drop_cancelled", _nothing)
    patch.setattr(Controller, "_end_abandoned", _nothing)


def _of(owner: object, name: str, replacement: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, replacement)


PUT_BACK: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a failure whose next try is written nowhere, and counts as settled": _lost_need,
    "a grant freed before its process ended": _of(InstanceRecorder, "_end", _end_freed_first),
    "a deployment that stays taken after a try": _of(Restarts, "_give_back", _nothing),
    "a release that leaves alone what loads": _of(Lifecycle, "release", _release_without_cancel),
    "an operation that is not closed": _of(Applier, "_close", _nothing),
    "claims that nothing ends": _of(Reservations, "end_claim", _nothing),
    "a start that another request took over, and nobody ends": _kept_start,
    "a charge past the room that is reserved for a chain": _of(Reservations, "apply_to", _as_it_is),
    "room that stays reserved": _of(Reservations, "drop", _nothing),
    "a GPU that stays blocked after its layout changed": _of(Reservations, "unblock", _nothing),
    "an instance that counts as ending for ever": _of(Reservations, "stop_ending", _nothing),
    "a sleeper that stays charged for what it gave back": _of(in_place, "asleep_grants", _grants_as_before),
    "a refusal after which nothing tries again": _of(Restarts, "_note_refusal", _nothing),
    "what differs from what is wanted, and nobody looks": _of(Controller, "_converge", _nothing),
}
