"""Finds places for deployments: prepares them, waits for other operations on them, plans and commits, one at a time.

Restarts that come at the same time are planned by one of them for all: one snapshot, one plan, one transaction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from aimgpu.control.apply import Applier, CommittedPlan
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.effects import Effects, Flag, Lock
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.plan.eviction import Resident
from aimgpu.control.plan.preparation import prepare
from aimgpu.control.plan.prepared import Prepared, revision_of
from aimgpu.control.plan.room import RoomRequest, plan_room
from aimgpu.control.plan.stack import carry_over, needs_work, plan_stack, plan_stack_with_queue, split_plan
from aimgpu.control.plan.steps import ControlState, Plan, changing_partitions
from aimgpu.control.plan.wake import Rivals, plan_wake
from aimgpu.control.reservations import DeploymentClaim, Reservations
from aimgpu.control.snapshots import Reading, SharedReading, snapshot_of
from aimgpu.control.stack.names import find_clash
from aimgpu.control.waiting import WaitingWakes
from aimgpu.domain import Deployment
from aimgpu.errors import AimGpuError, Conflict
from aimgpu.placement.preemption.eviction_sets import Limits

_LOOK_SECONDS = 0.2
_LEAST_TOGETHER = 2


# A plan with what was committed of it, or the operations to wait for before it is tried again.
Placed = tuple[Plan, CommittedPlan | None] | list[DeploymentClaim]


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingRestart:
    """One deployment that is prepared, and is to be placed again."""

    deployment: Deployment
    ready: Mapping[str, Prepared]
    emit: Emit
    done: Flag
    placed: Placed | None = None
    error: Exception | None = None

    def settle(self, place: Callable[[], Placed]) -> None:
        """Keep what `place` returns or raises, for the thread that waits for it."""
        try:
            self.placed = place()
        except Exception as error:  # noqa: BLE001 - raised again in that thread
            self.error = error
        self.done.set()

    def result(self) -> Placed:
        if self.error is not None:
            raise self.error
        if self.placed is None:
            raise RuntimeError(f"{self.deployment.name} was not placed")
        return self.placed


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One reading of the GPUs, and which layouts it was begun under."""

    reading: Reading
    layouts_version: int


class SharedPlanning:
    """Thread-safe. `lock` is the planning lock; `place` settles every one that it is given, with the lock held."""

    def __init__(
        self,
        effects: Effects,
        lock: Lock,
        read: Callable[[], GpuReading],
        place: Callable[[Sequence[WaitingRestart], GpuReading], None],
    ) -> None:
        self._lock = lock
        self._read = read
        self._place = place
        self._leading = effects.lock()  # held while the GPUs are read for all that wait
        self._waiting: list[WaitingRestart] = []
        self._waiting_lock = effects.lock()

    def plan(self, restart: WaitingRestart) -> Placed:
        """One thread reads the GPUs and plans for all that wait by then, the most urgent first; the others wait for it."""
        with self._waiting_lock:
            self._waiting.append(restart)
        with self._leading:
            if not restart.done.is_set():
                self._plan_all()
        return restart.result()

    def _plan_all(self) -> None:
        try:
            reading = self._read()
        except AimGpuError as error:
            self._settle(error)
            return
        with self._lock:
            self._place(self._take(), reading)

    def _settle(self, error: AimGpuError) -> None:
        for one in self._take():
            one.error = error
            one.done.set()

    def _take(self) -> list[WaitingRestart]:
        """The most urgent first."""
        with self._waiting_lock:
            taken, self._waiting = self._waiting, []
        return sorted(taken, key=lambda one: -one.deployment.ask.priority.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """What is to be placed, and how far that may go."""

    deployments: Sequence[Deployment]
    dry_run: bool = False
    prune: bool = False
    make_room: bool = False
    limits: Limits | None = None
    again: bool = False  # they are wanted already: nothing that a user asked for since is overruled


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParts:
    """What it works with; `lock` is the planning lock."""

    lifecycle: Lifecycle
    applier: Applier
    reservations: Reservations
    waking: WaitingWakes
    lock: Lock
    ending: Flag
    readings: SharedReading
    recent_preemptions: Callable[[], int]


class Placer:
    """Thread-safe. Nothing is locked while something is prepared, or while another operation is waited for."""

    def __init__(self, dependencies: Dependencies, parts: PlacerParts) -> None:
        self._dependencies = dependencies
        self._ledger = dependencies.ledger
        self._lifecycle = parts.lifecycle
        self._applier = parts.applier
        self._reservations = parts.reservations
        self._waking = parts.waking
        self._lock = parts.lock
        self._ending = parts.ending
        self._readings = parts.readings
        self._recent_preemptions = parts.recent_preemptions
        self._shared = SharedPlanning(dependencies.effects, parts.lock, self.read_gpus, self._place_restarts)

    def place(
        self, request: PlaceRequest, emit: Emit, planned: Callable[[], None] = lambda: None
    ) -> tuple[Plan, CommittedPlan | None]:
        """Prepares without holding anything up; what was changed or released meanwhile is prepared again."""
        follow = self.while_open(emit)
        ready: dict[str, Prepared] = {}
        while True:
            deployments = carry_over(request.deployments, self._ledger.deployments(), self._ledger.instances())
            for item in self._changed(deployments):
                if item.name not in ready or ready[item.name].deployment != item:
                    ready[item.name] = prepare(self._dependencies, item, follow, may_fetch=not request.dry_run)
            current = replace(request, deployments=deployments)
            if request.again and len(deployments) == 1:
                done = self._dependencies.effects.flag()
                found = self._shared.plan(WaitingRestart(deployment=deployments[0], ready=ready, emit=emit, done=done))
            else:
                reading = self.read_gpus()
                with self._lock:
                    found = self._try_to_place(current, ready, emit, reading)
            if isinstance(found, tuple):
                planned()
                return found
            self._wait_for(found)

    def place_waking(self, item: Prepared, residents: Sequence[Resident]) -> tuple[Plan, CommittedPlan | None]:
        while True:
            reading = self.read_gpus()
            with self._lock:
                self.check_open()
                self._check_wanted([item.deployment])
                claims = self._reservations.claims_on([item.name])
                if not claims and not self.is_stale(reading):
                    rivals = Rivals(
                        residents=residents,
                        least_residency_seconds=self._dependencies.timing.least_residency_seconds,
                        waited_seconds=self._waking.waited_seconds(item.name),
                        ahead=self._waking.ahead_of(item),
                    )
                    state = self.read_state(reading)
                    plan = plan_wake(item, state, rivals)
                    if plan.refusals:
                        self._waking.refused(item)
                    else:
                        self._waking.woken(item.name)
                    if plan.refusals or not plan.steps:
                        return plan, None
                    return plan, self._applier.commit(plan, state.snapshot)
            self._wait_for(claims)

    def read_gpus(self) -> GpuReading:
        """Without the lock: a driver may take long to answer, and what frees memory must not wait for it."""
        version = self._reservations.layouts_version
        return GpuReading(reading=self._readings.read(), layouts_version=version)

    def is_stale(self, reading: GpuReading) -> bool:
        """Whether a layout changed since it was begun."""
        return reading.layouts_version != self._reservations.layouts_version

    def read_state(self, reading: GpuReading) -> ControlState:
        """One snapshot per plan. The reading must not be stale."""
        return ControlState(
            wanted={deployment.name: deployment for deployment in self._ledger.deployments()},
            running=self._ledger.instances(),
            snapshot=self._reservations.apply_to(
                snapshot_of(self._dependencies, reading.reading, recent_preemptions=self._recent_preemptions())
            ),
        )

    def check_open(self) -> None:
        if self._ending.is_set():
            raise Conflict("the daemon is stopping", hint="Start it again with `aimgpu up`.")

    def while_open(self, emit: Emit) -> Emit:
        """Ends a preparation at its next sign of progress once the daemon is stopping."""

        def follow(event: Event) -> None:
            self.check_open()
            emit(event)

        return follow

    def _place_restarts(self, restarts: Sequence[WaitingRestart], reading: GpuReading) -> None:
        """Together where all fit and none depends on another, else one by one, so that one that does not fit stops no other."""
        with suppress(AimGpuError):
            self._place_together(restarts, reading)
        for one in restarts:
            if not one.done.is_set():
                request = PlaceRequest(deployments=[one.deployment], again=True)
                one.settle(partial(self._try_to_place, request, one.ready, one.emit, reading))

    def _place_together(self, restarts: Sequence[WaitingRestart], reading: GpuReading) -> None:
        self.check_open()
        chosen = {one.deployment.name: one for one in restarts if self._may_join(one)}
        if len(chosen) < _LEAST_TOGETHER or self.is_stale(reading):
            return
        state = self.read_state(reading)
        ready = [one.ready[name] for name, one in chosen.items()]
        plans = split_plan(plan_stack(ready, state, deployments=[one.deployment for one in chosen.values()]))
        if plans is None or plans.keys() != chosen.keys() or not all(plan.begins for plan in plans.values()):
            return
        committed = self._applier.commit_all(list(plans.values()), state.snapshot)
        for one, plan, operation in zip(chosen.values(), plans.values(), committed, strict=True):
            one.settle(partial(_announced, plan, operation, one.emit))

    def _may_join(self, restart: WaitingRestart) -> bool:
        """Whether nothing about it has to be waited for, prepared or refused first."""
        item = restart.deployment
        prepared = restart.ready.get(item.name)
        wanted = self._ledger.deployment(item.name) == item and prepared is not None and prepared.deployment == item
        return wanted and bool(self._changed([item])) and not self._reservations.claims_on([item.name])

    def _try_to_place(self, request: PlaceRequest, ready: Mapping[str, Prepared], emit: Emit, reading: GpuReading) -> Placed:
        """Or the claims of operations that must end first; none: a layout changes, or something must be prepared or read."""
        self.check_open()
        if request.again:
            self._check_wanted(request.deployments)
        claims = [] if request.dry_run else self._reservations.claims_on(item.name for item in request.deployments)
        if claims:
            self._supersede(claims, request)
            return claims
        changed = self._changed(request.deployments)
        unprepared = any(item.name not in ready or ready[item.name].deployment != item for item in changed)
        if unprepared or self.is_stale(reading):
            return []
        state = self.read_state(reading)
        _check_names(request, state)
        plan = self._plan([ready[item.name] for item in changed], request, state, emit)
        if plan.refusals and self._reservations.layouts_change and not request.dry_run:
            return []
        # What an instance that falls asleep still holds hides the room that is reserved behind it.
        needed = [] if request.dry_run else self._reservations.claims_for_room_on(changing_partitions(plan.steps))
        if needed:
            return needed
        _emit_plan(plan, emit)
        if plan.refusals or request.dry_run:
            return plan, None
        return plan, self._applier.commit(plan, state.snapshot)

    def _plan(self, ready: Sequence[Prepared], request: PlaceRequest, state: ControlState, emit: Emit) -> Plan:
        keeps_queue = not (request.again or request.make_room)
        plan = (plan_stack_with_queue if keeps_queue else plan_stack)(
            ready, state, deployments=request.deployments, prune=request.prune
        )
        if not plan.refusals or not request.make_room:
            return plan
        names = {item.name for item in request.deployments}
        pruned = tuple(name for name in state.wanted if request.prune and name not in names)
        room = RoomRequest(prepared=ready, deployments=request.deployments, pruned=pruned, limits=request.limits)
        return plan_room(room, state, lambda item: prepare(self._dependencies, item, emit, may_fetch=False))

    def _check_wanted(self, deployments: Iterable[Deployment]) -> None:
        for deployment in deployments:
            if self._ledger.deployment(deployment.name) != deployment:
                raise Conflict(f"{deployment.name} was released or changed meanwhile")

    def _changed(self, deployments: Sequence[Deployment]) -> list[Deployment]:
        wanted = {deployment.name: deployment for deployment in self._ledger.deployments()}
        return [
            item
            for item in deployments
            if needs_work(item, wanted, [one for one in self._ledger.instances() if one.deployment == item.name])
        ]

    def _supersede(self, claims: Iterable[DeploymentClaim], request: PlaceRequest) -> None:
        """An older operation for the same deployment gives up, unless it leads to the same."""
        wanted = {item.name: item for item in request.deployments}
        for claim in claims:
            item = wanted[claim.name]
            if not request.again and (revision_of(item), item.replicas) != (claim.revision, claim.replicas):
                claim.superseded.set()
                for instance_id in claim.starting:
                    self._lifecycle.cancel(instance_id)

    def _wait_for(self, claims: Sequence[DeploymentClaim]) -> None:
        for claim in claims:
            while not claim.ended.wait(_LOOK_SECONDS):
                self.check_open()
        if not claims:
            self._reservations.wait_for_layouts(_LOOK_SECONDS)


def _emit_plan(plan: Plan, emit: Emit) -> None:
    emit(Event(kind=EventKind.PLAN, text=f"{len(plan.steps)} steps", data=plan.to_json()))


def _announced(plan: Plan, operation: CommittedPlan, emit: Emit) -> Placed:
    with suppress(Exception):  # it is committed: it must be carried out
        _emit_plan(plan, emit)
    return plan, operation


def _check_names(request: PlaceRequest, state: ControlState) -> None:
    """Raises Conflict where a caller could not tell two models apart."""
    names = {item.name for item in request.deployments}
    beside = () if request.prune else [item for name, item in state.wanted.items() if name not in names]
    clash = find_clash([*beside, *request.deployments])
    if clash is not None:
        raise Conflict(clash.text, hint=clash.hint)
