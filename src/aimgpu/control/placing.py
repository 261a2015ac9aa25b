"""Finds places for deployments: prepares them, waits for other operations on them, plans and commits, one at a time."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.lifecycle.lifecycle import Lifecycle
from aimgpu.control.operations.applier import Applier, CommittedPlan
from aimgpu.control.operations.reservations import DeploymentClaim, Reservations
from aimgpu.control.operations.wakes import WaitingWakes
from aimgpu.control.planning.plan import ControlState, Plan
from aimgpu.control.planning.preparation import prepare
from aimgpu.control.planning.prepared import Prepared, revision_of
from aimgpu.control.planning.resize_carryover import carry_over
from aimgpu.control.planning.room_plan import RoomRequest, plan_room
from aimgpu.control.planning.split_plan import split_plan
from aimgpu.control.planning.stack_plan import needs_work, plan_stack, plan_stack_with_queue
from aimgpu.control.planning.steps import changing_partitions
from aimgpu.control.planning.wake_plan import Rivals, plan_wake
from aimgpu.control.shared_planning import Placed, SharedPlanning, WaitingRestart
from aimgpu.control.sleep.eviction_policy import Resident
from aimgpu.domain import Deployment
from aimgpu.errors import AimGpuError, Conflict
from aimgpu.placement import Snapshot
from aimgpu.placement.preemption.eviction_sets import Limits

_LOOK_SECONDS = 0.2
_LEAST_TOGETHER = 2


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
    lock: threading.RLock
    ending: threading.Event
    read_snapshot: Callable[[], Snapshot]


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
        self._read_snapshot = parts.read_snapshot
        self._shared = SharedPlanning(parts.lock, self._place_restarts)

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
                found = self._shared.plan(WaitingRestart(deployment=deployments[0], ready=ready, emit=emit))
            else:
                with self._lock:
                    found = self._try_to_place(current, ready, emit)
            if isinstance(found, tuple):
                planned()
                return found
            self._wait_for(found)

    def place_waking(self, item: Prepared, residents: Sequence[Resident]) -> tuple[Plan, CommittedPlan | None]:
        while True:
            with self._lock:
                self.check_open()
                self._check_wanted([item.deployment])
                claims = self._reservations.claims_on([item.name])
                if not claims:
                    rivals = Rivals(
                        residents=residents,
                        least_residency_seconds=self._dependencies.timing.least_residency_seconds,
                        waited_seconds=self._waking.waited_seconds(item.name),
                        ahead=self._waking.ahead_of(item),
                    )
                    state = self.read_state()
                    plan = plan_wake(item, state, rivals)
                    if plan.refusals:
                        self._waking.refused(item)
                    else:
                        self._waking.woken(item.name)
                    if plan.refusals or not plan.steps:
                        return plan, None
                    return plan, self._applier.commit(plan, state.snapshot)
            self._wait_for(claims)

    def read_state(self) -> ControlState:
        """One snapshot per plan."""
        return ControlState(
            wanted={deployment.name: deployment for deployment in self._ledger.deployments()},
            running=self._ledger.instances(),
            snapshot=self._reservations.apply_to(self._read_snapshot()),
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

    def _place_restarts(self, restarts: Sequence[WaitingRestart]) -> None:
        """Together where all fit and none depends on another, else one by one, so that one that does not fit stops no other."""
        with suppress(AimGpuError):
            self._place_together(restarts)
        for one in restarts:
            if not one.done.is_set():
                request = PlaceRequest(deployments=[one.deployment], again=True)
                one.settle(partial(self._try_to_place, request, one.ready, one.emit))

    def _place_together(self, restarts: Sequence[WaitingRestart]) -> None:
        self.check_open()
        chosen = {one.deployment.name: one for one in restarts if self._may_join(one)}
        if len(chosen) < _LEAST_TOGETHER:
            return
        state = self.read_state()
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

    def _try_to_place(self, request: PlaceRequest, ready: Mapping[str, Prepared], emit: Emit) -> Placed:
        """Or the claims of other operations that must end first, none: only a change of layout, or something to prepare."""
        self.check_open()
        if request.again:
            self._check_wanted(request.deployments)
        claims = [] if request.dry_run else self._reservations.claims_on(item.name for item in request.deployments)
        if claims:
            self._supersede(claims, request)
            return claims
        changed = self._changed(request.deployments)
        if any(item.name not in ready or ready[item.name].deployment != item for item in changed):
            return []
        state = self.read_state()
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
    with suppress(AimGpuError):  # it is committed: it is carried out, or left to the next daemon
        _emit_plan(plan, emit)
    return plan, operation
