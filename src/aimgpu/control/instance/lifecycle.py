"""One instance's life: start, wait until ready, drain, stop. Every end frees its grant."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Dependencies, Timing
from aimgpu.control.effects import Flag, Lock, Mutex
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.cancellable import Cancelled, call_cancellable
from aimgpu.control.instance.in_place import InPlace, Sleepers
from aimgpu.control.instance.launch_environment import find_partition, make_launch_environment, set_limits
from aimgpu.control.instance.liveness import Liveness
from aimgpu.control.instance.more_room import ChargeMore, give_more_room, read_missing_bytes
from aimgpu.control.instance.program_run import describe_end, is_started_again, note_run
from aimgpu.control.instance.recorder import InstanceRecorder, explain
from aimgpu.control.instance.run_folder import (
    RunRecord,
    prepare_run_directory,
    read_api_key,
    remove_left_run_directories,
    remove_run_directory,
)
from aimgpu.control.instance.start_times import expected_seconds, note_start
from aimgpu.control.plan.prepared import Prepared
from aimgpu.domain import Device, Footprint, Instance, InstanceState, ProcessIdentity
from aimgpu.engines.overrides import with_overrides
from aimgpu.engines.ownership import EngineOwner, expecting
from aimgpu.engines.protocols import Fetcher, Health, HealthState, LaunchRequest, OtherWays, ServerEngine
from aimgpu.errors import AimGpuError, Conflict, EngineFailed, StrangerListens
from aimgpu.sizing.surplus import spend_surplus

_PORT_TRIES = 3
_ROOM_TRIES = 4  # starts with more memory each time, the first included
_LINES_OF_A_START = 2000  # engines log there what they allocated
_POLL_SHARE = 0.1  # of the time that an engine has loaded for
_LONGEST_POLL_SECONDS = 1.0
_ASKED_AT_FULL_RATE = 20  # instances
_COMPUTING_AT_ONCE = 2  # starts
_LONGEST_TURN_SECONDS = 0.5
_LONGEST_READING_SECONDS = 90.0  # of the GPUs; each driver has a bound of its own below that
_POLLED_AT_FULL_RATE = 4  # instances that load
_STOPPED = (InstanceState.FAILED, InstanceState.ENDED)


class Lifecycle:
    """Acts on instances that are charged already; the controller decides which."""

    def __init__(self, dependencies: Dependencies, changes: ChangeCounter, charge_more: ChargeMore) -> None:
        self._dependencies = dependencies
        self._charge_more = charge_more
        self._recorder = InstanceRecorder(dependencies, changes)
        self._effects = dependencies.effects
        self._guards: dict[str, Mutex] = {}
        self._cancelled: dict[str, Flag] = {}
        self._tables = self._effects.lock()
        self._leaving = self._effects.flag()
        self._liveness = Liveness()
        self._computing = self._effects.permits(_COMPUTING_AT_ONCE)
        self._turns: dict[str, Lock] = {}
        self._in_place = InPlace(dependencies, self._check_still_there)
        self._sleepers = Sleepers(dependencies, self._recorder, self._in_place, self._liveness)

    def start(self, instance: Instance, prepared: Prepared, emit: Emit, *, gives_up: bool = False) -> Instance:
        """Start a charged instance and wait for it; it comes back ready, or failed with its grant freed.

        `gives_up`: one that fails is not tried again by itself.
        """
        with self._guard(instance.id):
            return self._start(instance, prepared, emit, gives_up=gives_up)

    def wake(self, instance: Instance, prepared: Prepared, emit: Emit) -> Instance:
        """Let one that sleeps in place serve again; its grants are whole again. One that does not wake is restarted."""
        with self._guard(instance.id):
            began = self._effects.now()
            self._recorder.announce(instance, emit)
            try:
                endpoint = self._wait_until_ready(instance, emit)
            except Cancelled:
                return replace(instance, state=InstanceState.ABSENT)
            except (AimGpuError, OSError) as error:
                text = f"{instance.deployment} did not wake ({explain(error)}) and is started again"
                emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))
                return self._start(instance, prepared, emit)
            return self._recorder.record(_ready(instance, endpoint, wake_ms=self._milliseconds_since(began)), emit)

    def adopt(self, instance: Instance, process: ProcessIdentity, emit: Emit) -> Instance:
        """Take over one that an earlier daemon started."""
        with self._guard(instance.id):
            if self._dependencies.ledger.instance(instance.id) is None:
                return replace(instance, state=InstanceState.ABSENT)  # released meanwhile
            if instance.state is InstanceState.SLEEPING:
                self._sleepers.adopt(replace(instance, process=process), emit)
                return self._dependencies.ledger.instance(instance.id) or replace(instance, state=InstanceState.ABSENT)
            # One that was ready stays so while it is checked: callers must not notice that the daemon was away.
            state = InstanceState.READY if instance.state is InstanceState.READY else InstanceState.LOADING
            instance = self._recorder.record(replace(instance, process=process, state=state), emit)
            set_limits(self._dependencies.isolator, instance)
            try:
                endpoint = self._wait_until_ready(instance, emit)
            except Cancelled:
                return replace(instance, state=InstanceState.ABSENT)
            except (AimGpuError, OSError) as error:
                return self._recorder.fail(instance, explain(error), emit)
            return self._recorder.record(_ready(instance, endpoint), emit)

    @contextmanager
    def holding_all(self, instances: Iterable[Instance]) -> Iterator[None]:
        """Nothing else is done to these ready instances meanwhile. Raises Conflict where something is."""
        with ExitStack() as held:
            for instance in instances:
                guard = self._guard(instance.id)
                if not guard.acquire(blocking=False):
                    reason = f"{instance.id} is being started, put to sleep or stopped"
                    raise Conflict(reason, hint="Try again when it is ready.")
                held.callback(guard.release)
            yield

    def leave(self) -> None:
        """Starts and wakes give up soon and leave things as they are: the next daemon goes on with them."""
        self._leaving.set()

    @property
    def is_leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leaving.is_set()

    def cancel(self, instance_id: str) -> None:
        """Make its start give up soon; a release must follow."""
        self._cancel(instance_id).set()

    def release(self, instance: Instance, emit: Emit, *, drain: bool = True) -> None:
        """Drain, stop, free. A start of it gives up first."""
        self._cancel(instance.id).set()
        with self._guard(instance.id):
            current = self._dependencies.ledger.instance(instance.id)
            if current is not None:
                note_run(self._dependencies, current)
                if current.state not in (*_STOPPED, InstanceState.DRAINING):
                    current = self._recorder.record(replace(current, state=InstanceState.DRAINING, percent=None), emit)
                if current.state not in _STOPPED:
                    if drain:
                        self._recorder.drain(current.id)
                    self._recorder.stop(current)
                self._recorder.free(current, keep=None)
                remove_run_directory(self._dependencies.runs, current.id)
                self._recorder.announce(replace(current, state=InstanceState.ABSENT, grants=()), emit)
            else:
                remove_run_directory(self._dependencies.runs, instance.id)
        with self._tables:
            self._guards.pop(instance.id, None)
            self._cancelled.pop(instance.id, None)
            self._liveness.forget(instance.id)

    def remove_left_folders(self) -> None:
        """Run folders of instances that are gone: what was killed between two steps of a release leaves one."""
        ledger = self._dependencies.ledger
        remove_left_run_directories(self._dependencies.runs, lambda: {one.id for one in ledger.instances()})

    def drop_cancelled(self, instance: Instance, emit: Emit) -> None:
        """After `cancel`, once its start has given up."""
        if not self._leaving.is_set():
            self.release(instance, emit, drain=False)

    def preempt(self, instance: Instance, reason: str, emit: Emit) -> None:
        """Drain, stop and free it for others; it stays registered as asleep, with the reason."""
        self._cancel(instance.id).set()
        with self._guard(instance.id):
            current = self._dependencies.ledger.instance(instance.id)
            if current is not None:
                current = self._recorder.record(replace(current, state=InstanceState.DRAINING, percent=None), emit)
                self._recorder.drain(current.id)
                self._recorder.unload(current, emit, reason=reason)
                self._cancel(instance.id).clear()

    def announce(self, instance: Instance, emit: Emit) -> None:
        """Its state, to followers of the operation and to the gateway."""
        self._recorder.announce(instance, emit)

    def sleep(self, instance: Instance, emit: Emit, *, forced: bool = False) -> bool:
        """Unload a ready instance; False where requests kept it busy, and then it serves on unless `forced`."""
        with self._guard(instance.id):
            current = self._dependencies.ledger.instance(instance.id)
            if current is None or current.state is not InstanceState.READY:
                return False
            current = self._recorder.record(replace(current, state=InstanceState.DRAINING), emit)
            self._recorder.drain(current.id)
            self._cancel(current.id).wait(self._dependencies.timing.quiet_seconds)
            if self._dependencies.in_flight(current.id) == 0:
                self._sleepers.put_to_sleep(current, emit)
            elif forced:
                self._recorder.unload(current, emit)
            else:
                self._recorder.record(replace(current, state=InstanceState.READY), emit)
                return False
            return True

    def unload(self, instance: Instance, emit: Emit) -> None:
        """End the process of one that sleeps in place; it stays asleep, holds nothing, and takes longer to wake."""
        with self._guard(instance.id):
            current = self._dependencies.ledger.instance(instance.id)
            if current is not None and current.state is InstanceState.SLEEPING:
                self._recorder.unload(current, emit)

    def check_alive(self, instance: Instance, emit: Emit) -> str | None:
        """Why a ready instance no longer runs or answers, None where it does; it is failed, and its grant freed.

        One that sleeps in place and is gone holds nothing any more and stays asleep.
        """
        guard = self._guard(instance.id)
        if not guard.acquire(blocking=False):
            return None  # another operation acts on it
        try:
            current = self._dependencies.ledger.instance(instance.id)
            if current is not None and current.sleeps_in_place:
                with suppress(AimGpuError, OSError):  # it is asked again: what others were found to be counts all the same
                    self._sleepers.check(current, emit)
            elif current is not None and current.state is InstanceState.READY and current.process is not None:
                if current.is_program:  # one that is stopped by Ctrl-Z is as its user wants it
                    return None if self._recorder.is_running(current) else self._end(current, emit)
                trouble = self._find_trouble(current)
                if trouble is not None:
                    self._recorder.fail(current, trouble, emit)
                return trouble
            return None
        finally:
            guard.release()

    def end(self, instance: Instance, emit: Emit) -> str | None:
        """Record that a program ended, and free its grant. Why it is started again; None where it is not."""
        with self._guard(instance.id):
            return self._end(instance, emit)

    def _end(self, instance: Instance, emit: Emit) -> str | None:
        deployment = self._dependencies.ledger.deployment(instance.deployment)
        end = note_run(self._dependencies, instance)
        if is_started_again(deployment, end):
            trouble = describe_end(end)
            self._recorder.fail(instance, trouble, emit, counts=end.exit_code != 0)
            return trouble
        self._recorder.finish(instance, end, emit)
        return None

    def is_due(self, instance: Instance) -> bool:
        """Whether its engine is to be asked again, beyond looking whether its process runs."""
        return self._liveness.is_due(instance.id, self._effects.now(), self._ask_seconds())

    def is_running(self, instance: Instance) -> bool:
        """Whether its process runs; costs one look into /proc."""
        return self._recorder.is_running(instance)

    def is_idle(self, instance_id: str) -> bool:
        """Whether nothing starts, stops or adopts it now."""
        return not self._guard(instance_id).locked()

    def _ask_seconds(self) -> float:
        """Between two questions to a ready engine; longer with many, so that asking costs the same whatever their number."""
        timing = self._dependencies.timing
        return timing.ask_seconds * max(1.0, len(self._dependencies.ledger.instances()) / _ASKED_AT_FULL_RATE)

    def _find_trouble(self, instance: Instance) -> str | None:
        if not self._recorder.is_running(instance):
            return self._recorder.death_reason(instance)
        if instance.process is not None and self._effects.is_stopped(instance.process.pid):
            return f"{instance.engine} was stopped by a signal, and answers nothing"
        try:
            silent_seconds = self._ask_again(instance)
        except Cancelled:
            return None  # a release follows
        except (AimGpuError, OSError) as error:
            return explain(error)
        if silent_seconds <= self._dependencies.timing.silence_seconds:
            return None
        return f"{instance.engine} runs, and has not answered for {silent_seconds:.0f} s"

    def _ask_again(self, instance: Instance) -> float:
        """Seconds for which it has been silent; 0 where it is not due to be asked."""
        if not self.is_due(instance):
            return 0.0
        engine = self._dependencies.engines[instance.engine]
        runs = self._dependencies.runs
        with expecting(EngineOwner.of(instance)):
            health = engine.check_health(runs / instance.id, read_api_key(runs, instance.id) or "")
        if health.state is HealthState.SLEEPING and self._in_place.can_wake(instance):
            self._in_place.wake(instance)  # another client put it to sleep: the ledger and the gateway count on it
        answered = health.state in (HealthState.READY, HealthState.SLEEPING)
        return self._liveness.note(instance.id, self._effects.now(), answered=answered)

    # --- starting ---

    def _start(self, instance: Instance, prepared: Prepared, emit: Emit, *, gives_up: bool = False) -> Instance:
        try:
            if instance.process is not None:  # it did not wake
                self._recorder.stop(instance)
            instance = replace(instance, process=None, awake_slots=())
            if seconds := expected_seconds(self._dependencies.runs, instance):
                text = f"{instance.deployment}: starts in about {seconds} s, as the last time"
                emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))
            ready, footprint = self._start_with_room(instance, prepared, emit)
        except Cancelled:
            return replace(instance, state=InstanceState.ABSENT)
        except (AimGpuError, OSError) as error:
            known = self._dependencies.ledger.instance(instance.id) or instance
            return self._recorder.fail(known, explain(error), emit, gives_up=gives_up)
        if ready.is_program:
            return ready
        note_start(self._dependencies.runs, ready)
        self._dependencies.learn(ready, footprint, self._first_lines(ready))
        return ready

    def _start_with_room(self, instance: Instance, prepared: Prepared, emit: Emit) -> tuple[Instance, Footprint]:
        """An engine that dies at its memory limit while it starts is started again with more, as far as the GPU has it."""
        for tries_left in reversed(range(_ROOM_TRIES)):
            with self._few_at_once():
                request = self._make_request(instance, prepared)
            instance = self._fetch(request.instance, request, emit)
            try:
                with self._turn(instance):
                    began = self._effects.now()
                    launched, endpoint = self._launch_until_ready(instance, request, emit)
                ready = _ready(launched, endpoint, load_ms=self._milliseconds_since(began))
                if ready.is_program:
                    ready = replace(ready, began_ms=self._effects.wall_ms())
                return self._recorder.record(ready, emit), request.footprint
            except EngineFailed as failure:
                missing = read_missing_bytes(self._dependencies, instance)
                if missing is None or not tries_left or not instance.grants:
                    raise
                self._recorder.stop(instance)
                instance, prepared, text = give_more_room(
                    self._dependencies, self._charge_more, instance, prepared, missing, failure
                )
                emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))
        raise AssertionError  # the last try returns or raises

    def _make_request(self, instance: Instance, prepared: Prepared) -> LaunchRequest:
        self._check_cancelled(instance)
        devices = self._read_devices(instance)
        prepared_launch = make_launch_environment(self._dependencies, instance, devices)
        granted = min((grant.memory_bytes for grant in prepared_launch.grants), default=0)
        footprint = spend_surplus(prepared.footprint, granted)
        instance = replace(
            instance,
            grants=prepared_launch.grants,
            concurrency=footprint.concurrency,
            kv_tokens=footprint.kv_tokens,
            kv_cache_bytes=footprint.term_bytes("kv_cache"),
            context_tokens=footprint.context_tokens,
            sized_bytes=footprint.total_bytes,
            in_host_memory=footprint.in_host_memory,
        )
        self._dependencies.ledger.note_enforcement(*instance.grants)
        partitions = [find_partition(devices, one.device_id, one.partition_id)[1] for one in instance.grants]
        local = self._dependencies.models.find(prepared.deployment.model)
        record = RunRecord(deployment=prepared.deployment, instance=instance)
        folder, key = prepare_run_directory(self._dependencies.runs, record)
        return LaunchRequest(
            instance=instance,
            model_path=local.path if local else None,
            footprint=footprint,
            overrides=prepared.deployment.overrides,
            environment=prepared_launch.environment,
            device_nodes=prepared_launch.device_nodes,
            control_group=prepared_launch.control_group,
            run_directory=folder,
            api_key=key,
            partition_memory_bytes=min((partition.memory_bytes for partition in partitions), default=None),
            may_sleep=instance.sleep_footprint is not None,
            prepared=prepared.deployment.prepared,
        )

    def _read_devices(self, instance: Instance) -> tuple[Device, ...]:
        """A release does not wait for a driver that does not answer."""
        found: list[Device] = []
        call_cancellable(
            lambda: found.extend(self._dependencies.hardware.read_devices()),
            lambda: self._check_cancelled(instance),
            poll_seconds=self._dependencies.timing.poll_seconds,
            bound_seconds=_LONGEST_READING_SECONDS,
            effects=self._effects,
        )
        return tuple(found)

    def _fetch(self, instance: Instance, request: LaunchRequest, emit: Emit) -> Instance:
        """What its launcher must bring first, such as an image; a release ends that too."""
        launcher = self._recorder.launcher_of(instance)
        if not isinstance(launcher, Fetcher):
            return instance
        command = with_overrides(self._dependencies.engines[instance.engine].command(request), request.overrides)
        reported = instance

        def report(percent: int | None) -> None:
            nonlocal reported
            reason = f"fetching the image {command.image}" if launcher.brings_engines else f"importing {instance.engine}"
            if reported.reason is None:
                emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=f"{instance.deployment}: {reason}"))
            if reported.reason is None or percent != reported.percent:
                reported = self._recorder.record(
                    replace(reported, state=InstanceState.LOADING, percent=percent, reason=reason), emit
                )

        launcher.fetch(command, request.run_directory, report, lambda: self._check_cancelled(instance))
        return replace(reported, percent=None, reason=None)

    def _launch_until_ready(self, instance: Instance, request: LaunchRequest, emit: Emit) -> tuple[Instance, str]:
        """Tries again where another program was quicker to take the port, or where it can be started in another way."""
        for _ in range(_PORT_TRIES - 1):
            launched = self._launch(instance, request, emit)
            try:
                return launched, self._wait_until_ready(launched, emit)
            except StrangerListens:
                raise  # however it is started, somebody waits for its port
            except EngineFailed as error:
                if not error.port_taken and not self._may_start_otherwise(launched):
                    raise
                self._recorder.stop(launched)
        launched = self._launch(instance, request, emit)
        return launched, self._wait_until_ready(launched, emit)

    def _may_start_otherwise(self, instance: Instance) -> bool:
        """Want of memory is not a fault of the way in which it was started."""
        launcher = self._recorder.launcher_of(instance)
        return (
            isinstance(launcher, OtherWays)
            and instance.process is not None
            and read_missing_bytes(self._dependencies, instance) is None
            and launcher.start_otherwise(instance.process)
        )

    def _launch(self, instance: Instance, request: LaunchRequest, emit: Emit) -> Instance:
        # Only now: a port that was chosen long ago may have been taken since.
        command = with_overrides(self._dependencies.engines[instance.engine].command(request), request.overrides)
        command = replace(command, control_group=request.control_group)
        with self._few_at_once():
            self._check_cancelled(instance)
            instance = self._recorder.record(replace(instance, state=InstanceState.LOADING), emit)
            process = self._recorder.launcher_of(instance).start(instance.id, command, request.run_directory)
            return self._recorder.record(replace(instance, process=process), emit)

    @contextmanager
    def _few_at_once(self) -> Iterator[None]:
        """Threads that compute at the same time all compete with the one that answers callers; one that hangs is passed by."""
        mine = self._computing.acquire(timeout=_LONGEST_TURN_SECONDS)
        try:
            yield
        finally:
            if mine:
                self._computing.release()

    @contextmanager
    def _turn(self, instance: Instance) -> Iterator[None]:
        """Engines that measure free memory as they start do so one after the other on each device."""
        alone = self._dependencies.engines[instance.engine].starts_alone
        with ExitStack() as held:
            for device_id in sorted({grant.device_id for grant in instance.grants}) if alone else ():
                with self._tables:
                    turn = self._turns.setdefault(device_id, self._effects.lock())
                while not turn.acquire(timeout=self._dependencies.timing.poll_seconds):
                    self._check_cancelled(instance)
                held.callback(turn.release)
            yield

    def _wait_until_ready(self, instance: Instance, emit: Emit) -> str:
        """Its endpoint, once it serves; one that is asleep is woken first, once."""
        if instance.is_program:
            return ""  # that it ended meanwhile is noticed as at any later time
        engine = self._dependencies.engines[instance.engine]
        folder = self._dependencies.runs / instance.id
        key = read_api_key(self._dependencies.runs, instance.id) or ""
        timing = self._dependencies.timing
        own = engine.ready_seconds(folder) if isinstance(engine, ServerEngine) else None
        longest = own or timing.load_timeout_seconds
        # By the clock: one question to a mute engine may itself take seconds.
        began = self._effects.now()
        woken = False
        while True:
            if not self._recorder.is_running(instance):
                raise self._recorder.find_death(instance)
            with expecting(EngineOwner.of(instance)):
                health = engine.check_health(folder, key)
            if health.state is HealthState.READY and health.endpoint:
                return health.endpoint
            if health.state is HealthState.SLEEPING and self._in_place.can_wake(instance):
                if woken:
                    raise EngineFailed(f"{instance.engine} still sleeps after it was woken")
                self._in_place.wake(instance)
                woken = True
                continue
            if health.state is HealthState.BROKEN:
                raise EngineFailed(f"{instance.engine} cannot serve: {health.reason or 'no reason given'}")
            instance = self._note_percent(instance, health, emit)
            self._cancel(instance.id).wait(_pause_seconds(timing, self._effects.now() - began, self._loading()))
            self._check_cancelled(instance)
            if self._effects.now() >= began + longest:
                raise EngineFailed(
                    f"{instance.engine} was not ready after {longest:g} s{f': {health.reason}' if health.reason else ''}",
                    hint="Look at its log with `aimgpu logs`.",
                    page_hint="Look at its log.",
                )

    def _milliseconds_since(self, moment: float) -> int:
        return max(1, round((self._effects.now() - moment) * 1000))

    def _loading(self) -> int:
        """How many load now."""
        return sum(one.state is InstanceState.LOADING for one in self._dependencies.ledger.instances())

    def _first_lines(self, instance: Instance) -> tuple[str, ...]:
        return self._recorder.launcher_of(instance).last_lines(self._dependencies.runs / instance.id, count=_LINES_OF_A_START)

    def _note_percent(self, instance: Instance, health: Health, emit: Emit) -> Instance:
        percent = instance.percent if health.percent is None else health.percent
        stage = health.stage or instance.stage
        if (percent, stage) == (instance.percent, instance.stage):
            return instance
        noted = replace(instance, percent=percent, stage=stage)
        self._dependencies.ledger.note(noted)
        self._recorder.announce(noted, emit)
        return noted

    # --- one at a time ---

    def _guard(self, instance_id: str) -> Mutex:
        with self._tables:
            return self._guards.setdefault(instance_id, self._effects.lock())

    def _cancel(self, instance_id: str) -> Flag:
        with self._tables:
            return self._cancelled.setdefault(instance_id, self._effects.flag())

    def _check_cancelled(self, instance: Instance) -> None:
        if self._cancel(instance.id).is_set() or self._leaving.is_set():
            raise Cancelled

    def _check_still_there(self, instance: Instance) -> None:
        self._check_cancelled(instance)
        if not self._recorder.is_running(instance):
            raise self._recorder.find_death(instance)


def _ready(instance: Instance, endpoint: str, *, load_ms: int | None = None, wake_ms: int | None = None) -> Instance:
    return replace(
        instance,
        state=InstanceState.READY,
        endpoint=endpoint,
        percent=None,
        stage=None,
        reason=None,
        awake_slots=(),
        load_ms=load_ms or instance.load_ms,
        wake_ms=wake_ms or instance.wake_ms,
    )


def _pause_seconds(timing: Timing, waited_seconds: float, loading: int) -> float:
    """Long loads are looked at less often, and many less often than few: they must not take the time of those that serve."""
    pause = timing.poll_seconds * max(1.0, loading / _POLLED_AT_FULL_RATE)
    return min(max(pause, waited_seconds * _POLL_SHARE), _LONGEST_POLL_SECONDS)
