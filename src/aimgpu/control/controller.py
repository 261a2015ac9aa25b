"""Deploy, release, reconcile, partition: the one owner of what runs on this machine.

What changes is decided on one thread (`loop.py`). Everything that changes the machine is a Plan, carried out by the Applier and
recorded as one operation in the ledger.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from aimgpu.control.apply import Applier, CommittedPlan, PlanOutcome
from aimgpu.control.changes import ChangeCounter
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.effects import Effects
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.instance.recorder import state_event
from aimgpu.control.loop import Loop, NotYet
from aimgpu.control.placing import Placer, PlaceRequest, PlacerParts
from aimgpu.control.plan.eviction import Resident
from aimgpu.control.plan.layout import (
    Occupants,
    PlannedLayoutChange,
    check_layout_change,
    find_layout_change,
    plan_layout,
)
from aimgpu.control.plan.preparation import prepare
from aimgpu.control.plan.prepared import revision_of
from aimgpu.control.plan.resize import Resize, find_resize, plan_resize, resizable_instances
from aimgpu.control.plan.steps import Plan, PutToSleep, Release
from aimgpu.control.repairs import Repair, Repairs
from aimgpu.control.reservations import Reservations
from aimgpu.control.restarts import Attempt, Restarts
from aimgpu.control.snapshots import Reading, process_owners, read_gpus, snapshot_of
from aimgpu.control.statistics import Statistics
from aimgpu.control.threads import Background, side_by_side
from aimgpu.control.waiting import Wait, WaitingWakes, find_abandoned, find_diverged, find_waiting, still_diverged
from aimgpu.domain import Deployment, Device, Grant, Instance, InstanceState, Refusal
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.engines.launchers.log_bound import bound_log
from aimgpu.engines.protocols import ResizeNoter
from aimgpu.errors import AimGpuError, Conflict, UnknownDeployment
from aimgpu.isolation.protocols import UsageMeter
from aimgpu.ledger import Retry
from aimgpu.placement import Snapshot
from aimgpu.placement.preemption.eviction_sets import Limits

_HOUR_SECONDS = 3600.0
_BOUND_LOGS_SECONDS = 5.0
_DIVERGED_SECONDS = 5.0
_NOTHING = Snapshot(nodes=())  # for plans that place nothing
_AT_ONCE = "programs that allocate as they go use it at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What an apply or a wake came to."""

    plan: Plan
    instances: tuple[Instance, ...] = ()

    @property
    def failed(self) -> tuple[Instance, ...]:
        """Those that did not become ready."""
        return tuple(instance for instance in self.instances if instance.state is InstanceState.FAILED)


class Controller:
    """Thread-safe."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._ledger = dependencies.ledger
        self.changes = ChangeCounter(dependencies.effects)
        self.statistics = Statistics()
        self._effects = dependencies.effects
        self._loop = Loop(self._effects, lambda: read_gpus(dependencies))
        self._reservations = Reservations(self._loop)
        self._lifecycle = Lifecycle(dependencies, self.changes, self._charge_more)
        self._applier = Applier(dependencies, self._lifecycle, self._reservations, self.statistics, self._loop)
        self._restarts = Restarts(dependencies, self._place_again, self.changes)
        self._repairs = Repairs(dependencies, self._lifecycle)
        self._waking = WaitingWakes(self._effects)
        parts = PlacerParts(
            lifecycle=self._lifecycle,
            applier=self._applier,
            reservations=self._reservations,
            waking=self._waking,
            loop=self._loop,
            recent_preemptions=self._recent_preemptions,
        )
        self._placer = Placer(dependencies, parts)
        self._logs_bounded_at = -math.inf
        self._heal_at: dict[str, float] = {}
        self._diverged: dict[str, tuple[str, ...]] = {}  # at the last look
        self._abandoned: tuple[Instance, ...] = ()
        self._diverged_at = -math.inf
        self._background = Background(self._effects)

    # --- reading ---

    def snapshot(self) -> Snapshot:
        """The machine and what is granted on it, as placement sees it."""
        return snapshot_of(self._dependencies, read_gpus(self._dependencies), recent_preemptions=self._recent_preemptions())

    def devices(self) -> tuple[Device, ...]:
        """The GPUs, as read now."""
        return self._dependencies.hardware.read_devices()

    def instances(self) -> tuple[Instance, ...]:
        """Every instance with its grants; from memory."""
        return self._ledger.instances()

    def deployments(self) -> tuple[Deployment, ...]:
        """What should run; from memory."""
        return self._ledger.deployments()

    def waiting(self) -> tuple[Retry, ...]:
        """Deployments that are wanted, could not be started, and are tried again or given up; from memory."""
        return self._restarts.waiting()

    def waits(self) -> tuple[Wait, ...]:
        """Every wanted replica that is neither ready nor asleep nor starting, with what ends its wait; from memory."""
        under_way = self._restarts.trying | self._reservations.claimed  # before the instances: what they start is seen there
        retries = {retry.deployment: retry for retry in self._restarts.waiting()}
        return find_waiting(self.deployments(), self.instances(), retries, under_way)

    def waiting_for(self, name: str) -> Retry | None:
        """The same of one deployment."""
        return self._restarts.waiting_for(name)

    def next_retry_seconds(self) -> float:
        """Until a deployment is due to be tried again; infinite where none is. From memory."""
        return self._restarts.next_seconds()

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way, or something in the background that may begin one."""
        # In the order in which one hands over to the next: what was not yet in the later one was in the earlier.
        return self._repairs.busy or self._background.busy or self._restarts.busy or self._applier.is_busy

    # --- changing ---

    def apply(  # noqa: PLR0913 - what `up` can ask for
        self,
        deployments: Sequence[Deployment],
        *,
        emit: Emit = ignore,
        dry_run: bool = False,
        prune: bool = False,
        make_room: bool = False,
        limits: Limits | None = None,
    ) -> ApplyResult:
        """Make these run. Taken whole or not at all; applying twice changes nothing. `prune`: and nothing else.

        `make_room`: what does not fit is given room by moving others, changing layouts and stopping lower priority.
        """
        names = [deployment.name for deployment in deployments]
        if len(set(names)) != len(names):
            raise Conflict("two deployments have the same name", hint="Give each model its own name.")
        request = PlaceRequest(deployments=deployments, dry_run=dry_run, prune=prune, make_room=make_room, limits=limits)
        known, served = self._restarts.known(names), self._serving_as_wanted(deployments)
        plan, operation = self._placer.place(request, emit)
        if operation is None:
            if not dry_run:
                self._count(plan, None)
            return ApplyResult(plan=plan, instances=self._of(names))
        with self._applier.closed_by_errors(operation):
            self._restarts.forget({name: retry for name, retry in known.items() if name not in plan.queued})
        operation.gives_up = (
            frozenset(names) - served - {name for name, retry in known.items() if retry.retry_at_ms is not None}
        )
        self._run(operation, emit)
        load_seconds = self._dependencies.timing.load_timeout_seconds
        wait_until_ready(
            lambda: self._of_while_open(names), self.changes, emit, effects=self._effects, timeout_seconds=load_seconds
        )
        return ApplyResult(plan=plan, instances=self._of(names))

    def release(self, names: Iterable[str] | None = None, *, emit: Emit = ignore, final: bool = False) -> None:
        """Drain and stop these deployments, or everything; what was charged is given back by the same records.

        `final`: nothing is deployed afterwards, and what is being prepared is refused; undone where the release fails.
        """
        ends = final and not self._loop.ending

        try:
            if ends:
                self._loop.decide(self._loop.end)
            self._run(self._loop.decide(lambda: self._commit_release(names)), emit)
            self._lifecycle.remove_left_folders()
        except BaseException:
            if ends:
                self._loop.decide(self._loop.go_on)
            raise

    def sleep(self, name: str, *, emit: Emit = ignore) -> bool:
        """Unload a deployment and free its memory; a request will wake it. False where it was busy."""

        def decide() -> CommittedPlan | None:
            ready = [one for one in self._of([name]) if one.state is InstanceState.READY]
            steps = [PutToSleep(deployment=name, replica=one.replica, instance_id=one.id) for one in ready]
            plan = Plan(operation="sleep", chains=tuple((step,) for step in steps))
            return self._applier.commit(plan, _NOTHING) if steps else None

        operation = self._loop.decide(decide)
        return operation is not None and not self._run(operation, emit).busy

    def wake(
        self,
        name: str,
        residents: Sequence[Resident] | None = (),
        *,
        emit: Emit = ignore,
        planned: Callable[[], None] = lambda: None,
    ) -> ApplyResult:
        """Load a sleeping deployment again; if it does not fit, the cheapest of `residents` are unloaded for it.

        Never one of higher priority. Refused wakes that are tried again keep their place before later ones of their priority.
        `residents` None: nobody waits for it, so it gets free room or nothing.
        `planned` is called once it is charged or refused, before anything loads.
        """
        deployment = self._find(name)
        item = prepare(self._dependencies, deployment, self._placer.while_open(emit), may_fetch=True)
        plan, operation = self._placer.place_waking(item, residents)
        planned()
        if operation is None:
            if plan.refusals and residents is not None:
                self._count(plan, None)
            return ApplyResult(plan=plan, instances=self._of([name]))
        outcome = self._run(operation, emit)
        if outcome.busy and residents is not None:
            plan = Plan(operation="wake", refusals=(_busy_refusal(name, outcome.busy),), room_may_come=True)
            self._loop.decide(lambda: self._waking.refused(item))
        return ApplyResult(plan=plan, instances=self._of([name]))

    def change_layout(
        self, device_id: str, layout: str, *, reload_driver: bool = False, dry_run: bool = False, emit: Emit = ignore
    ) -> PlannedLayoutChange:
        """Stop what is in the way, change the layout, verify it, bring back what fits; on failure everything is restored."""

        def decide(occupants: Occupants, reading: Reading) -> tuple[PlannedLayoutChange, CommittedPlan | None] | NotYet:
            state = self._placer.read_state(reading)
            change = find_layout_change(state.snapshot, device_id, layout, occupants)
            if dry_run or change.changes_nothing:
                return change, None
            check_layout_change(change, occupants, reload_driver=reload_driver)
            if self._reservations.holds(change.idle):  # another operation still needs room there
                return NotYet(lambda: not self._reservations.holds(change.idle), then_none=True)
            return change, self._applier.commit(plan_layout(change, state, reload_driver=reload_driver), state.snapshot)

        while (found := self._loop.place(partial(decide, self._read_occupants()))) is None:
            pass
        change, operation = found
        if operation is not None:
            self._run(operation, emit)
        return change

    def resize(self, name: str, memory_bytes: int, *, dry_run: bool = False) -> Resize:
        """Change what a running model may hold on each of its GPUs, without restarting it."""
        used = {grant.id: self._used_bytes(grant) for instance in self._of([name]) for grant in instance.grants}
        with ExitStack() as held:

            def decide(reading: Reading) -> tuple[Resize, CommittedPlan | None]:
                state = self._placer.read_state(reading)
                instances = resizable_instances(state, name)
                if any(grant.id not in used for instance in instances for grant in instance.grants):
                    raise Conflict(f"{name} was started again meanwhile", hint="Try again.")
                changes = find_resize(state, name, memory_bytes, used)
                engine = self._dependencies.engines.get(instances[0].engine)
                note = engine.resize_note if isinstance(engine, ResizeNoter) else _AT_ONCE
                resize = Resize(deployment=name, changes=changes, note=note)
                if dry_run:
                    return resize, None
                held.enter_context(self._lifecycle.holding_all(instances))
                return resize, self._applier.commit(plan_resize(state, name, memory_bytes, changes), state.snapshot)

            found, operation = self._loop.place(decide)
            if operation is not None:
                self._run(operation, ignore)
        return found

    def amend(self, name: str, change: Callable[[Deployment], Deployment]) -> Deployment:
        """Change settings of a deployment that take effect while it runs, also while it is being started; nothing restarts."""

        def decide() -> Deployment:
            before = self._find(name)
            after = change(before)
            former, revision = revision_of(before), revision_of(after)
            self._ledger.amend(after, former=former, revision=revision)
            self._reservations.amend_claim(name, former=former, revision=revision)
            return after

        after = self._loop.decide(decide)
        self.changes.notify()
        return after

    def stop_instance(self, instance_id: str, *, restart: bool, emit: Emit = ignore) -> None:
        """Stop one instance and free what it holds; its deployment stays wanted, and is started again with `restart`."""

        def decide() -> CommittedPlan:
            found = [one for one in self.instances() if one.id == instance_id]
            names = tuple(one.deployment for one in found) if restart else ()
            plan = Plan(operation="stop", chains=tuple((Release.of(one),) for one in found), restarts=names)
            return self._applier.commit(plan, _NOTHING)

        self._run(self._loop.decide(decide), emit)

    def note_ended(self, name: str, *, emit: Emit = ignore) -> None:
        """Record a program that ended, or start it again; one that a caller brought is forgotten."""
        deployment = self._ledger.deployment(name)
        if deployment is not None and deployment.has_caller:
            self.release([name], emit=emit)
            return
        for instance in self._of([name]):
            self._lifecycle.check_alive(instance, emit)

    # --- repairing ---

    def reconcile(self, *, emit: Emit = ignore, wait: bool = True) -> tuple[Repair, ...]:
        """Make the ledger equal the truth after whatever happened: adopt, restart, release, stop."""
        devices, alive = self._devices_at_start(emit), self._repairs.find_running()
        with self._loop.placing_nothing():
            repairs, adoptions = self._loop.decide(lambda: self._repairs.decide(devices, alive))
            restarts = self._repairs.carry_out(repairs, emit)
            self._loop.decide(self._applier.close_left_open)  # what they wanted is in the ledger, and is started below
        lost = self._repairs.adopt(adoptions, emit, wait=wait, on_lost=lambda name: self._on_lost(name, emit))
        wanted = {deployment.name: deployment for deployment in self.deployments()}
        missing = wanted.keys() - {instance.deployment for instance in self.instances()}
        self._restarts.restart({*restarts, *lost, *missing, *self._outdated(wanted)}, emit, wait=wait)
        return repairs

    def supervise(self, *, emit: Emit = ignore, wait: bool = False) -> tuple[str, ...]:
        """Start again what is due; then see whether instances still run, and return the deployments that lost one."""
        self._restarts.retry_due(emit, wait=wait)
        self._wake_half_asleep(emit, wait=wait)
        everyone = self.instances()
        self._bound_logs(everyone)
        looked = [one for one in everyone if one.state is InstanceState.READY or one.sleeps_in_place]
        # Asking an engine, and ending what is left of a dead one, may take seconds each.
        slow = [one for one in looked if self._lifecycle.is_due(one) or not self._lifecycle.is_running(one)]
        reasons = side_by_side([partial(self._lifecycle.check_alive, one, emit) for one in slow], "check", self._effects)
        lost = dict.fromkeys(one.deployment for one, reason in zip(slow, reasons, strict=True) if reason is not None)
        try:
            self._release_unwanted(emit)
        finally:
            self._converge(emit, wait=wait)
        return tuple(lost)

    def leave(self) -> None:
        """Before `close`: starts and wakes that are waited for give up soon, and are left to the next daemon."""
        self._lifecycle.leave()
        self.changes.notify()

    def close(self) -> None:
        """What runs keeps running; what is being started is left to the next daemon."""
        self.leave()
        deadline = self._effects.now() + self._dependencies.timing.close_seconds
        self._restarts.close(deadline - self._effects.now())
        self._repairs.close(max(0.0, deadline - self._effects.now()))
        self._background.close(max(0.0, deadline - self._effects.now()))
        while self._applier.is_busy and self._effects.now() < deadline:
            self._effects.pause(0.01)
        self._loop.close()
        self._ledger.close()

    # --- placing ---

    def _place_again(self, deployment: Deployment, planned: Callable[[], None], follow: Emit, emit: Emit) -> Attempt:
        request = PlaceRequest(deployments=[deployment], again=True)
        plan, operation = self._placer.place(request, follow, planned)
        if operation is None:
            self._count(plan, None)
            return Attempt(refused="; ".join(refusal.summary for refusal in plan.refusals))
        outcome = self._run(operation, emit)
        reasons = [one.reason or "it did not start" for one in outcome.started if one.state is InstanceState.FAILED]
        return Attempt(failed=reasons[0] if reasons else None)

    def _commit_release(self, names: Iterable[str] | None) -> CommittedPlan:
        wanted = {deployment.name for deployment in self.deployments()}
        chosen = list(dict.fromkeys(wanted if names is None else names))
        unknown = [name for name in chosen if name not in wanted]
        if unknown:
            raise UnknownDeployment.of(*unknown, known=wanted)
        for claim in self._reservations.claims_on(chosen):
            claim.superseded = True
        instances = self.instances() if names is None else self._of(chosen)
        plan = Plan(operation="release", chains=tuple((Release.of(one),) for one in instances), unwants=tuple(chosen))
        operation = self._applier.commit(plan, _NOTHING)
        self._restarts.forget(self._restarts.known(chosen))
        return operation

    def _run(self, operation: CommittedPlan, emit: Emit) -> PlanOutcome:
        """Raises what went wrong, once what it stopped was started again."""
        outcome = self._applier.run(operation, emit)
        self._count(operation.plan, outcome)
        wanted = {deployment.name for deployment in self.deployments()}
        names = [name for name in (*operation.plan.restarts, *outcome.lost) if name in wanted]
        if names and not self._loop.ending:
            self._restarts.restart(names, emit, wait=True)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    # --- smaller ---

    def _recent_preemptions(self) -> int:
        return self.statistics.preemptions_since(self._effects.now() - _HOUR_SECONDS)

    def _charge_more(self, instance: Instance, capacity: Mapping[str, int]) -> None:
        def decide() -> None:
            left = self._reservations.leave_room(capacity, self._ledger.grants())
            self._ledger.rebook(instance, capacity=left)

        self._loop.decide(decide)

    def _find(self, name: str) -> Deployment:
        deployment = self._ledger.deployment(name)
        if deployment is None:
            raise UnknownDeployment.of(name, known=(one.name for one in self.deployments()))
        return deployment

    def _of(self, names: Iterable[str]) -> tuple[Instance, ...]:
        chosen = set(names)
        return tuple(instance for instance in self.instances() if instance.deployment in chosen)

    def _serving_as_wanted(self, deployments: Iterable[Deployment]) -> set[str]:
        """Those that run already as they are asked for: one that dies meanwhile is tried again as before."""
        current = {deployment.name: revision_of(deployment) for deployment in deployments}
        return {
            one.deployment
            for one in self._of(current)
            if one.state is InstanceState.READY and one.revision in (None, current[one.deployment])
        }

    def _of_while_open(self, names: Iterable[str]) -> tuple[Instance, ...]:
        if self._lifecycle.is_leaving:
            raise Conflict("the daemon is stopping", hint="What is being started goes on at its next start.")
        return self._of(names)

    def _used_bytes(self, grant: Grant) -> int | None:
        isolator = self._dependencies.isolator
        return isolator.read_used_bytes(grant) if isinstance(isolator, UsageMeter) and not grant.exclusive else None

    def _read_occupants(self) -> Occupants:
        return Occupants(
            usage=tuple(self._dependencies.hardware.read_usage()),
            owners=process_owners(self._effects, self.instances()),
            helpers=frozenset(self._dependencies.helpers.pids()),
        )

    def _devices_at_start(self, emit: Emit) -> tuple[Device, ...] | None:
        """None: they do not answer. What runs is taken over all the same."""
        try:
            return self.devices()
        except AimGpuError as error:
            if self._ledger.set_aside is not None:
                raise  # what is wanted is read from what runs, and can be granted where it is only once they answer
            emit(Event(kind=EventKind.ERROR, text=error.message, data=error.to_json()))
            return None

    def _on_lost(self, name: str, emit: Emit) -> None:
        if not self._loop.ending:
            self._restarts.restart([name], emit, wait=False)

    def _outdated(self, wanted: dict[str, Deployment]) -> set[str]:
        """Deployments of which an instance runs that was started from an earlier revision."""
        return {
            one.deployment
            for one in self.instances()
            if one.revision is not None
            and one.state is InstanceState.READY
            and one.deployment in wanted
            and one.revision != revision_of(wanted[one.deployment])
        }

    def _converge(self, emit: Emit, *, wait: bool) -> None:
        """Place deployments again that differed from what is wanted at two looks and have no operation running."""
        now = self._effects.now()
        if now - self._diverged_at < _DIVERGED_SECONDS:
            return
        self._diverged_at = now
        found, abandoned = self._loop.decide(self._find_left)
        for instance in (one for one in abandoned if one in self._abandoned and self._lifecycle.is_idle(one.id)):
            self._end_abandoned(instance, emit)
        names = [name for name in still_diverged(self._diverged, found) if self.waiting_for(name) is None]
        self._diverged, self._abandoned = found, abandoned
        if names:
            self._restarts.restart(names, emit, wait=wait)

    def _find_left(self) -> tuple[dict[str, tuple[str, ...]], tuple[Instance, ...]]:
        """What differs from what is wanted, and what is started or ended for no one. Nothing while something is under way."""
        if self._applier.is_busy or self._restarts.busy or self._loop.ending:
            return {}, ()
        self._applier.close_left_open()
        recorded = {retry.deployment for retry in self.waiting()}
        return find_diverged(self.deployments(), self.instances(), recorded), find_abandoned(self.instances())

    def _end_abandoned(self, instance: Instance, emit: Emit) -> None:
        """Also one that could not be stopped before, as when Docker does not answer; the next round tries again."""
        try:
            self._lifecycle.release(instance, emit, drain=False)
        except AimGpuError as error:
            text = f"{instance.id} could not be stopped: {error.message}"
            emit(Event(kind=EventKind.STEP, deployment=instance.deployment, text=text))

    def _wake_half_asleep(self, emit: Emit, *, wait: bool) -> None:
        """Replicas that found no room when their deployment woke follow when there is some; nothing is unloaded for them."""
        ready = {one.deployment for one in self.instances() if one.state is InstanceState.READY}
        asleep = {one.deployment for one in self.instances() if one.state is InstanceState.SLEEPING}
        now = self._effects.now()
        taken = self._reservations.claimed
        due = [name for name in sorted((ready & asleep) - taken) if self._heal_at.get(name, 0.0) <= now]
        if not due:
            return
        self._heal_at = {name: at for name, at in self._heal_at.items() if name in ready & asleep}
        self._heal_at |= dict.fromkeys(due, now + self._dependencies.timing.room_retry_seconds)
        for name in due:
            if wait:
                self._wake_rest(name, emit)
            else:
                self._background.run(partial(self._wake_rest, name, emit), "wake-rest")

    def _wake_rest(self, name: str, emit: Emit) -> None:
        with suppress(AimGpuError):  # the next round tries again
            self.wake(name, emit=emit)

    def _bound_logs(self, instances: Sequence[Instance]) -> None:
        if self._effects.now() - self._logs_bounded_at >= _BOUND_LOGS_SECONDS:
            self._logs_bounded_at = self._effects.now()
            self._lifecycle.remove_left_folders()
            for instance in instances:
                bound_log(self._dependencies.runs / instance.id / LOG_NAME)

    def _release_unwanted(self, emit: Emit) -> None:
        """What a release that failed left behind is released again."""

        def decide() -> CommittedPlan | None:
            wanted = {deployment.name for deployment in self.deployments()}
            left = [one for one in self.instances() if one.deployment not in wanted]
            left = [one for one in left if not self._reservations.is_ending(one.id)]
            if not left or self._applier.is_busy:
                return None
            plan = Plan(operation="release", chains=tuple((Release.of(one),) for one in left))
            return self._applier.commit(plan, _NOTHING)

        operation = self._loop.decide(decide)
        if operation is not None:
            self._run(operation, emit)

    def _count(self, plan: Plan, outcome: PlanOutcome | None) -> None:
        if outcome is None:
            result = "refused" if plan.refusals else "ok"
        elif outcome.error is not None or outcome.failed:
            result = "failed"
        else:
            result = "busy" if outcome.busy else "ok"
        self.statistics.count(plan.operation, result)
        self.statistics.count_refusals(plan.refusals)


def _busy_refusal(name: str, busy: Sequence[str]) -> Refusal:
    summary = f"{', '.join(dict.fromkeys(busy))} could not be put to sleep for it: requests are in flight"
    return Refusal(ask=name, summary=summary, reasons=())


_UNSETTLED = frozenset({InstanceState.QUEUED, InstanceState.LOADING})
_SETTLE_LOOK_SECONDS = 1.0


def wait_until_ready(
    read: Callable[[], Iterable[Instance]], changes: ChangeCounter, emit: Emit, *, effects: Effects, timeout_seconds: float
) -> None:
    """Returns when none of them is queued or loading; emits the state that each came to. An error of `read` ends the wait."""
    deadline = effects.now() + timeout_seconds
    shown: dict[str, InstanceState] = {}
    seen = changes.version
    while effects.now() < deadline:
        found = list(read())
        unsettled = [instance for instance in found if instance.state in _UNSETTLED]
        for instance in found:
            if instance in unsettled or instance.id in shown:
                _emit_state(instance, shown, emit)
        if not unsettled:
            return
        seen = changes.wait(seen, _SETTLE_LOOK_SECONDS)


def _emit_state(instance: Instance, shown: dict[str, InstanceState], emit: Emit) -> None:
    if shown.get(instance.id) is not instance.state:
        shown[instance.id] = instance.state
        emit(state_event(instance))
