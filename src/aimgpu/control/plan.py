"""What applying a stack would do, decided on a snapshot before anything is done. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from aimgpu.domain import Ask, Deployment, Footprint, Instance, InstanceState, Placement, Refusal, Slot
from aimgpu.placement import Snapshot, decide_all
from aimgpu.units import format_bytes

GONE = frozenset({InstanceState.FAILED, InstanceState.ABSENT})


class StepKind(StrEnum):
    RELEASE = "release"
    DEPLOY = "deploy"


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
    instance_id: str | None = None  # of the one to release
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

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [step.to_json() for step in self.steps],
            "refusals": [refusal_json(refusal) for refusal in self.refusals],
            "unchanged": list(self.unchanged),
        }


def needs_work(deployment: Deployment, wanted: Mapping[str, Deployment], running: Sequence[Instance]) -> bool:
    """Whether applying this deployment would change anything."""
    live = {instance.replica for instance in running if instance.state not in GONE}
    return wanted.get(deployment.name) != deployment or live != set(range(deployment.replicas))


def make_plan(
    prepared: Sequence[Prepared], wanted: Mapping[str, Deployment], running: Iterable[Instance], snapshot: Snapshot
) -> Plan:
    """Release what changed, deploy what is missing; the snapshot is looked at as if the released were gone."""
    by_name: dict[str, list[Instance]] = {}
    for instance in running:
        by_name.setdefault(instance.deployment, []).append(instance)
    releases: list[Step] = []
    missing: list[tuple[Prepared, int]] = []
    for item in prepared:
        existing = by_name.get(item.deployment.name, [])
        keep = _kept(item.deployment, wanted.get(item.deployment.name), existing)
        releases += [_release_step(instance) for instance in existing if instance.replica not in keep]
        missing += [(item, replica) for replica in range(item.deployment.replicas) if replica not in keep]
    gone = [step.instance_id for step in releases]
    asks = [ask_for(item, replica) for item, replica in missing]
    decisions = decide_all(without_instances(snapshot, gone), asks)
    refusals = tuple(decision for decision in decisions if isinstance(decision, Refusal))
    if refusals:
        return Plan(refusals=refusals)
    deploys = [
        _deploy_step(item, replica, decision)
        for (item, replica), decision in zip(missing, decisions, strict=True)
        if isinstance(decision, Placement)
    ]
    return Plan(steps=(*releases, *deploys))


def ask_for(item: Prepared, replica: int) -> Ask:
    deployment = item.deployment
    return replace(
        deployment.ask,
        name=f"{deployment.name}-{replica}",
        deployment=deployment.name,
        footprint_bytes=item.footprint.total_bytes,
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


def _kept(new: Deployment, old: Deployment | None, existing: Sequence[Instance]) -> set[int]:
    if old is None or replace(old, replicas=new.replicas) != new:
        return set()
    return {i.replica for i in existing if i.state not in GONE and i.replica < new.replicas}


def _release_step(instance: Instance) -> Step:
    return Step(
        kind=StepKind.RELEASE,
        deployment=instance.deployment,
        replica=instance.replica,
        instance_id=instance.id,
        text=f"stop {instance.id} and give back {format_bytes(sum(grant.memory_bytes for grant in instance.grants))}",
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
