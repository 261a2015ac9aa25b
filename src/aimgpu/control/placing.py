"""Finds places for deployments: prepares them in the caller's thread, plans and commits them on the thread of the loop.

Restarts that come at the same time are planned together: one snapshot, one plan, one transaction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.apply import Applier, CommittedPlan
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.loop import Loop, NotYet, Placing, Restart, stopping
from aimgpu.control.plan.eviction import Resident
from aimgpu.control.plan.preparation import prepare
from aimgpu.control.plan.prepared import Prepared, revision_of
from aimgpu.control.plan.room import RoomRequest, plan_room
from aimgpu.control.plan.stack import carry_over, needs_work, plan_stack, plan_stack_with_queue, split_plan
from aimgpu.control.plan.steps import ControlState, Plan, changing_partitions
from aimgpu.control.plan.wake import Rivals, plan_wake
from aimgpu.control.reservations import DeploymentClaim, Reservations
from aimgpu.control.snapshots import Reading, snapshot_of
from aimgpu.control.stack.names import find_clash
from aimgpu.control.waiting import WaitingWakes
from aimgpu.domain import Deployment
from aimgpu.errors import Conflict
from aimgpu.placement.preemption.eviction_sets import Limits

_LEAST_TOGETHER = 2


Placed = tuple[Plan, CommittedPlan | None]


class Unprepared(Exception):
    """These must be prepared first, in the caller's thread; none: those that are asked for."""

    def __init__(self, deployments: Sequence[Deployment] = ()) -> None:
        super().__init__()
        self.deployments = deployments


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
    """What it works with."""

    lifecycle: Lifecycle
    applier: Applier
    reservations: Reservations
    waking: WaitingWakes
    loop: Loop
    recent_preemptions: Callable[[], int]


class Placer:
    """Thread-safe; `read_state` and what is called `_try` are of the thread of the loop."""

    def __init__(self, dependencies: Dependencies, parts: PlacerParts) -> None:
        self._dependencies = dependencies
        self._ledger = dependencies.ledger
        self._lifecycle = parts.lifecycle
        self._applier = parts.applier
        self._reservations = parts.reservations
        self._waking = parts.waking
        self._loop = parts.loop
        self._recent_preemptions = parts.recent_preemptions
        self._loop.place_together = self._place_together

    def place(self, request: PlaceRequest, emit: Emit, planned: Callable[[], None] = lambda: None) -> Placed:
        """Prepares without holding anything up; what was changed or released meanwhile is prepared again."""
        follow = self.while_open(emit)
        ready: dict[str, Prepared] = {}
        while True:
            changed = self._changed(self._carried(request))
            self._prepare(changed, ready, follow, may_fetch=not request.dry_run)
            restart = Restart(deployment=request.deployments[0], ready=ready) if request.again else None
            try:
                plan, operation = self._loop.place(lambda reading: self._try_to_place(request, ready, reading), restart)
            except Unprepared as missing:
                self._prepare(missing.deployments, ready, follow, may_fetch=False)
                continue
            planned()
            with self._applier.closed_by_errors(operation):
                emit(Event(kind=EventKind.PLAN, text=f"{len(plan.steps)} steps", data=plan.to_json()))
            return plan, operation

    def place_waking(self, item: Prepared, residents: Sequence[Resident] | None) -> Placed:
        return self._loop.place(lambda reading: self._try_to_wake(item, residents, reading))

    def _try_to_wake(self, item: Prepared, residents: Sequence[Resident] | None, reading: Reading) -> Placed | NotYet:
        self._check_wanted([item.deployment])
        claims = self._reservations.claims_on([item.name])
        if claims:
            return _until_ended(claims)
        rivals = Rivals(
            residents=residents or (),
            only_free=residents is None,
            least_residency_seconds=self._dependencies.timing.least_residency_seconds,
            waited_seconds=self._waking.waited_seconds(item.name),
            ahead=self._waking.ahead_of(item),
        )
        state = self.read_state(reading)
        plan = plan_wake(item, state, rivals)
        if plan.refusals and residents is not None:
            self._waking.refused(item)
        elif not plan.refusals:
            self._waking.woken(item.name)
        if plan.refusals or not plan.steps:
            return plan, None
        return plan, self._applier.commit(plan, state.snapshot)

    def read_state(self, reading: Reading) -> ControlState:
        """One snapshot per plan."""
        return ControlState(
            wanted={deployment.name: deployment for deployment in self._ledger.deployments()},
            running=self._ledger.instances(),
            snapshot=self._reservations.apply_to(
                snapshot_of(self._dependencies, reading, recent_preemptions=self._recent_preemptions())
            ),
        )

    def while_open(self, emit: Emit) -> Emit:
        """Ends a preparation at its next sign of progress once the daemon is stopping."""

        def follow(event: Event) -> None:
            if self._loop.ending:
                raise stopping()
            emit(event)

        return follow

    def _place_together(self, placings: Sequence[Placing], reading: Reading) -> None:
        """Place all of them at once, which works if all fit and none depends on another."""
        chosen = {one.restart.deployment.name: one for one in placings if one.restart and self._may_join(one.restart)}
        if len(chosen) < _LEAST_TOGETHER:
            return
        state = self.read_state(reading)
        restarts = [one.restart for one in chosen.values() if one.restart is not None]
        ready = [one.ready[one.deployment.name] for one in restarts]
        plans = split_plan(plan_stack(ready, state, deployments=[one.deployment for one in restarts]))
        if plans is None or plans.keys() != chosen.keys() or not all(plan.begins for plan in plans.values()):
            return
        committed = self._applier.commit_all(list(plans.values()), state.snapshot)
        for one, plan, operation in zip(chosen.values(), plans.values(), committed, strict=True):
            one.answer.settle((plan, operation))

    def _may_join(self, restart: Restart) -> bool:
        """Whether nothing about it has to be waited for, prepared or refused first."""
        item = restart.deployment
        prepared = restart.ready.get(item.name)
        wanted = self._ledger.deployment(item.name) == item and prepared is not None and prepared.deployment == item
        return wanted and bool(self._changed([item])) and not self._reservations.claims_on([item.name])

    def _try_to_place(self, given: PlaceRequest, ready: Mapping[str, Prepared], reading: Reading) -> Placed | NotYet:
        if given.again:
            self._check_wanted(given.deployments)
        request = replace(given, deployments=self._carried(given))
        claims = [] if request.dry_run else self._reservations.claims_on(item.name for item in request.deployments)
        if claims:
            self._supersede(claims, request)
            return _until_ended(claims)
        changed = self._changed(request.deployments)
        if any(not _is_ready(item, ready) for item in changed):
            raise Unprepared
        state = self.read_state(reading)
        _check_names(request, state)
        plan = self._plan([ready[item.name] for item in changed], request, state, ready)
        if plan.refusals and self._reservations.layouts_change and not request.dry_run:
            version = self._loop.layouts_version
            return NotYet(lambda: self._loop.layouts_version != version)
        reserving = self._reservations.reserving
        if plan.refusals and request.make_room and reserving and not request.dry_run:  # nothing of theirs can be moved yet
            return NotYet(lambda: not reserving <= self._reservations.reserving)
        # What an instance that falls asleep still holds hides the room that is reserved behind it.
        needed = [] if request.dry_run else self._reservations.claims_for_room_on(changing_partitions(plan.steps))
        if needed:
            return _until_ended(needed)
        if plan.refusals or request.dry_run:
            return plan, None
        return plan, self._applier.commit(plan, state.snapshot)

    def _plan(
        self, changed: Sequence[Prepared], request: PlaceRequest, state: ControlState, ready: Mapping[str, Prepared]
    ) -> Plan:
        keeps_queue = not (request.again or request.make_room)
        plan = (plan_stack_with_queue if keeps_queue else plan_stack)(
            changed, state, deployments=request.deployments, prune=request.prune
        )
        if not plan.refusals or not request.make_room:
            return plan
        names = {item.name for item in request.deployments}
        pruned = tuple(name for name in state.wanted if request.prune and name not in names)
        room = RoomRequest(prepared=changed, deployments=request.deployments, pruned=pruned, limits=request.limits)

        def find(moved: Sequence[Deployment]) -> Mapping[str, Prepared]:
            missing = [item for item in moved if not _is_ready(item, ready)]
            if missing:
                raise Unprepared(missing)
            return ready

        return plan_room(room, state, find)

    def _carried(self, request: PlaceRequest) -> tuple[Deployment, ...]:
        return carry_over(request.deployments, self._ledger.deployments(), self._ledger.instances())

    def _prepare(self, items: Iterable[Deployment], ready: dict[str, Prepared], emit: Emit, *, may_fetch: bool) -> None:
        for item in items:
            if not _is_ready(item, ready):
                ready[item.name] = prepare(self._dependencies, item, emit, may_fetch=may_fetch)

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
                claim.superseded = True
                for instance_id in claim.starting:
                    self._lifecycle.cancel(instance_id)


def _is_ready(item: Deployment, ready: Mapping[str, Prepared]) -> bool:
    return item.name in ready and ready[item.name].deployment == item


def _until_ended(claims: Sequence[DeploymentClaim]) -> NotYet:
    return NotYet(lambda: all(claim.ended for claim in claims))


def _check_names(request: PlaceRequest, state: ControlState) -> None:
    """Raises Conflict where a caller could not tell two models apart."""
    names = {item.name for item in request.deployments}
    beside = () if request.prune else [item for name, item in state.wanted.items() if name not in names]
    clash = find_clash([*beside, *request.deployments])
    if clash is not None:
        raise Conflict(clash.text, hint=clash.hint)
