"""Sleep in place: an engine gives its memory back and stays; the ledger holds what is left; it takes its memory again.

The order makes every crash harmless. To sleep: the ledger records the intent with everything still charged, the engine sleeps,
the cap falls, the ledger gives the rest back. To wake: the ledger charges everything again, or refuses; the cap rises, the
engine wakes. `InPlace` talks to the engine; `Sleepers` takes an instance through it and falls back to stopping it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.cancellable import Cancelled, call_cancellable
from aimgpu.control.instance.liveness import Liveness
from aimgpu.control.instance.recorder import InstanceRecorder, explain
from aimgpu.control.instance.run_folder import read_api_key, update_run_record
from aimgpu.control.plan.asleep import asleep_grants
from aimgpu.control.snapshots import process_owners
from aimgpu.domain import Grant, Instance, InstanceState, Slot
from aimgpu.engines.ownership import EngineOwner, expecting
from aimgpu.engines.protocols import HealthState, Sleeper
from aimgpu.errors import AimGpuError, EngineFailed, ShareInUse
from aimgpu.isolation.protocols import Resizer
from aimgpu.procfs import read_host_memory
from aimgpu.units import GIB, format_bytes

_ANSWERS = frozenset({HealthState.READY, HealthState.SLEEPING})
_HOST_RESERVE_BYTES = 2 * GIB  # of host memory, for everything else


class InPlace:
    """Asks engines to sleep and to wake, and moves their caps. `give_up` raises once an instance is released or dead."""

    def __init__(self, dependencies: Dependencies, give_up: Callable[[Instance], None]) -> None:
        self._dependencies = dependencies
        self._give_up = give_up

    def is_possible(self, instance: Instance) -> bool:
        return instance.sleep_footprint is not None and self.can_wake(instance)

    def can_wake(self, instance: Instance) -> bool:
        """Also one that is not meant to sleep: another client, or the engine itself, may have unloaded its model."""
        return instance.process is not None and isinstance(self._dependencies.engines.get(instance.engine), Sleeper)

    def put_to_sleep(self, instance: Instance) -> Instance:
        """Returns it with the smaller grants that are left, already in the ledger. Asleep already: only the ledger follows."""
        if self.ask_state(instance) is not HealthState.SLEEPING:
            sleeper, deep = self._sleeper(instance), self._host_is_short(instance)
            self._ask(instance, lambda: sleeper.sleep(*self._door(instance), deep=deep), "fall asleep")
        measured = self._measure(instance)
        _check_worth(instance, measured)
        grants = asleep_grants(instance, measured)
        asleep = replace(instance, state=InstanceState.SLEEPING, endpoint=None, percent=None, reason=None)
        asleep = replace(asleep, grants=tuple(self._lower_cap(grant, instance) for grant in grants))
        self._dependencies.ledger.rebook(asleep)
        update_run_record(self._dependencies.runs, asleep)
        return asleep

    def wake(self, instance: Instance) -> None:
        """The ledger must hold its grants whole already. Raises EngineFailed."""
        sleeper = self._sleeper(instance)
        update_run_record(self._dependencies.runs, instance)
        self._raise_caps(instance)
        self._ask(instance, lambda: sleeper.wake(*self._door(instance)), "wake up")

    def ask_state(self, instance: Instance) -> HealthState:
        with expecting(EngineOwner.of(instance)):
            return self._dependencies.engines[instance.engine].check_health(*self._door(instance)).state

    def _raise_caps(self, instance: Instance) -> None:
        if isinstance(self._dependencies.isolator, Resizer):
            for grant in instance.grants:
                self._dependencies.isolator.resize(grant, grant.memory_bytes)

    def _ask(self, instance: Instance, call: Callable[[], None], what: str) -> None:
        bound = self._dependencies.timing.wake_timeout_seconds

        def ask() -> None:
            with expecting(EngineOwner.of(instance)):
                call()

        try:
            call_cancellable(
                ask,
                lambda: self._give_up(instance),
                poll_seconds=self._dependencies.timing.poll_seconds,
                bound_seconds=bound,
                effects=self._dependencies.effects,
            )
        except TimeoutError as error:
            raise EngineFailed(f"{instance.engine} did not {what} within {bound:g} s") from error

    def _sleeper(self, instance: Instance) -> Sleeper:
        engine = self._dependencies.engines[instance.engine]
        if not isinstance(engine, Sleeper):
            raise EngineFailed(f"{instance.engine} cannot sleep in place")
        return engine

    def _door(self, instance: Instance) -> tuple[Path, str]:
        return self._dependencies.runs / instance.id, read_api_key(self._dependencies.runs, instance.id) or ""

    def _host_is_short(self, instance: Instance) -> bool:
        needed = instance.sleep_footprint.host_bytes if instance.sleep_footprint else 0
        return needed > 0 and read_host_memory()[1] < needed + _HOST_RESERVE_BYTES

    def _measure(self, instance: Instance) -> Mapping[str, int]:
        """Bytes that its processes hold by GPU, where the driver reports them; an estimate alone could be too low."""
        owners = process_owners(self._dependencies.effects, [instance])
        found: dict[str, int] = {}
        for usage in self._dependencies.hardware.read_usage():
            mine = [process for process in usage.processes if owners.get(process.pid) == instance.id]
            found[usage.device_id] = sum(process.memory_bytes or 0 for process in mine)
        return found

    def _lower_cap(self, grant: Grant, instance: Instance) -> Grant:
        """The grant with what its cap could be lowered to; a cap that is still in use is refused and tried higher."""
        isolator = self._dependencies.isolator
        whole = next(held.memory_bytes for held in instance.grants if held.id == grant.id)
        size = grant.memory_bytes
        while isinstance(isolator, Resizer) and size < whole:
            with suppress(ShareInUse):
                isolator.resize(grant, size)
                break
            size = min(2 * size, whole)
        return replace(grant, memory_bytes=size)


class Sleepers:
    """The caller holds the guard of the instance."""

    def __init__(self, dependencies: Dependencies, recorder: InstanceRecorder, in_place: InPlace, liveness: Liveness) -> None:
        self._recorder = recorder
        self._in_place = in_place
        self._liveness = liveness
        self._timing = dependencies.timing
        self._now = dependencies.effects.now

    def put_to_sleep(self, instance: Instance, emit: Emit) -> None:
        """In place where it can; else it is stopped."""
        if self._in_place.is_possible(instance):
            slots = tuple(Slot.of(grant) for grant in instance.grants)
            asleep = replace(instance, state=InstanceState.SLEEPING, awake_slots=slots, endpoint=None, percent=None)
            # The intent before the act, with everything still charged; after a crash the engine's own state decides.
            instance = self._recorder.record(asleep, emit)
            if self._settle(instance, emit):
                return
        self._recorder.unload(instance, emit)

    def adopt(self, instance: Instance, emit: Emit) -> None:
        """The engine reports whether it sleeps; one that fell asleep or woke while no daemon ran sleeps after this."""
        instance = self._recorder.record(instance, emit)
        if not self._in_place.is_possible(instance) or not self._settle(instance, emit):
            self._recorder.unload(instance, emit)

    def check(self, instance: Instance, emit: Emit) -> None:
        """One that is gone or silent stays asleep and holds nothing. One that another client woke is put to sleep again."""
        if not self._recorder.is_running(instance):
            reason = f"{self._recorder.death_reason(instance)}; the next request starts it again"
            self._recorder.unload(instance, emit, reason=reason)
            return
        now = self._now()
        if not self._liveness.is_due(instance.id, now, self._timing.ask_seconds):
            return
        state = self._in_place.ask_state(instance)
        silent_seconds = self._liveness.note(instance.id, now, answered=state in _ANSWERS)
        if silent_seconds > self._timing.silence_seconds:
            reason = f"it did not answer in its sleep for {silent_seconds:.0f} s and was stopped"
            self._recorder.unload(instance, emit, reason=reason)
        elif state is HealthState.READY and not self._settle(instance, emit):
            self._recorder.unload(instance, emit)

    def _settle(self, instance: Instance, emit: Emit) -> bool:
        """Make the engine sleep and record what it still holds. False: it did not, and must be stopped."""
        try:
            self._recorder.announce(self._in_place.put_to_sleep(instance), emit)
        except Cancelled:
            return True  # a release follows
        except (AimGpuError, OSError) as error:
            text = f"{instance.deployment} is stopped, it cannot sleep in place: {explain(error)}"
            emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))
            return False
        return True


def _check_worth(instance: Instance, measured: Mapping[str, int]) -> None:
    """Raises EngineFailed if the sleeping engine holds too much memory; it is then stopped instead."""
    expected = instance.sleep_footprint.device_bytes if instance.sleep_footprint else 0
    for grant in instance.grants:
        kept = measured.get(grant.device_id, 0)
        if kept > expected and 2 * kept > grant.memory_bytes:
            said = f"{format_bytes(kept)} of {format_bytes(grant.memory_bytes)}"
            raise EngineFailed(f"{instance.engine} still holds {said} on {grant.device_id} in its sleep")
