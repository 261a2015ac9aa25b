"""Programs: who gets room next, and noticing at once that one has ended.

A caller asks and waits here; its own process becomes the program. Those that wait are served by priority, then in the order in
which they came, one plan at a time. The first in line goes first even where a later one would fit: else a large one would
never get its turn. Ends are seen by pidfd, so that what a program held is free again at once and the next one comes to it.
"""

import asyncio
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from aimgpu import procfs
from aimgpu.control.controller import Controller
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.domain import Deployment, Instance, InstanceState, ProcessIdentity
from aimgpu.engines.launchers.process import ENVIRONMENT_NAME
from aimgpu.errors import AimGpuError, Conflict, EngineFailed, UnknownDeployment

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class _Place:
    deployment: Deployment
    order: tuple[int, int]  # priority, then age
    refused: bool = False  # at least once; else it may only be starting


class ProgramLine:
    """Those that ask for room for a program. Thread-safe; each asks in a thread of its own."""

    def __init__(self, controller: Controller, runs: Path) -> None:
        self._controller = controller
        self._runs = runs
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._tickets = itertools.count()

    def asking(self) -> frozenset[str]:
        """Names of the programs that wait or are being started."""
        with self._lock:
            return frozenset(self._places)

    def run(self, deployment: Deployment, wait_seconds: float, emit: Emit, *, named: bool, asker: ProcessIdentity) -> None:
        """Returns once it runs; raises where `asker` ends first. `named`: by its user, so it gets no other name instead."""
        with self._in_line(deployment, named=named) as place:
            started = self._place(place, wait_seconds, emit, asker)
            if started is not None:
                emit(_granted(self._runs, started))

    def _place(self, place: _Place, wait_seconds: float, emit: Emit, asker: ProcessIdentity) -> Instance | None:
        """Its instance; None where there is no room, which `emit` was told."""
        deployment, deadline = place.deployment, time.monotonic() + wait_seconds
        told = None
        while True:
            if not procfs.is_running(asker):
                raise EngineFailed(f"{deployment.name}: its caller ended before it got its grant")
            seen = self._controller.changes.version
            ahead = self._ahead_of(place, waits=time.monotonic() < deadline)
            reason = f"{ahead} of its priority or above {'waits' if ahead == 1 else 'wait'} for room before it"
            refused: list[Event] = []
            if not ahead:
                events: list[Event] = []
                if any(one.name == deployment.name for one in self._controller.deployments()):  # applied meanwhile
                    raise _taken(deployment)
                try:
                    result = self._controller.apply([deployment], emit=events.append)
                    if not result.plan.refusals:
                        return started_instance(deployment, result.instances)
                except BaseException:
                    self._forget(deployment)
                    raise
                place.refused = True
                refused = [event for event in events if event.kind is EventKind.PLAN]
                reason = "; ".join(refusal.summary for refusal in result.plan.refusals)
            left = deadline - time.monotonic()
            if left <= 0:
                if not refused:
                    raise Conflict(f"{deployment.name} has no room yet: {reason}", hint="`--wait` waits behind them.")
                for event in refused:
                    emit(event)
                return None
            if reason != told:
                told = reason
                emit(Event(kind=EventKind.STEP, deployment=deployment.name, text=f"{deployment.name} waits for room: {reason}"))
            self._controller.changes.wait(seen, min(_LOOK_SECONDS, left))

    def _forget(self, deployment: Deployment) -> None:
        """What did not start is not wanted any more: nobody waits for it."""
        program = deployment.overrides.program
        if any(one.name == deployment.name and one.overrides.program == program for one in self._controller.deployments()):
            with suppress(UnknownDeployment):
                self._controller.release([deployment.name])

    def _ahead_of(self, place: _Place, *, waits: bool) -> int:
        """Those before it in line. One that does not wait stands back only behind those that were refused."""
        with self._lock:
            return sum(other.order < place.order and (waits or other.refused) for other in self._places.values())

    @contextmanager
    def _in_line(self, deployment: Deployment, *, named: bool) -> Iterator[_Place]:
        with self._lock:
            taken = {*self._places, *(one.name for one in self._controller.deployments())}
            if named and deployment.name in taken:
                raise _taken(deployment)
            deployment = _named(deployment, taken)
            place = _Place(deployment=deployment, order=(-deployment.ask.priority.rank, next(self._tickets)))
            self._places[deployment.name] = place
        try:
            yield place
        finally:
            with self._lock:
                del self._places[deployment.name]
            self._controller.changes.notify()


def started_instance(deployment: Deployment, instances: Sequence[Instance]) -> Instance:
    """The first, which runs or has run. Raises EngineFailed: a caller must not start its program without the grant."""
    for one in instances:
        if one.state not in (InstanceState.READY, InstanceState.ENDED):
            reason = one.reason or f"it was stopped while it started ({one.state})"
            raise EngineFailed(f"{deployment.name} was not started: {reason}")
    if not instances:
        raise EngineFailed(f"{deployment.name} was not started: it was released")
    return instances[0]


def _taken(deployment: Deployment) -> Conflict:
    return Conflict(f"{deployment.name!r} runs already", hint="Choose another with --name.")


def _named(deployment: Deployment, taken: set[str]) -> Deployment:
    """With a number where the name is taken."""
    names = itertools.chain([deployment.name], (f"{deployment.name}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    return replace(deployment, name=name, model=name, ask=replace(deployment.ask, name=name, deployment=name))


def _granted(runs: Path, instance: Instance) -> Event:
    """With what its caller is to start it with; nothing where the daemon has started it."""
    environment = {}
    with suppress(FileNotFoundError):
        environment = json.loads((runs / instance.id / ENVIRONMENT_NAME).read_text())
    data = {"instance": instance.id, "environment": environment}
    return Event(kind=EventKind.GRANTED, deployment=instance.deployment, text=f"{instance.deployment} runs", data=data)


async def watch_programs(controller: Controller, line: ProgramLine, reconciled: asyncio.Event) -> None:
    """Until it is cancelled."""
    await reconciled.wait()
    loop = asyncio.get_running_loop()
    watched: dict[ProcessIdentity, int] = {}  # pidfds
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="programs")

    def ended(process: ProcessIdentity, name: str) -> None:
        descriptor = watched.pop(process)
        loop.remove_reader(descriptor)
        os.close(descriptor)
        _in_thread(controller, name)

    seen = -1
    try:
        while True:
            try:
                for process, name in _running(controller).items():
                    if process not in watched and (descriptor := _open(process)) is not None:
                        watched[process] = descriptor
                        loop.add_reader(descriptor, ended, process, name)
                for name in await loop.run_in_executor(thread, _left_over, controller, line.asking()):
                    _in_thread(controller, name)
            except (AimGpuError, OSError, RuntimeError):  # no thread or no file left to open: there may be at the next look
                log.exception("programs.not_looked_at")
                await asyncio.sleep(_LOOK_SECONDS)
            seen = await loop.run_in_executor(thread, controller.changes.wait, seen, _LOOK_SECONDS)
    finally:
        for descriptor in watched.values():
            loop.remove_reader(descriptor)
            os.close(descriptor)
        thread.shutdown(wait=False)


def _running(controller: Controller) -> dict[ProcessIdentity, str]:
    ready = (one for one in controller.instances() if one.is_program and one.state is InstanceState.READY)
    return {one.process: one.deployment for one in ready if one.process is not None}


def _left_over(controller: Controller, asking: frozenset[str]) -> list[str]:
    """Programs that ended unseen, as where no daemon ran; their callers cannot start them again."""
    programs = {one.name: one.overrides.program for one in controller.deployments() if one.overrides.program is not None}
    roots = {one.caller: name for name, one in programs.items() if one.caller is not None and name not in asking}
    return [name for process, name in {**roots, **_running(controller)}.items() if not procfs.is_running(process)]


def _open(process: ProcessIdentity) -> int | None:
    """Opened first, compared after: None where it has ended, which `_left_over` finds."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    if procfs.is_running(process):
        return descriptor
    os.close(descriptor)
    return None


def _in_thread(controller: Controller, name: str) -> None:
    """What is left of it is ended, which may take its grace period."""

    def note() -> None:
        try:
            controller.note_ended(name, emit=ignore)
        except UnknownDeployment:
            pass  # released meanwhile
        except AimGpuError as error:  # tried again at the next look
            log.warning("program.not_ended", extra={"data": {"program": name, "reason": error.message}})

    threading.Thread(target=note, name="program-ended", daemon=True).start()
