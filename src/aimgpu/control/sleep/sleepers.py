"""Instances that sleep in place: how they get there, and whether they still do; one that cannot is stopped and sleeps so."""

import time
from dataclasses import replace

from aimgpu.control.dependencies import Timing
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.runs.cancellable import Cancelled
from aimgpu.control.runs.instance_recorder import InstanceRecorder, explain
from aimgpu.control.runs.liveness import Liveness
from aimgpu.control.sleep.in_place import InPlace
from aimgpu.domain import Instance, InstanceState, Slot
from aimgpu.engines.protocols import HealthState
from aimgpu.errors import AimGpuError

_ANSWERS = frozenset({HealthState.READY, HealthState.SLEEPING})


class Sleepers:
    """Whoever calls holds the guard of the instance."""

    def __init__(self, books: InstanceRecorder, in_place: InPlace, silences: Liveness, timing: Timing) -> None:
        self._books = books
        self._in_place = in_place
        self._silences = silences
        self._timing = timing

    def put_to_sleep(self, instance: Instance, emit: Emit) -> None:
        """In place where it can; else it is stopped."""
        if self._in_place.is_possible(instance):
            slots = tuple(Slot.of(grant) for grant in instance.grants)
            asleep = replace(instance, state=InstanceState.SLEEPING, awake_slots=slots, endpoint=None, percent=None)
            # The intent before the act, with everything still charged; a crash from here on is settled by what the engine says.
            instance = self._books.record(asleep, emit)
            if self._settle(instance, emit):
                return
        self._books.unload(instance, emit)

    def adopt(self, instance: Instance, emit: Emit) -> None:
        """The engine says whether it sleeps; one that fell asleep or woke while nobody kept the books sleeps after this."""
        instance = self._books.record(instance, emit)
        if not self._in_place.is_possible(instance) or not self._settle(instance, emit):
            self._books.unload(instance, emit)

    def check(self, instance: Instance, emit: Emit) -> None:
        """One that is gone or mute is not missed: it sleeps on, and holds nothing. One that somebody else woke sleeps again."""
        if not self._books.is_running(instance):
            reason = f"{self._books.death_reason(instance)}; the next request starts it again"
            self._books.unload(instance, emit, reason=reason)
            return
        now = time.monotonic()
        if not self._silences.is_due(instance.id, now, self._timing.ask_seconds):
            return
        state = self._in_place.ask_state(instance)
        silent_seconds = self._silences.note(instance.id, now, answered=state in _ANSWERS)
        if silent_seconds > self._timing.silence_seconds:
            reason = f"it did not answer in its sleep for {silent_seconds:.0f} s and was stopped"
            self._books.unload(instance, emit, reason=reason)
        elif state is HealthState.READY and not self._settle(instance, emit):
            self._books.unload(instance, emit)

    def _settle(self, instance: Instance, emit: Emit) -> bool:
        """Make the engine sleep and the books say what it still holds. False: it did not, and is to be stopped."""
        try:
            self._books.tell(self._in_place.put_to_sleep(instance), emit)
        except Cancelled:
            return True  # a release follows
        except (AimGpuError, OSError) as error:
            text = f"{instance.deployment} is stopped, it cannot sleep in place: {explain(error)}"
            emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))
            return False
        return True
