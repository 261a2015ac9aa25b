"""One instance in the ledger and on the machine: record it, announce it, stop it, free what it holds."""

from collections.abc import Callable
from dataclasses import replace

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.program_run import describe_end
from aimgpu.control.instance.run_folder import keep_failed_log
from aimgpu.control.waiting import note_failed
from aimgpu.domain import Instance, InstanceState, RunEnd
from aimgpu.engines.causes import PORT_TAKEN
from aimgpu.engines.protocols import Launcher
from aimgpu.errors import AimGpuError, EngineFailed, describe_os_error
from aimgpu.ledger import Retry

MakeRetry = Callable[[Retry | None], Retry]

_LINES_WITH_CAUSE = 300  # tracebacks of several processes may follow the line with the cause
_WHEN = {InstanceState.READY: "in use", InstanceState.SLEEPING: "while it slept"}


class InstanceRecorder:
    """What every step of an instance's life shares; the caller holds its guard."""

    def __init__(self, dependencies: Dependencies, changes: ChangeCounter) -> None:
        self._dependencies = dependencies
        self._changes = changes

    def record(self, instance: Instance, emit: Emit) -> Instance:
        self._dependencies.ledger.update(instance)
        self.announce(instance, emit)
        return instance

    def announce(self, instance: Instance, emit: Emit) -> None:
        """Its state as an event, and to those that wait for a change."""
        emit(state_event(instance))
        self._changes.notify()

    def launcher_of(self, instance: Instance) -> Launcher:
        return self._dependencies.launchers[instance.launcher]

    def is_running(self, instance: Instance) -> bool:
        return instance.process is not None and self.launcher_of(instance).is_running(instance.process)

    def drain(self, instance_id: str) -> None:
        left = self._dependencies.timing.drain_seconds
        while left > 0 and self._dependencies.in_flight(instance_id) > 0:
            self._dependencies.effects.pause(self._dependencies.timing.poll_seconds)
            left -= self._dependencies.timing.poll_seconds

    def stop(self, instance: Instance) -> None:
        launcher = self.launcher_of(instance)
        process = instance.process or launcher.find_started().get(instance.id)
        if process is not None:
            launcher.stop(process, grace_seconds=self._dependencies.timing.grace_seconds)

    def free(self, instance: Instance, *, keep: Instance | None, retry: MakeRetry | None = None) -> None:
        for grant in instance.grants:
            self._dependencies.isolator.release(grant)
        self._dependencies.ledger.release(instance.id, keep=keep, retry=retry)

    def fail(self, instance: Instance, reason: str, emit: Emit, *, gives_up: bool = False, counts: bool = True) -> Instance:
        """Stopped, its grant freed, and shown with its last lines; when it is tried again is recorded in the same write.

        `gives_up`: not before it is applied again. `counts`: with those before it; else it is tried again without end.
        """
        lines = self.launcher_of(instance).last_lines(self._dependencies.runs / instance.id)
        keep_failed_log(self._dependencies.runs, instance, lines)
        failed = replace(_ended(instance, InstanceState.FAILED, reason), last_lines=lines)

        def make_retry(known: Retry | None) -> Retry:
            effects = self._dependencies.effects
            told = Retry(deployment=instance.deployment, reason=reason, last_failure_ms=effects.wall_ms())
            return note_failed(known if counts else None, told, self._dependencies.timing, effects.jitter(), gives_up=gives_up)

        return self._end(failed, instance, emit, make_retry)

    def finish(self, instance: Instance, end: RunEnd, emit: Emit) -> Instance:
        """What is left of it is stopped, its grant freed; it stays shown as ended."""
        ended = replace(_ended(instance, InstanceState.ENDED, describe_end(end)), end=end)
        return self._end(ended, instance, emit)

    def unload(self, instance: Instance, emit: Emit, *, reason: str | None = None) -> None:
        """Stopped, its grant freed, and asleep: a request starts it again."""
        self._end(_ended(instance, InstanceState.SLEEPING, reason), instance, emit)

    def find_death(self, instance: Instance) -> EngineFailed:
        """Why its process ended, as an error that can be distinguished from others."""
        lines = self.launcher_of(instance).last_lines(self._dependencies.runs / instance.id, _LINES_WITH_CAUSE)
        # Once it has served, callers can write into its log: a grammar that does not parse is printed. Never quoted as a cause.
        said = self._dependencies.engines[instance.engine].failure_reason(lines) if instance.load_ms is None else None
        if said is None and instance.process is not None:
            said = self.launcher_of(instance).how_it_ended(instance.process)
        when = _WHEN.get(instance.state, "before it was ready")
        error = EngineFailed(f"{instance.engine} ended {when}" + (f": {said}" if said else ""))
        error.port_taken = said == PORT_TAKEN
        return error

    def death_reason(self, instance: Instance) -> str:
        """The same for people."""
        return self.find_death(instance).message

    def _end(self, ended: Instance, instance: Instance, emit: Emit, retry: MakeRetry | None = None) -> Instance:
        self.stop(instance)
        self.free(instance, keep=ended, retry=retry)
        ended = replace(ended, grants=())
        self.announce(ended, emit)
        return ended


def explain(error: AimGpuError | OSError) -> str:
    return error.message if isinstance(error, AimGpuError) else describe_os_error(error)


def state_event(instance: Instance) -> Event:
    text = instance.state.value if instance.reason is None else f"{instance.state}: {instance.reason}"
    data = {
        "instance": instance.id,
        "state": instance.state.value,
        "percent": instance.percent,
        "stage": instance.stage,
        "reason": instance.reason,
        "last_lines": list(instance.last_lines),
    }
    return Event(kind=EventKind.STATE, deployment=instance.deployment, text=text, data=data)


def _ended(instance: Instance, state: InstanceState, reason: str | None) -> Instance:
    return replace(instance, state=state, reason=reason, process=None, endpoint=None, percent=None, stage=None, awake_slots=())
