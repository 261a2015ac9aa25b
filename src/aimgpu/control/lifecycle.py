"""One instance's life: start, wait until ready, drain, stop. Every end frees its grant."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.parts import Parts
from aimgpu.control.plan import Prepared
from aimgpu.control.run_files import (
    RunRecord,
    prepare_run_directory,
    read_api_key,
    remove_run_directory,
)
from aimgpu.control.silence import Silences
from aimgpu.domain import Device, Instance, InstanceState, Partition, ProcessIdentity
from aimgpu.engines.protocols import Health, HealthState, Launcher, LaunchRequest
from aimgpu.errors import AimGpuError, EngineFailed, HardwareFailed, describe_os_error

_LINES_OF_A_START = 2000  # engines say there what they allocated
_LINES_WITH_CAUSE = 300  # tracebacks of several processes may follow the line that tells
_LISTS = {  # one entry a visible Device, and what stands between two
    "ROCR_VISIBLE_DEVICES": ",",
    "HIP_VISIBLE_DEVICES": ",",
    "CUDA_VISIBLE_DEVICES": ",",
    "NVIDIA_VISIBLE_DEVICES": ",",
    "AIMGPU_REGION": ":",
}


class Cancelled(Exception):
    """The instance was released while it was starting."""


class Lifecycle:
    """Acts on instances that are charged already; the controller decides which."""

    def __init__(self, parts: Parts, changed: threading.Condition) -> None:
        self._parts = parts
        self._changed = changed
        self._guards: dict[str, threading.Lock] = {}
        self._cancelled: dict[str, threading.Event] = {}
        self._tables = threading.Lock()
        self._silences = Silences()
        self._turns: dict[str, threading.Lock] = {}

    def start(self, instance: Instance, prepared: Prepared, emit: Emit) -> Instance:
        """Start a charged instance and wait for it; it comes back ready, or failed with its grant freed."""
        with self._guard(instance.id):
            try:
                with self._turn(instance):
                    instance = self._launch(instance, prepared, emit)
                    ready = self._wait_until_ready(instance, emit)
            except Cancelled:
                return replace(instance, state=InstanceState.ABSENT)
            except AimGpuError as error:
                return self._fail(instance, error.message, emit)
            except OSError as error:
                return self._fail(instance, describe_os_error(error), emit)
            self._parts.learn(ready, prepared.footprint, self._first_lines(ready))
            return ready

    def adopt(self, instance: Instance, process: ProcessIdentity, emit: Emit) -> Instance:
        """Take over one that an earlier daemon started."""
        with self._guard(instance.id):
            # One that was ready stays so while it is looked at: callers must not notice that the daemon was away.
            state = InstanceState.READY if instance.state is InstanceState.READY else InstanceState.LOADING
            instance = self._record(replace(instance, process=process, state=state), emit)
            try:
                return self._wait_until_ready(instance, emit)
            except Cancelled:
                return replace(instance, state=InstanceState.ABSENT)
            except AimGpuError as error:
                return self._fail(instance, error.message, emit)
            except OSError as error:
                return self._fail(instance, describe_os_error(error), emit)

    def cancel(self, instance: Instance) -> None:
        """Let whoever is starting it give up soon; a release must follow."""
        self._cancel(instance.id).set()

    def release(self, instance: Instance, emit: Emit, *, drain: bool = True) -> None:
        """Drain, stop, free. Whoever is starting it gives up first."""
        self._cancel(instance.id).set()
        with self._guard(instance.id):
            current = self._parts.ledger.instance(instance.id)
            if current is not None:
                if current.state not in (InstanceState.FAILED, InstanceState.DRAINING):
                    current = self._record(replace(current, state=InstanceState.DRAINING, percent=None), emit)
                if drain:
                    self._drain(current.id)
                self._stop(current)
                self._free(current, keep=None)
                remove_run_directory(self._parts.runs, current.id)
                self._tell(replace(current, state=InstanceState.ABSENT, grants=()), emit)
        with self._tables:
            self._guards.pop(instance.id, None)
            self._cancelled.pop(instance.id, None)
            self._silences.forget(instance.id)

    def sleep(self, instance: Instance, emit: Emit) -> bool:
        """Unload a ready instance; False where requests kept it busy, and then it serves on."""
        with self._guard(instance.id):
            current = self._parts.ledger.instance(instance.id)
            if current is None or current.state is not InstanceState.READY:
                return False
            current = self._record(replace(current, state=InstanceState.DRAINING), emit)
            self._drain(current.id)
            if self._parts.in_flight(current.id) > 0:
                self._record(replace(current, state=InstanceState.READY), emit)
                return False
            self._stop(current)
            asleep = replace(current, state=InstanceState.SLEEPING, process=None, endpoint=None, percent=None)
            self._free(current, keep=asleep)
            self._tell(replace(asleep, grants=()), emit)
            return True

    def check_alive(self, instance: Instance, emit: Emit) -> bool:
        """Whether a ready instance still runs and answers; one that does not is failed with its last lines, its grant freed."""
        guard = self._guard(instance.id)
        if not guard.acquire(blocking=False):
            return True  # somebody is busy with it
        try:
            current = self._parts.ledger.instance(instance.id)
            if current is None or current.state is not InstanceState.READY or current.process is None:
                return True
            if not self._launcher_of(current).is_running(current.process):
                self._fail(current, self._death_reason(current), emit)
                return False
            silent_seconds = self._ask_again(current)
            if silent_seconds <= self._parts.timing.silence_seconds:
                return True
            self._fail(current, f"{current.engine} runs, and has not answered for {silent_seconds:.0f} s", emit)
            return False
        finally:
            guard.release()

    def _ask_again(self, instance: Instance) -> float:
        """Seconds for which it has been silent; 0 where it is not its turn to be asked."""
        if not self._silences.is_due(instance.id, time.monotonic(), self._parts.timing.ask_seconds):
            return 0.0
        engine = self._parts.engines[instance.engine]
        health = engine.check_health(self._parts.runs / instance.id, read_api_key(self._parts.runs, instance.id) or "")
        answered = health.state in (HealthState.READY, HealthState.SLEEPING)
        return self._silences.note(instance.id, time.monotonic(), answered=answered)

    # --- starting ---

    def _launch(self, instance: Instance, prepared: Prepared, emit: Emit) -> Instance:
        self._check_cancelled(instance)
        engine = self._parts.engines[instance.engine]
        environment, nodes = self._surroundings(instance)
        memory = [self._find(grant.device_id, grant.partition_id)[1].memory_bytes for grant in instance.grants]
        local = self._parts.models.find(prepared.deployment.model)
        record = RunRecord(deployment=prepared.deployment, instance=instance)
        folder, key = prepare_run_directory(self._parts.runs, record)
        request = LaunchRequest(
            instance=instance,
            model_path=local.path if local else None,
            footprint=prepared.footprint,
            environment=environment,
            device_nodes=nodes,
            run_directory=folder,
            api_key=key,
            partition_memory_bytes=min(memory, default=None),
        )
        command = engine.command(request)
        self._check_cancelled(instance)
        instance = self._record(replace(instance, state=InstanceState.LOADING), emit)
        process = self._launcher_of(instance).start(instance.id, command, folder)
        return self._record(replace(instance, process=process), emit)

    @contextmanager
    def _turn(self, instance: Instance) -> Iterator[None]:
        """Engines that measure free memory as they start do so one after the other on each Device."""
        alone = self._parts.engines[instance.engine].starts_alone
        with ExitStack() as held:
            for device_id in sorted({grant.device_id for grant in instance.grants}) if alone else ():
                with self._tables:
                    turn = self._turns.setdefault(device_id, threading.Lock())
                while not turn.acquire(timeout=self._parts.timing.poll_seconds):
                    self._check_cancelled(instance)
                held.callback(turn.release)
            yield

    def _surroundings(self, instance: Instance) -> tuple[dict[str, str], tuple[str, ...]]:
        """Identity of each granted Partition and what isolation adds; refuses a Level below the one that was charged."""
        environment: dict[str, str] = {}
        nodes: list[str] = []
        for grant in instance.grants:
            device, partition = self._find(grant.device_id, grant.partition_id)
            identity = self._parts.hardware.identify(device, partition)
            enforcement = self._parts.isolator.enforce(grant, device, partition)
            if enforcement.level.rank < grant.level.rank:
                raise HardwareFailed(f"{grant.partition_id} can give {enforcement.level}, {grant.level} was granted")
            _join(environment, {**identity.environment, **enforcement.environment})
            nodes += identity.device_nodes
        return environment, tuple(dict.fromkeys(nodes))

    def _find(self, device_id: str, partition_id: str) -> tuple[Device, Partition]:
        for device in self._parts.hardware.read_devices():
            if device.id == device_id and (partition := device.partition(partition_id)) is not None:
                return device, partition
        raise HardwareFailed(f"{partition_id} is gone", hint="The layout of the device changed; apply the stack again.")

    def _wait_until_ready(self, instance: Instance, emit: Emit) -> Instance:
        engine = self._parts.engines[instance.engine]
        launcher = self._launcher_of(instance)
        folder = self._parts.runs / instance.id
        key = read_api_key(self._parts.runs, instance.id) or ""
        timing = self._parts.timing
        # By the clock: one question to a mute engine may itself take seconds.
        deadline = time.monotonic() + timing.load_timeout_seconds
        while True:
            if instance.process is None or not launcher.is_running(instance.process):
                raise EngineFailed(self._death_reason(instance))
            health = engine.check_health(folder, key)
            if health.state is HealthState.READY and health.endpoint:
                state = InstanceState.READY
                return self._record(replace(instance, state=state, endpoint=health.endpoint, percent=None), emit)
            if health.state is HealthState.BROKEN:
                raise EngineFailed(f"{instance.engine} cannot serve: {health.reason or 'it did not say why'}")
            instance = self._note_percent(instance, health, emit)
            if self._cancel(instance.id).wait(timing.poll_seconds):
                raise Cancelled
            if time.monotonic() >= deadline:
                raise EngineFailed(
                    f"{instance.engine} was not ready after {timing.load_timeout_seconds:g} s",
                    hint="Look at its log with `aimgpu logs`.",
                )

    def _first_lines(self, instance: Instance) -> tuple[str, ...]:
        return self._launcher_of(instance).last_lines(self._parts.runs / instance.id, count=_LINES_OF_A_START)

    def _note_percent(self, instance: Instance, health: Health, emit: Emit) -> Instance:
        if health.percent is None or health.percent == instance.percent:
            return instance
        changed = replace(instance, percent=health.percent)
        emit(state_event(changed))
        return changed

    # --- ending ---

    def _fail(self, instance: Instance, reason: str, emit: Emit) -> Instance:
        lines = self._launcher_of(instance).last_lines(self._parts.runs / instance.id)
        failed = replace(
            instance, state=InstanceState.FAILED, reason=reason, last_lines=lines, process=None, endpoint=None, percent=None
        )
        self._stop(instance)
        self._free(instance, keep=failed)
        failed = replace(failed, grants=())
        self._tell(failed, emit)
        return failed

    def _stop(self, instance: Instance) -> None:
        launcher = self._launcher_of(instance)
        process = instance.process or launcher.find_started().get(instance.id)
        if process is not None:
            launcher.stop(process, grace_seconds=self._parts.timing.grace_seconds)

    def _free(self, instance: Instance, *, keep: Instance | None) -> None:
        for grant in instance.grants:
            self._parts.isolator.release(grant)
        self._parts.ledger.release(instance.id, keep=keep)

    def _drain(self, instance_id: str) -> None:
        left = self._parts.timing.drain_seconds
        pause = threading.Event()
        while left > 0 and self._parts.in_flight(instance_id) > 0:
            pause.wait(self._parts.timing.poll_seconds)
            left -= self._parts.timing.poll_seconds

    def _death_reason(self, instance: Instance) -> str:
        lines = self._launcher_of(instance).last_lines(self._parts.runs / instance.id, _LINES_WITH_CAUSE)
        said = self._parts.engines[instance.engine].failure_reason(lines)
        if said is None and instance.process is not None:
            said = self._launcher_of(instance).how_it_ended(instance.process)
        when = "in use" if instance.state is InstanceState.READY else "before it was ready"
        return f"{instance.engine} ended {when}" + (f": {said}" if said else "")

    # --- bookkeeping ---

    def _record(self, instance: Instance, emit: Emit) -> Instance:
        self._parts.ledger.update(instance)
        self._tell(instance, emit)
        return instance

    def _tell(self, instance: Instance, emit: Emit) -> None:
        emit(state_event(instance))
        with self._changed:
            self._changed.notify_all()

    def _launcher_of(self, instance: Instance) -> Launcher:
        return self._parts.launchers[instance.launcher]

    def _guard(self, instance_id: str) -> threading.Lock:
        with self._tables:
            return self._guards.setdefault(instance_id, threading.Lock())

    def _cancel(self, instance_id: str) -> threading.Event:
        with self._tables:
            return self._cancelled.setdefault(instance_id, threading.Event())

    def _check_cancelled(self, instance: Instance) -> None:
        if self._cancel(instance.id).is_set():
            raise Cancelled


def _join(environment: dict[str, str], more: Mapping[str, str]) -> None:
    """An instance on several Devices sees all of them."""
    for name, value in more.items():
        before = environment.get(name, value)
        environment[name] = f"{before}{_LISTS[name]}{value}" if name in _LISTS and before != value else value


def state_event(instance: Instance) -> Event:
    text = instance.state.value if instance.reason is None else f"{instance.state}: {instance.reason}"
    data = {
        "instance": instance.id,
        "state": instance.state.value,
        "percent": instance.percent,
        "reason": instance.reason,
        "last_lines": list(instance.last_lines),
    }
    return Event(kind=EventKind.STATE, deployment=instance.deployment, text=text, data=data)
