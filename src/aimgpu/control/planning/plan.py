"""What applying a stack would do, decided on a snapshot before anything is done. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from aimgpu.control.sleep.grants import awake_grants
from aimgpu.control.sleep.waking import as_if_asleep, can_wake_in_place, least_unloading, with_grants
from aimgpu.domain import Ask, Deployment, Footprint, Grant, Instance, InstanceState, Memory, Placement, Refusal, Slot
from aimgpu.placement import Snapshot
from aimgpu.placement.affinity import anti_affinity
from aimgpu.placement.decide import decide_all
from aimgpu.units import format_bytes

GONE = frozenset({InstanceState.FAILED, InstanceState.ABSENT})


class StepKind(StrEnum):
    RELEASE = "release"
    DEPLOY = "deploy"
    SLEEP = "sleep"  # known, not loaded: a request will wake it
    WAKE = "wake"  # sleeps in place, and what it needs is free there
    UNLOAD = "unload"  # sleeps in place, and what it still holds is needed
    LAYOUT = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A deployment whose model was found and sized, and whose engine was chosen."""

    deployment: Deployment
    engine: str
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    kind: StepKind
    deployment: str
    text: str
    replica: int = 0
    instance_id: str | None = None  # of the one to release, wake or unload
    placement: Placement | None = None
    prepared: Prepared | None = None

    def to_json(self) -> dict[str, Any]:
        slots = self.placement.slots if self.placement else ()
        return {
            "kind": self.kind.value,
            "deployment": self.deployment,
            "replica": self.replica,
            "text": self.text,
            "slots": [_slot_json(slot) for slot in slots],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Ordered steps; with refusals there are none, because a stack is taken whole or not at all."""

    steps: tuple[Step, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    unchanged: tuple[str, ...] = field(default=())
    beside: tuple[str, ...] = ()  # deployments that are wanted too, and left as they are

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [step.to_json() for step in self.steps],
            "refusals": [refusal_json(refusal) for refusal in self.refusals],
            "unchanged": list(self.unchanged),
            "beside": list(self.beside),
        }


def needs_work(deployment: Deployment, wanted: Mapping[str, Deployment], running: Sequence[Instance]) -> bool:
    """Whether applying this deployment would change anything."""
    live = {instance.replica for instance in running if instance.state not in GONE}
    return wanted.get(deployment.name) != deployment or live != set(range(deployment.replicas))


def make_plan(
    prepared: Sequence[Prepared],
    wanted: Mapping[str, Deployment],
    running: Iterable[Instance],
    snapshot: Snapshot,
    *,
    waking: bool = False,
) -> Plan:
    """Release what changed, deploy what is missing; the snapshot is looked at as if the released were gone.

    What need not be kept always and does not fit now is put to sleep, unless this is to wake it. What sleeps in place and holds
    memory that is needed is unloaded.
    """
    running = list(running)
    names = {item.deployment.name for item in prepared}

    def attempt(unloaded: Sequence[Instance]) -> Plan:
        left = without_instances(snapshot, [sleeper.id for sleeper in unloaded])
        plan = _plan_once(prepared, wanted, running, left, waking=waking)
        return replace(plan, steps=(*(unload_step(sleeper) for sleeper in unloaded), *plan.steps)) if plan.steps else plan

    def is_enough(unloaded: Sequence[Instance]) -> bool:
        plan = attempt(unloaded)
        return not plan.refusals and not any(step.kind is StepKind.SLEEP for step in plan.steps)

    sleepers = [one for one in running if one.sleeps_in_place and one.grants and one.deployment not in names]
    if not sleepers or is_enough(()):
        return attempt(())
    chosen = least_unloading(sleepers, is_enough)
    if chosen is not None:
        return attempt(chosen)
    with_all = attempt(sleepers)
    return with_all if attempt(()).refusals else attempt(())


def _plan_once(
    prepared: Sequence[Prepared],
    wanted: Mapping[str, Deployment],
    running: Sequence[Instance],
    snapshot: Snapshot,
    *,
    waking: bool,
) -> Plan:
    gone = GONE | {InstanceState.SLEEPING} if waking else GONE
    wakes, running, snapshot = _find_wakes(prepared, running, snapshot) if waking else ([], running, snapshot)
    releases, missing = find_changes(prepared, wanted, running, gone)
    after = without_instances(snapshot, [step.instance_id for step in releases])
    decisions = decide_all(after, [ask_for(item, replica) for item, replica in missing])
    steps: list[Step] = []
    refusals: list[Refusal] = []
    for (item, replica), decision in zip(missing, decisions, strict=True):
        if isinstance(decision, Placement):
            steps.append(_deploy_step(item, replica, decision))
        elif not waking and item.deployment.keep_seconds is not None and _could_wake(after, wanted, missing, (item, replica)):
            steps.append(_sleep_step(item, replica, decision))
        else:
            refusals.append(decision)
    return Plan(refusals=tuple(refusals)) if refusals else Plan(steps=(*releases, *wakes, *steps))


def _find_wakes(
    prepared: Sequence[Prepared], running: Sequence[Instance], snapshot: Snapshot
) -> tuple[list[Step], list[Instance], Snapshot]:
    """Who of these can wake where it sleeps; with the world as it is once they have what they need."""
    items = {item.deployment.name: item for item in prepared}
    steps: list[Step] = []
    after: list[Instance] = []
    for instance in running:
        item = items.get(instance.deployment)
        if item is not None and can_wake_in_place(snapshot, instance, _avoided(snapshot, item.deployment)):
            grants = awake_grants(instance)
            snapshot = with_grants(snapshot, instance.id, grants)
            steps.append(_wake_step(item, instance, grants))
            after.append(replace(instance, state=InstanceState.LOADING, grants=grants))
        else:
            after.append(instance)
    return steps, after, snapshot


def _avoided(snapshot: Snapshot, deployment: Deployment) -> frozenset[str]:
    """Deployments that it does not want beside it, and that do not want it."""
    shunners = anti_affinity(snapshot.running.values()).get(deployment.name, frozenset())
    return deployment.ask.not_with_deployments | shunners


def fits_without(
    item: Prepared, wanted: Mapping[str, Deployment], running: Sequence[Instance], snapshot: Snapshot
) -> Callable[[Collection[str]], bool]:
    """Whether it could wake once the deployments of these names sleep."""

    def fits(names: Collection[str]) -> bool:
        left, after = as_if_asleep(snapshot, running, names)
        return not make_plan([item], wanted, after, left, waking=True).refusals

    return fits


def find_changes(
    prepared: Sequence[Prepared],
    wanted: Mapping[str, Deployment],
    running: Iterable[Instance],
    gone: frozenset[InstanceState] = GONE,
) -> tuple[list[Step], list[tuple[Prepared, int]]]:
    """What must be released because it changed or is gone, and which replicas are then missing; kept-always ones first."""
    by_name: dict[str, list[Instance]] = {}
    for instance in running:
        by_name.setdefault(instance.deployment, []).append(instance)
    releases: list[Step] = []
    missing: list[tuple[Prepared, int]] = []
    for item in sorted(prepared, key=lambda item: item.deployment.keep_seconds is not None):
        existing = by_name.get(item.deployment.name, [])
        keep = _kept(item.deployment, wanted.get(item.deployment.name), existing, gone)
        releases += [release_step(instance) for instance in existing if instance.replica not in keep]
        missing += [(item, replica) for replica in range(item.deployment.replicas) if replica not in keep]
    return releases, missing


def _could_wake(
    snapshot: Snapshot, wanted: Mapping[str, Deployment], missing: Sequence[tuple[Prepared, int]], one: tuple[Prepared, int]
) -> bool:
    """Whether it could ever run here: with all that may be unloaded out of the way, beside all that is kept always."""
    held = {grant.instance_id: grant.deployment for _, state in snapshot.devices() for grant in state.grants}
    unloadable = sorted(name for name, owner in held.items() if owner in wanted and wanted[owner].keep_seconds is not None)
    always = [ask_for(other, number) for other, number in missing if other.deployment.keep_seconds is None]
    *_, decision = decide_all(without_instances(snapshot, unloadable), [*always, ask_for(*one)])
    return isinstance(decision, Placement)


def _sleep_step(item: Prepared, replica: int, refusal: Refusal) -> Step:
    name = item.deployment.name
    text = f"keep {name} unloaded until a request wakes it: {refusal.summary}"
    return Step(kind=StepKind.SLEEP, deployment=name, replica=replica, text=text, prepared=item)


def ask_for(item: Prepared, replica: int) -> Ask:
    deployment = item.deployment
    ask = deployment.present_ask
    if deployment.resized_bytes is not None:  # it may have been made smaller than what it takes to start
        ask = replace(ask, want=Memory(memory_bytes=max(deployment.resized_bytes, item.footprint.total_bytes)))
    return replace(
        ask,
        name=f"{deployment.name}-{replica}",
        deployment=deployment.name,
        footprint_bytes=item.footprint.total_bytes,
        least_bytes=item.footprint.least_bytes,
        divided=item.footprint.divided,
    )


def without_instances(snapshot: Snapshot, instance_ids: Iterable[str | None]) -> Snapshot:
    """The snapshot as it will be once these instances are gone."""
    for instance_id in instance_ids:
        if instance_id is not None:
            snapshot = snapshot.without_instance(instance_id)
    return snapshot


def refusal_json(refusal: Refusal) -> dict[str, Any]:
    return {
        "ask": refusal.ask,
        "summary": refusal.summary,
        "reasons": [
            {"node": r.node, "device": r.device_id, "code": r.code, "text": r.text, "short_bytes": r.short_bytes}
            for r in refusal.reasons
        ],
        "would_fit": list(refusal.would_fit),
    }


def _kept(new: Deployment, old: Deployment | None, existing: Sequence[Instance], gone: frozenset[InstanceState]) -> set[int]:
    """Which replicas stay as they are: other promises, or more copies, change nothing about one that runs."""
    if old is None or old.with_live_settings_of(new) != new:
        return set()
    return {i.replica for i in existing if i.state not in gone and i.replica < new.replicas}


def release_step(instance: Instance) -> Step:
    return Step(
        kind=StepKind.RELEASE,
        deployment=instance.deployment,
        replica=instance.replica,
        instance_id=instance.id,
        text=f"stop {instance.id} and give back {format_bytes(sum(grant.memory_bytes for grant in instance.grants))}",
    )


def _wake_step(item: Prepared, instance: Instance, grants: Sequence[Grant]) -> Step:
    where = ", ".join(f"{format_bytes(grant.memory_bytes)} of {grant.partition_id}" for grant in grants)
    return Step(
        kind=StepKind.WAKE,
        deployment=instance.deployment,
        replica=instance.replica,
        instance_id=instance.id,
        text=f"wake {instance.deployment} where it sleeps, with {where}",
        prepared=item,
    )


def unload_step(instance: Instance) -> Step:
    held = format_bytes(sum(grant.memory_bytes for grant in instance.grants))
    return Step(
        kind=StepKind.UNLOAD,
        deployment=instance.deployment,
        replica=instance.replica,
        instance_id=instance.id,
        text=f"stop {instance.id}, which sleeps, for the {held} that it holds; a request starts it again",
    )


def _deploy_step(item: Prepared, replica: int, placement: Placement) -> Step:
    where = ", ".join(f"{format_bytes(slot.memory_bytes)} of {slot.partition_id}" for slot in placement.slots)
    name = item.deployment.name
    return Step(
        kind=StepKind.DEPLOY,
        deployment=name,
        replica=replica,
        text=f"start {name} ({item.deployment.model}, {item.engine}) on {where}: {placement.because}",
        placement=placement,
        prepared=item,
    )


def _slot_json(slot: Slot) -> dict[str, Any]:
    return {
        "node": slot.node,
        "device": slot.device_id,
        "partition": slot.partition_id,
        "memory_bytes": slot.memory_bytes,
        "compute_ppm": slot.compute_ppm,
        "exclusive": slot.exclusive,
    }
