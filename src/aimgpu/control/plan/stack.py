"""What applying a stack would do, decided on one snapshot before anything is done. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.plan.asleep import least_unloading
from aimgpu.control.plan.order import Replacement, order_steps
from aimgpu.control.plan.prepared import Prepared, ask_for, revision_of
from aimgpu.control.plan.steps import (
    GONE,
    Begin,
    Chain,
    ControlState,
    Plan,
    Register,
    Start,
    Step,
    Unload,
    Wake,
    without_instances,
)
from aimgpu.domain import Deployment, Instance, InstanceState, Placement, Refusal, RestartPolicy
from aimgpu.placement import Snapshot
from aimgpu.placement.decide import decide_all

COMES_AFTER = "it comes after "
_SETTLED = frozenset({InstanceState.READY, InstanceState.SLEEPING, InstanceState.ENDED, InstanceState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentChanges:
    """How one deployment differs from what runs of it."""

    item: Prepared
    olds: Mapping[int, tuple[Instance, ...]]  # by replica: what must end
    missing: tuple[int, ...]  # replicas to start

    @property
    def surplus(self) -> tuple[Instance, ...]:
        """What ends without anything in its place."""
        return tuple(old for replica, olds in self.olds.items() if replica not in self.missing for old in olds)


def needs_work(deployment: Deployment, wanted: Mapping[str, Deployment], running: Sequence[Instance]) -> bool:
    """Whether applying this deployment would change anything."""
    current = kept_instances(deployment, wanted.get(deployment.name), running, GONE)
    surplus = any(one.state in _SETTLED and one not in current for one in running)
    complete = {one.replica for one in current} == set(range(deployment.replicas))
    return surplus or not complete or wanted.get(deployment.name) != deployment


def plan_stack(
    prepared: Sequence[Prepared], state: ControlState, *, deployments: Sequence[Deployment] = (), prune: bool = False
) -> Plan:
    """Replace what changed, start what is missing, and with `prune` release everything that is not among `deployments`.

    What need not be kept loaded and does not fit now is registered, to be woken by a request. What sleeps in place and holds
    memory that is needed is unloaded.
    """
    held = {item.name: reason for item in prepared if (reason := find_hold(item.deployment, state)) is not None}
    if held:
        return _without_held(prepared, state, held, deployments=deployments, prune=prune)
    names = {item.name for item in deployments} | {item.name for item in prepared}
    beside = tuple(name for name, item in state.wanted.items() if name not in names and not item.has_caller)
    going = [one for one in state.running if prune and one.deployment in beside]
    left = replace(
        state,
        wanted={name: item for name, item in state.wanted.items() if not (prune and name in beside)},
        running=tuple(one for one in state.running if one not in going),
        snapshot=without_instances(state.snapshot, [one.id for one in going]),
    )
    plan = _with_unloads(prepared, left, state.snapshot, going)
    changed = {item.name for item in prepared}
    return replace(
        plan,
        unchanged=tuple(item.name for item in deployments if item.name not in changed),
        beside=() if prune else beside,
        wants=() if plan.refusals else tuple(deployments),
        unwants=() if plan.refusals or not prune else beside,
    )


def plan_stack_with_queue(
    prepared: Sequence[Prepared], state: ControlState, *, deployments: Sequence[Deployment] = (), prune: bool = False
) -> Plan:
    """As `plan_stack`, but what is wanted already, as it is, and has no room yet stays queued instead of being refused.

    So applying the same stack again, also after a crash, changes nothing.
    """
    plan = plan_stack(prepared, state, deployments=deployments, prune=prune)
    waiting = {item.name for item in prepared if state.wanted.get(item.name) == item.deployment and not state.of(item.name)}
    refused = set(plan.refused)
    if not refused or not refused <= waiting:
        return plan
    rest = [item for item in prepared if item.name not in refused]
    return replace(
        plan_stack(rest, state, deployments=deployments, prune=prune), queued=tuple(sorted({*plan.queued, *refused}))
    )


def find_hold(deployment: Deployment, state: ControlState) -> str | None:
    """Why a program that comes after others does not start yet; None: it may, or it runs already."""
    program = deployment.overrides.program
    if program is None or state.of(deployment.name):
        return None
    for name in program.after:
        found = state.of(name)
        before = state.wanted[name].overrides.program if name in state.wanted else None
        if before is not None and before.restart is not RestartPolicy.ALWAYS:
            good = bool(found) and all(one.end is not None and one.end.exit_code == 0 for one in found)
        else:
            good = any(one.state in (InstanceState.READY, InstanceState.SLEEPING) for one in found)
        if not good:
            states = ", ".join(dict.fromkeys(one.reason or one.state.value for one in found)) or "not started"
            return f"{COMES_AFTER}{name} ({states})"
    return None


def _without_held(
    prepared: Sequence[Prepared],
    state: ControlState,
    held: Mapping[str, str],
    *,
    deployments: Sequence[Deployment],
    prune: bool,
) -> Plan:
    """What is asked for the first time is wanted and waits; what is tried again is refused with what it waits for."""
    again = [item for item in prepared if item.name in held and state.wanted.get(item.name) == item.deployment]
    if again:
        refusals = tuple(Refusal(ask=item.name, summary=held[item.name], reasons=()) for item in again)
        return Plan(refusals=refusals, refused=tuple(item.name for item in again))
    rest = [item for item in prepared if item.name not in held]
    plan = plan_stack(rest, state, deployments=deployments, prune=prune)
    return plan if plan.refusals else replace(plan, queued=tuple(sorted(held)))


def find_changes(
    prepared: Sequence[Prepared], state: ControlState, gone: frozenset[InstanceState] = GONE
) -> tuple[DeploymentChanges, ...]:
    """What must end because it changed or is gone, and which replicas are then missing; those kept loaded first."""
    found = []
    for item in sorted(prepared, key=lambda item: item.deployment.keep_seconds is not None):
        existing = state.of(item.name)
        keep = kept_instances(item.deployment, state.wanted.get(item.name), existing, gone)
        olds: dict[int, tuple[Instance, ...]] = {}
        for instance in existing:
            if instance not in keep:
                olds[instance.replica] = (*olds.get(instance.replica, ()), instance)
        there = {instance.replica for instance in keep}
        missing = tuple(replica for replica in range(item.deployment.replicas) if replica not in there)
        found.append(DeploymentChanges(item=item, olds=olds, missing=missing))
    return tuple(found)


def kept_instances(
    new: Deployment, old: Deployment | None, existing: Iterable[Instance], gone: frozenset[InstanceState]
) -> tuple[Instance, ...]:
    """Those that stay as they are, one per replica: other objectives or more copies change nothing about one that runs."""
    revision = revision_of(new)
    same = old is not None and revision_of(old) == revision
    resized = old is not None and old.resized_bytes != new.resized_bytes
    kept: dict[int, Instance] = {}
    for instance in existing:
        current = instance.revision == revision if instance.revision is not None else same
        if current and not resized and instance.state not in gone and instance.replica < new.replicas:
            kept.setdefault(instance.replica, instance)
    return tuple(kept.values())


def _with_unloads(prepared: Sequence[Prepared], state: ControlState, before: Snapshot, going: Sequence[Instance]) -> Plan:
    """The fewest sleepers are unloaded that let everything run; none where that does not help."""
    names = {item.name for item in prepared}

    def attempt(unloaded: Sequence[Instance]) -> Plan:
        left = replace(state, snapshot=without_instances(state.snapshot, [one.id for one in unloaded]))
        whole = before if not unloaded else None
        return _plan_once(prepared, left, whole, [Unload.of(one) for one in unloaded], going)

    def is_enough(unloaded: Sequence[Instance]) -> bool:
        plan = attempt(unloaded)
        return not plan.refusals and not any(isinstance(step, Register) for step in plan.steps)

    sleepers = [one for one in state.running if one.sleeps_in_place and one.grants and one.deployment not in names]
    if not sleepers or is_enough(()):
        return attempt(())
    chosen = least_unloading(sleepers, is_enough)
    if chosen is not None:
        return attempt(chosen)
    return attempt(sleepers) if attempt(()).refusals else attempt(())


def _plan_once(
    prepared: Sequence[Prepared],
    state: ControlState,
    before: Snapshot | None,
    unloads: Sequence[Unload],
    going: Sequence[Instance],
) -> Plan:
    """`before`: the snapshot with everything that goes still in place, where replacing side by side may be tried."""
    changes = find_changes(prepared, state)
    missing = [(each.item, replica) for each in changes for replica in each.missing]
    serving = [old for each in changes for olds in each.olds.values() for old in olds if old.state is InstanceState.READY]
    if before is not None and serving and missing:
        idle = [old.id for each in changes for olds in each.olds.values() for old in olds if old not in serving]
        beside = decide_all(without_instances(before, idle), [ask_for(item, replica) for item, replica in missing])
        if all(isinstance(decision, Placement) for decision in beside):
            return _plan_of(changes, dict(zip(_keys(missing), beside, strict=True)), before, (), going)
    ends = [old.id for each in changes for olds in each.olds.values() for old in olds]
    after = without_instances(state.snapshot, ends)
    decisions = dict(zip(_keys(missing), decide_all(after, [ask_for(*one) for one in missing]), strict=True))
    settled: dict[tuple[str, int], Placement | Refusal | Register] = {}
    refusals: list[Refusal] = []
    refused: list[str] = []
    for (item, replica), decision in zip(missing, decisions.values(), strict=True):
        settled[item.name, replica] = decision
        if isinstance(decision, Refusal):
            if item.deployment.keep_seconds is not None and _could_wake(after, state.wanted, missing, (item, replica)):
                settled[item.name, replica] = Register(prepared=item, replica=replica, reason=decision.summary)
            else:
                refusals.append(decision)
                refused.append(item.name)
    if refusals:
        return Plan(refusals=tuple(refusals), refused=tuple(refused))
    return _plan_of(changes, settled, before or state.snapshot, unloads, going)


def _keys(missing: Sequence[tuple[Prepared, int]]) -> list[tuple[str, int]]:
    """By name and replica, as decisions are looked up."""
    return [(item.name, replica) for item, replica in missing]


def _plan_of(
    changes: Sequence[DeploymentChanges],
    decisions: Mapping[tuple[str, int], Placement | Refusal | Register],
    snapshot: Snapshot,
    unloads: Sequence[Unload],
    going: Sequence[Instance],
) -> Plan:
    groups = [
        [
            Replacement(olds=each.olds.get(replica, ()), begin=_begin(each.item, replica, decisions[each.item.name, replica]))
            for replica in each.missing
        ]
        for each in changes
    ]
    surplus = [old for each in changes for old in each.surplus]
    return Plan(chains=order_steps(groups, snapshot, unloads=unloads, going=[*going, *surplus]))


def _begin(item: Prepared, replica: int, decision: Placement | Refusal | Register) -> Begin:
    if isinstance(decision, Placement):
        return Start(prepared=item, replica=replica, placement=decision)
    if isinstance(decision, Register):
        return decision
    raise TypeError(decision)


def _could_wake(
    snapshot: Snapshot, wanted: Mapping[str, Deployment], missing: Sequence[tuple[Prepared, int]], one: tuple[Prepared, int]
) -> bool:
    """Whether it could ever run here: with all that may be unloaded out of the way, beside all that is kept loaded."""
    held = {grant.instance_id: grant.deployment for _, state in snapshot.devices() for grant in state.grants}
    unloadable = sorted(name for name, owner in held.items() if owner in wanted and wanted[owner].keep_seconds is not None)
    always = [ask_for(other, number) for other, number in missing if other.deployment.keep_seconds is None]
    *_, decision = decide_all(without_instances(snapshot, unloadable), [*always, ask_for(*one)])
    return isinstance(decision, Placement)


def split_plan(plan: Plan) -> dict[str, Plan] | None:
    """By the names that it wants; None where the steps of several deployments depend on each other."""
    chains: dict[str, list[Chain]] = {deployment.name: [] for deployment in plan.wants}
    for chain in plan.chains:
        for name, part in _split_chain(chain).items():
            if name not in chains:
                return None
            chains[name].append(part)
        if len({step.deployment for step in chain}) > 1 and not all(
            isinstance(step, Start | Wake | Register) for step in chain
        ):
            return None
    return {
        deployment.name: replace(plan, chains=tuple(chains[deployment.name]), wants=(deployment,)) for deployment in plan.wants
    }


def _split_chain(chain: Chain) -> dict[str, Chain]:
    found: dict[str, list[Step]] = {}
    for step in chain:
        found.setdefault(step.deployment, []).append(step)
    return {name: tuple(steps) for name, steps in found.items()}


def carry_over(
    deployments: Sequence[Deployment], wanted: Iterable[Deployment], running: Iterable[Instance]
) -> tuple[Deployment, ...]:
    """With the resized share of what runs and is wanted exactly so already. What changed, or does not run, is as written."""
    known = {deployment.name: deployment for deployment in wanted if deployment.resized_bytes is not None}
    live = {instance.deployment for instance in running if instance.state not in GONE}
    return tuple(_carried(item, known[item.name]) if item.name in known.keys() & live else item for item in deployments)


def _carried(new: Deployment, old: Deployment) -> Deployment:
    resized = replace(new, resized_bytes=old.resized_bytes)
    return resized if old.with_live_settings_of(new) == resized else new
