"""Sleep in place: an engine gives its memory back and stays, the books hold what is left, and it takes its memory again.

The order makes every crash harmless. To sleep: the books say so and still hold everything, the engine sleeps, the cap falls,
the books give back. To wake: the books hold everything again, or it is refused; the cap rises, the engine wakes.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.runs.cancellable import call_cancellable
from aimgpu.control.runs.run_files import read_api_key, update_run_record
from aimgpu.control.sleep.grants import asleep_grants
from aimgpu.control.snapshots import process_owners
from aimgpu.domain import Grant, Instance, InstanceState
from aimgpu.engines.protocols import HealthState, Sleeper
from aimgpu.errors import EngineFailed, ShareInUse
from aimgpu.isolation.protocols import Resizer
from aimgpu.units import GIB, format_bytes

_HOST_RESERVE_BYTES = 2 * GIB  # of host memory, for everything else


class InPlace:
    """Asks engines to sleep and to wake, and moves their caps. `give_up` raises once an instance is released or dead."""

    def __init__(self, parts: Dependencies, give_up: Callable[[Instance], None]) -> None:
        self._parts = parts
        self._give_up = give_up

    def is_possible(self, instance: Instance) -> bool:
        return instance.sleep_footprint is not None and self.can_wake(instance)

    def can_wake(self, instance: Instance) -> bool:
        """Also one that is not meant to sleep: somebody else, or Ollama itself, may have unloaded its model."""
        return instance.process is not None and isinstance(self._parts.engines.get(instance.engine), Sleeper)

    def put_to_sleep(self, instance: Instance) -> Instance:
        """Returns it with the smaller grants that are left, already in the books. Asleep already: only the books follow."""
        if self.ask_state(instance) is not HealthState.SLEEPING:
            sleeper, deep = self._sleeper(instance), self._host_is_short(instance)
            self._ask(instance, lambda: sleeper.sleep(*self._door(instance), deep=deep), "fall asleep")
        measured = self._measure(instance)
        _check_worth(instance, measured)
        grants = asleep_grants(instance, measured)
        asleep = replace(instance, state=InstanceState.SLEEPING, endpoint=None, percent=None, reason=None)
        asleep = replace(asleep, grants=tuple(self._lower_cap(grant, instance) for grant in grants))
        self._parts.ledger.rebook(asleep)
        update_run_record(self._parts.runs, asleep)
        return asleep

    def wake(self, instance: Instance) -> None:
        """The books must hold its grants whole already. Raises EngineFailed."""
        sleeper = self._sleeper(instance)
        update_run_record(self._parts.runs, instance)
        self._raise_caps(instance)
        self._ask(instance, lambda: sleeper.wake(*self._door(instance)), "wake up")

    def ask_state(self, instance: Instance) -> HealthState:
        return self._parts.engines[instance.engine].check_health(*self._door(instance)).state

    def _raise_caps(self, instance: Instance) -> None:
        if isinstance(self._parts.isolator, Resizer):
            for grant in instance.grants:
                self._parts.isolator.resize(grant, grant.memory_bytes)

    def _ask(self, instance: Instance, call: Callable[[], None], what: str) -> None:
        bound = self._parts.timing.wake_timeout_seconds
        try:
            call_cancellable(
                call, lambda: self._give_up(instance), poll_seconds=self._parts.timing.poll_seconds, bound_seconds=bound
            )
        except TimeoutError as error:
            raise EngineFailed(f"{instance.engine} did not {what} within {bound:g} s") from error

    def _sleeper(self, instance: Instance) -> Sleeper:
        engine = self._parts.engines[instance.engine]
        if not isinstance(engine, Sleeper):
            raise EngineFailed(f"{instance.engine} cannot sleep in place")
        return engine

    def _door(self, instance: Instance) -> tuple[Path, str]:
        return self._parts.runs / instance.id, read_api_key(self._parts.runs, instance.id) or ""

    def _host_is_short(self, instance: Instance) -> bool:
        needed = instance.sleep_footprint.host_bytes if instance.sleep_footprint else 0
        return needed > 0 and int(psutil.virtual_memory().available) < needed + _HOST_RESERVE_BYTES

    def _measure(self, instance: Instance) -> Mapping[str, int]:
        """Bytes that its processes hold by Device, where the devices tell; estimates alone would let the books lie."""
        owners = process_owners(self._parts)
        found: dict[str, int] = {}
        for usage in self._parts.hardware.read_usage():
            mine = [process for process in usage.processes if owners.get(process.pid) == instance.id]
            found[usage.device_id] = sum(process.memory_bytes or 0 for process in mine)
        return found

    def _lower_cap(self, grant: Grant, instance: Instance) -> Grant:
        """The Grant with what its cap could be lowered to: one that is in use says so, and more is left to it."""
        isolator = self._parts.isolator
        whole = next(held.memory_bytes for held in instance.grants if held.id == grant.id)
        size = grant.memory_bytes
        while isinstance(isolator, Resizer) and size < whole:
            with suppress(ShareInUse):
                isolator.resize(grant, size)
                break
            size = min(2 * size, whole)
        return replace(grant, memory_bytes=size)


def _check_worth(instance: Instance, measured: Mapping[str, int]) -> None:
    """An engine that keeps its memory in its sleep is better stopped; so is one that holds more than the books can say."""
    expected = instance.sleep_footprint.device_bytes if instance.sleep_footprint else 0
    for grant in instance.grants:
        kept = measured.get(grant.device_id, 0)
        if kept > expected and 2 * kept > grant.memory_bytes:
            said = f"{format_bytes(kept)} of {format_bytes(grant.memory_bytes)}"
            raise EngineFailed(f"{instance.engine} still holds {said} on {grant.device_id} in its sleep")
