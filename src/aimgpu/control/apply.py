"""Carries out plans: records the operation, ends, changes layouts, charges, starts; undoes what failed half-way.

A plan is committed on the thread of the loop (what is wanted, what can be charged at once, what is reserved) and carried out in
others. What they decide on the way, they decide there too.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind
from aimgpu.control.instance.lifecycle import Lifecycle
from aimgpu.control.loop import Loop
from aimgpu.control.plan.asleep import awake_grants
from aimgpu.control.plan.new_instance import make_instance
from aimgpu.control.plan.prepared import Prepared, revision_of
from aimgpu.control.plan.steps import (
    Begin,
    Chain,
    ChangeLayout,
    End,
    Plan,
    Preempt,
    PutToSleep,
    Register,
    Release,
    ResizeGrant,
    Stage,
    Start,
    Step,
    Unload,
    Wake,
    begins_of,
    changing_partitions,
    halted_devices,
    stages,
)
from aimgpu.control.reservations import DeploymentClaim, Reservations
from aimgpu.control.snapshots import take_snapshot
from aimgpu.control.statistics import Statistics
from aimgpu.control.threads import side_by_side
from aimgpu.domain import Deployment, Grant, Instance, InstanceState, Level
from aimgpu.errors import AimGpuError, Conflict, LayoutNotApplied
from aimgpu.isolation.protocols import Resizer
from aimgpu.placement import Snapshot

Charged = tuple[Instance, Prepared]


@dataclass(slots=True, kw_only=True)
class CommittedPlan:
    """A plan that was committed."""

    id: int
    plan: Plan
    snapshot: Snapshot  # the one that the plan was made on
    before: Mapping[str, Deployment | None]  # what was wanted under the names that it changes
    gives_up: frozenset[str] = frozenset()  # deployments that were asked for just now: those that fail wait for another request
    claims: dict[str, DeploymentClaim] = field(default_factory=dict)
    charged: dict[int, list[Charged]] = field(default_factory=dict)  # by chain: what could be charged at once


@dataclass(slots=True, kw_only=True)
class PlanOutcome:
    """What carrying out a plan came to."""

    started: list[Instance] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)  # deployments that had requests and so were not unloaded
    lost: list[str] = field(default_factory=list)  # deployments that a failed plan had stopped
    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether something that was started did not become ready."""
        return any(instance.state is InstanceState.FAILED for instance in self.started)


class Applier:
    """Commits on the thread of the loop; carries out in any other."""

    def __init__(
        self, dependencies: Dependencies, lifecycle: Lifecycle, reservations: Reservations, statistics: Statistics, loop: Loop
    ) -> None:
        self._dependencies = dependencies
        self._effects = dependencies.effects
        self._ledger = dependencies.ledger
        self._lifecycle = lifecycle
        self._reservations = reservations
        self._statistics = statistics
        self._loop = loop
        self._open: set[int] = set()  # from the commit until the ledger has its end

    @property
    def is_busy(self) -> bool:
        """Whether an operation is committed and not closed."""
        return bool(self._open)

    # --- on the thread of the loop ---

    def commit(self, plan: Plan, snapshot: Snapshot) -> CommittedPlan:
        """Record what the plan wants and charge or reserve what it needs; all or nothing."""
        self._loop.require()
        names = [*(item.name for item in plan.wants), *plan.unwants]
        before = {name: self._ledger.deployment(name) for name in names}
        operation = CommittedPlan(id=0, plan=plan, snapshot=snapshot, before=before)
        operation.id = self._ledger.begin(plan.operation, plan.record(), frees=plan.operation == "release")
        try:
            self._ledger.unwant(*plan.unwants)
            self._ledger.want(*plan.wants)
            self._claim(operation)
            self._charge_or_reserve(operation)
        except Exception:
            self._restore_wanted(operation, names)
            self._close(operation)
            raise
        self._reservations.begin_ending(_ended(plan))
        self._open.add(operation.id)
        return operation

    def commit_all(self, plans: Sequence[Plan], snapshot: Snapshot) -> list[CommittedPlan]:
        """Several plans in one transaction: all of them or none. They must not need each other's room."""
        committed: list[CommittedPlan] = []
        try:
            with self._ledger.together():
                committed.extend(self.commit(plan, snapshot) for plan in plans)  # those before one that fails are kept
        except BaseException:
            for operation in committed:
                self._let_go(operation)
                self._open.discard(operation.id)
            raise
        return committed

    def _claim(self, operation: CommittedPlan) -> None:
        wanted = {item.name: item for item in operation.plan.wants}
        chains = Counter(name for chain in operation.plan.chains for name in {step.deployment for step in begins_of(chain)})
        for step in operation.plan.begins:
            if step.deployment not in operation.claims:
                deployment = wanted.get(step.deployment, step.prepared.deployment)
                claim = self._reservations.claim(
                    step.deployment, revision_of(deployment), deployment.replicas, chains[step.deployment]
                )
                operation.claims[step.deployment] = claim

    def _charge_or_reserve(self, operation: CommittedPlan) -> None:
        """What begins a chain is charged now, in one write; room for the rest is kept from other plans."""
        at_once: dict[int, list[Begin]] = {}
        for index, chain in enumerate(operation.plan.chains):
            first = next((steps for steps in stages(chain) if not self._frees_nothing(steps)), ())
            if first and first[0].stage is Stage.START:
                at_once[index] = [step for step in first if isinstance(step, Start | Wake | Register)]
        charged = self._charge([step for steps in at_once.values() for step in steps], operation.snapshot)
        for index, steps in at_once.items():
            operation.charged[index] = [charged.pop(0) for _ in steps]
        for index, chain in enumerate(operation.plan.chains):
            later = [step for step in chain if isinstance(step, Start | Wake) and step not in at_once.get(index, ())]
            ending = [step.instance_id for step in chain if isinstance(step, Release | Preempt | Unload | PutToSleep)]
            self._reservations.reserve((operation.id, index), _reserved_grants(operation.id, index, later), ending)
            changing = changing_partitions(chain)
            if changing:
                self._reservations.block((operation.id, index), changing, halted_devices(chain))

    def _frees_nothing(self, steps: Sequence[Step]) -> bool:
        """Whether they only remove instances that failed, and hold nothing any more."""
        instances = [self._ledger.instance(step.instance_id) for step in steps if isinstance(step, Release)]
        return len(instances) == len(steps) and not any(
            one is not None and (one.grants or one.state is not InstanceState.FAILED) for one in instances
        )

    def _charge(self, steps: Sequence[Begin], snapshot: Snapshot) -> list[Charged]:
        capacity = _capacity(snapshot)
        made = [self._make(step, snapshot) for step in steps if isinstance(step, Start | Register)]
        if made:
            self._ledger.charge(*made, capacity=capacity)
        fresh = iter(made)
        charged: list[Charged] = []
        try:
            for step in steps:
                instance = self._charge_again(step, capacity) if isinstance(step, Wake) else next(fresh)
                charged.append((instance, step.prepared))
        except AimGpuError:
            for instance in made:
                self._ledger.release(instance.id)
            raise
        return charged

    def _charge_again(self, step: Wake, capacity: Mapping[str, int]) -> Instance:
        """What sleeps in place holds everything again before it is woken."""
        instance = self._ledger.instance(step.instance_id)
        if instance is None or not instance.sleeps_in_place:
            raise Conflict(f"{step.deployment}: the instance that was to wake is gone", hint="Try again.")
        awake = replace(instance, state=InstanceState.LOADING, grants=awake_grants(instance), reason=None)
        self._ledger.rebook(awake, capacity=capacity)
        return awake

    def _make(self, step: Start | Register, snapshot: Snapshot) -> Instance:
        grouped = self._dependencies.launchers[step.prepared.deployment.launcher].joins_groups
        token = self._effects.new_token()
        return make_instance(step, snapshot, self._dependencies.engines[step.prepared.engine], token, grouped=grouped)

    def _restore_wanted(self, operation: CommittedPlan, names: Sequence[str]) -> None:
        """As before the operation, if it has not changed since."""
        ours = {item.name: item for item in operation.plan.wants}
        for name in names:
            before = operation.before.get(name)
            if self._ledger.deployment(name) != ours.get(name):
                continue
            if before is None:
                self._ledger.unwant(name)
            else:
                self._ledger.want(before)

    def close_left_open(self) -> None:
        """What could not be written at the end of an operation, as on a full disk, is written later."""
        for one in self._ledger.operations():
            if one.id not in self._open:
                self._ledger.finish(one.id)

    def _close(self, operation: CommittedPlan) -> None:
        self._let_go(operation)
        try:
            self._ledger.finish(operation.id)
        finally:
            self._open.discard(operation.id)

    def _let_go(self, operation: CommittedPlan) -> None:
        for index in range(len(operation.plan.chains)):
            self._reservations.drop((operation.id, index))
            self._reservations.unblock((operation.id, index))
        for claim in operation.claims.values():
            self._reservations.end_claim(claim)
        self._reservations.stop_ending(_ended(operation.plan))

    # --- in any other ---

    def run(self, operation: CommittedPlan, emit: Emit) -> PlanOutcome:
        """Chains side by side, the stages of each in order. An error is in the outcome, with what was undone for it."""
        outcome = PlanOutcome()
        with self.closing(operation):
            calls = [_ChainRun(self, operation, index, outcome, emit) for index in range(len(operation.plan.chains))]
            errors = [error for error in side_by_side(calls, "chain", self._effects) if error is not None]
            if not errors:
                self._keep(operation.plan.keeps)
        outcome.error = errors[0] if errors else None
        return outcome

    def _keep(self, changed: Sequence[Deployment]) -> None:
        """What was released meanwhile stays released."""

        def keep() -> None:
            self._ledger.want(*(item for item in changed if self._ledger.deployment(item.name) is not None))

        self._loop.decide(keep)

    @contextmanager
    def closing(self, operation: CommittedPlan) -> Iterator[None]:
        """However it ends, the operation is closed then."""
        try:
            yield
        finally:
            self._loop.decide(lambda: self._close(operation))

    @contextmanager
    def closed_by_errors(self, operation: CommittedPlan | None) -> Iterator[None]:
        """What fails between the commit and the first step ends the operation."""
        try:
            yield
        except BaseException:
            if operation is not None:
                self._loop.decide(lambda: self._close(operation))
            raise

    def end_all(self, steps: Sequence[End], emit: Emit) -> list[bool]:
        """Side by side; for each, False where requests kept it busy."""
        return side_by_side([partial(self.end, step, emit) for step in steps], "end", self._effects)

    def end(self, step: End, emit: Emit) -> bool:
        """False where requests kept it busy."""
        instance = self._ledger.instance(step.instance_id)
        if instance is None:
            return True
        match step:
            case Release():
                self._lifecycle.release(instance, emit)
            case Preempt():
                _announce(step, emit)
                self._lifecycle.preempt(instance, step.reason, emit)
                self._statistics.note_preemption(self._effects.now())
            case Unload():
                self._lifecycle.unload(instance, emit)
            case PutToSleep():
                if step.beneficiary is not None:
                    _announce(step, emit)
                return self._lifecycle.sleep(instance, emit, forced=step.forced)
        return True

    def change_layout(self, step: ChangeLayout, emit: Emit) -> None:
        """Raises where what is read back is not what was asked for."""
        _announce(step, emit)
        hardware = self._dependencies.hardware
        partitions = [part for device in hardware.read_devices() for part in device.layout.partitions if part.id in step.idle]
        ended = self._dependencies.helpers.dismiss([part.uuid for part in partitions if part.uuid is not None])
        if ended:
            emit(Event(kind=EventKind.STEP, text=f"stopped MPS on {', '.join(ended)}"))
        device = hardware.apply_layout(step.device_id, step.after, reload_driver=step.reload_driver)
        if device.layout.name != step.after:
            raise LayoutNotApplied(f"{device.id} reads {device.layout.name} after {step.after} was asked for")

    def restore_layout(self, step: ChangeLayout, emit: Emit) -> None:
        """Undo a half-done change. If that fails too, the layout that is read back is reported."""
        for device_id, layout in step.before:
            try:
                now = {device.id: device.layout.name for device in self._dependencies.hardware.read_devices()}
                if now.get(device_id, layout) == layout:
                    continue
                self._dependencies.hardware.apply_layout(device_id, layout, reload_driver=step.reload_driver)
            except AimGpuError as error:
                text = f"{device_id} could not be set back to {layout}: {error.message}"
                emit(Event(kind=EventKind.STEP, text=text))

    def resize(self, step: ResizeGrant, snapshot: Snapshot) -> None:
        """Larger: charged, then allowed. Smaller: limited, then given back. A failed second half is undone."""
        capacity = _capacity(snapshot)
        grant = next((one for one in self._ledger.grants() if one.id == step.grant_id), None)
        if grant is None:
            raise Conflict(f"{step.instance_id} was released meanwhile")

        def charge(size: int) -> None:
            self._ledger.resize(step.grant_id, size, capacity=capacity)

        def limit(size: int) -> None:
            self._limit(grant, size)

        first, second = (charge, limit) if step.after_bytes > grant.memory_bytes else (limit, charge)
        first(step.after_bytes)
        try:
            second(step.after_bytes)
        except AimGpuError:
            first(grant.memory_bytes)
            raise

    def _limit(self, grant: Grant, memory_bytes: int) -> None:
        if isinstance(self._dependencies.isolator, Resizer):
            self._dependencies.isolator.resize(grant, memory_bytes)

    def charge_stage(self, operation: CommittedPlan, index: int, steps: Sequence[Begin], *, is_last: bool) -> list[Charged]:
        """What other requests released or changed meanwhile is left out; raises Conflict where nothing is left.

        What was not charged with the plan is charged on the layouts as they are now: a partition may be gone since.
        """
        snapshot = operation.snapshot if index in operation.charged else take_snapshot(self._dependencies)

        def charge() -> list[Charged]:
            ready = operation.charged.pop(index, None)
            if ready is None:
                wanted = [now for step in steps if (now := self._as_wanted_now(operation, step)) is not None]
                if steps and not wanted:
                    raise Conflict(f"{steps[0].deployment} was released or changed meanwhile")
                ready = self._charge(wanted, snapshot)
                self._reservations.charged((operation.id, index), _slots_of(steps))
            for instance, prepared in ready:
                if (claim := operation.claims.get(prepared.name)) is not None:
                    claim.starting.add(instance.id)
            for name in {step.deployment for step in steps} if is_last else ():
                self._reservations.end_chain(operation.claims[name])  # other requests for it may go on
            return ready

        return self._loop.decide(charge)

    def _as_wanted_now(self, operation: CommittedPlan, step: Begin) -> Begin | None:
        """With the settings that were amended since it was planned; None where it was released or changed."""
        claim = operation.claims.get(step.deployment)
        wanted = self._ledger.deployment(step.deployment)
        if claim is None or wanted is None or revision_of(wanted) != claim.revision:
            return None
        return replace(step, prepared=replace(step.prepared, deployment=wanted))

    def start(self, operation: CommittedPlan, charged: Sequence[Charged], emit: Emit) -> list[Instance]:
        """All side by side; those that sleep in place have a process already and are woken."""

        def begin(instance: Instance, prepared: Prepared) -> Callable[[], Instance]:
            if instance.process is not None:
                return lambda: self._lifecycle.wake(instance, prepared, emit)
            return lambda: self._lifecycle.start(instance, prepared, emit, gives_up=prepared.name in operation.gives_up)

        loading = [begin(*one) for one in charged if one[0].state is not InstanceState.SLEEPING]
        asleep = [instance for instance, _ in charged if instance.state is InstanceState.SLEEPING]
        for instance in asleep:
            self._lifecycle.announce(instance, emit)
        return [*asleep, *side_by_side(loading, "start", self._effects)]

    def drop_cancelled(self, instances: Sequence[Instance], emit: Emit) -> None:
        """What was started and given up half-way; left to the next daemon where this one ends."""
        side_by_side([partial(self._lifecycle.drop_cancelled, one, emit) for one in instances], "drop", self._effects)

    def forget_preempted(self, steps: Sequence[Preempt]) -> None:
        """They are placed again, not left asleep."""

        def forget() -> None:
            for step in steps:
                instance = self._ledger.instance(step.instance_id)
                if instance is not None and instance.state is InstanceState.SLEEPING and not instance.grants:
                    self._ledger.forget(instance.id)

        self._loop.decide(forget)

    def undo_wanted(self, operation: CommittedPlan, names: Sequence[str]) -> None:
        """What could not be charged is not wanted either: the next start must not bring up what the user was refused."""
        self._loop.decide(lambda: self._restore_wanted(operation, names))


class _ChainRun:
    """One chain of one operation."""

    def __init__(self, applier: Applier, operation: CommittedPlan, index: int, outcome: PlanOutcome, emit: Emit) -> None:
        self._applier = applier
        self._operation = operation
        self._index = index
        self._outcome = outcome
        self._emit = emit
        self._chain: Chain = operation.plan.chains[index]
        self._ended: list[str] = []  # deployments
        self._layouts: list[ChangeLayout] = []
        self._resized: list[ResizeGrant] = []

    def __call__(self) -> Exception | None:
        """Run the chain, and undo its half-done steps if it fails. Returns the error."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever it was, others must not stay stopped for it
            self._outcome.lost += self._ended
            try:
                self._undo()
            except Exception as second:  # noqa: BLE001 - other chains go on, and the operation is closed all the same
                text = f"what was half-done could not be undone: {second}"
                self._emit(Event(kind=EventKind.STEP, text=text))
            return error
        return None

    def _run(self) -> None:
        parts = list(stages(self._chain))
        for number, steps in enumerate(parts):
            if not self._run_stage(steps, is_last=number == len(parts) - 1):
                return

    def _run_stage(self, steps: Sequence[Step], *, is_last: bool) -> bool:
        """Whether to go on with the next."""
        ends = [step for step in steps if isinstance(step, Release | Preempt | Unload | PutToSleep)]
        if ends:
            return self._end(ends)
        for step in steps:
            if isinstance(step, ChangeLayout):
                self._layouts.append(step)
                self._applier.change_layout(step, self._emit)
            elif isinstance(step, ResizeGrant):
                self._applier.resize(step, self._operation.snapshot)
                self._resized.append(step)
        begins = begins_of(steps)
        return self._begin(begins, is_last=is_last) if begins else True

    def _end(self, steps: Sequence[End]) -> bool:
        self._ended += [step.deployment for step in steps if isinstance(step, Release | Preempt)]
        if self._operation.plan.operation == "partition":
            for step in steps:
                _announce(step, self._emit)
        done = self._applier.end_all(steps, self._emit)
        busy = [step.deployment for step, ended in zip(steps, done, strict=True) if not ended]
        self._outcome.busy += busy
        return not busy

    def _begin(self, steps: Sequence[Begin], *, is_last: bool) -> bool:
        """A replacement that fails leaves the replicas that still serve alone."""
        charged = self._applier.charge_stage(self._operation, self._index, steps, is_last=is_last)
        started = self._applier.start(self._operation, charged, self._emit)
        self._outcome.started += started
        good = all(instance.state in (InstanceState.READY, InstanceState.SLEEPING) for instance in started)
        superseded = {step.deployment for step in steps if self._operation.claims[step.deployment].superseded}
        # The request that came later may be refused: then nothing else would end what was given up for it.
        given_up = [one for one in started if one.state is InstanceState.ABSENT and one.deployment in superseded]
        self._applier.drop_cancelled(given_up, self._emit)
        return good and not superseded

    def _undo(self) -> None:
        for step in reversed(self._layouts):
            self._applier.restore_layout(step, self._emit)
        for change in reversed(self._resized):
            back = replace(change, before_bytes=change.after_bytes, after_bytes=change.before_bytes)
            self._applier.resize(back, self._operation.snapshot)
        self._applier.forget_preempted([step for step in self._chain if isinstance(step, Preempt)])
        ours = {item.name for item in self._operation.plan.wants}
        names = [step.deployment for step in self._chain if step.deployment in ours]
        self._applier.undo_wanted(self._operation, list(dict.fromkeys(names)))


def _ended(plan: Plan) -> list[str]:
    return [step.instance_id for step in plan.steps if isinstance(step, Release | Preempt | Unload)]


def _capacity(snapshot: Snapshot) -> dict[str, int]:
    return {part.id: part.memory_bytes for _, state in snapshot.devices() for part in state.device.layout.partitions}


def _slots_of(steps: Sequence[Begin]) -> int:
    return sum(len(step.slots) for step in steps if isinstance(step, Start | Wake))


def _reserved_grants(operation_id: int, index: int, steps: Sequence[Start | Wake]) -> list[Grant]:
    found = []
    for number, step in enumerate(steps):
        owner = step.instance_id if isinstance(step, Wake) else f"reserved-{operation_id}-{index}-{number}"
        priority = step.prepared.deployment.ask.priority
        found += [
            slot.granted(f"{owner}/reserved-{place}", owner, step.deployment, priority, Level.NONE)
            for place, slot in enumerate(step.slots)
        ]
    return found


def _announce(step: Step, emit: Emit) -> None:
    emit(Event(kind=EventKind.STEP, deployment=step.deployment or None, text=step.text))
