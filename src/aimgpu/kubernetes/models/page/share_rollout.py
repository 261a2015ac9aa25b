"""Another share of a GPU for a model that runs on a cluster: what its pods go through, and whether they fit. Pure.

kube-scheduler charged a share when it allocated the pod's ResourceClaim, an allocation is immutable, and kube-scheduler goes by
nothing else when it places the next pod. So another share is another claim and another pod: the Deployment rolls out. The old
pod serves until the new one is ready where a GPU has room for both; elsewhere it has to end first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.control.plan.prepared import ask_for
from aimgpu.domain import Ask, Decision, Deployment, Instance, InstanceState, Memory, PartitionKind, Placement, Whole
from aimgpu.errors import Conflict, InvalidInput, NotAllowed
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.models.serving.share_request import request_share
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.placement import Snapshot
from aimgpu.placement.decide import decide
from aimgpu.placement.fit import free_bytes
from aimgpu.units import MIB, format_bytes

_UNSEEN = "The cluster's GPUs cannot be seen with these rights, so whether the new pod fits was not checked."
_KEPT = "Applying its stack file again sets the share of that file."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRollout:
    """`surge`: a new pod starts beside an old one; `largest_bytes`: the largest share that would fit now, where known."""

    wanted: Deployment  # with the new share
    memory_bytes: int  # of it on each GPU
    held: tuple[Instance, ...]  # the pods that are replaced
    used: Mapping[str, int | None]  # by pod: measured
    surge: bool
    changed: bool
    largest_bytes: int | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As the API shows it; the same shape as a resize on one machine, and how the pods are replaced."""
        return {
            "model": self.wanted.name,
            "changes": [
                {
                    "instance": one.id,
                    "device": grant.device_id,
                    "partition": grant.partition_id,
                    "mechanism": grant.mechanism,
                    "before_bytes": grant.memory_bytes,
                    "after_bytes": self.memory_bytes,
                    "used_bytes": self.used.get(one.id),
                    "free_bytes": self.largest_bytes,
                }
                for one in self.held
                for grant in one.grants
            ],
            "note": " ".join(self.notes),
            "rollout": {"restarts": bool(self.held) and self.changed, "old_serves": self.surge, "changed": self.changed},
        }


def plan_rollout(seen: Observation, item: Object, name: str, memory_bytes: int) -> ShareRollout:
    """Raises Conflict where the new pods cannot be placed, NotAllowed where the model has no share that has a size."""
    wanted = _want(seen, item, name, memory_bytes)
    present = next(one for one in seen.deployments if one.name == name)
    mine = [one for one in seen.instances if one.deployment == name and one.grants]
    held = tuple(one for one in mine if one.state is not InstanceState.DRAINING)
    rollout = ShareRollout(
        wanted=wanted,
        memory_bytes=_whole_mib(memory_bytes),
        held=held,
        used={one.id: seen.measured_bytes(one.id) for one in held},
        surge=False,
        changed=present.ask.want != wanted.ask.want,
        largest_bytes=None,
        notes=(),
    )
    if not rollout.changed:
        return replace(rollout, notes=(f"It asks for {format_bytes(rollout.memory_bytes)} already: nothing changes.",))
    if not seen.devices:
        return replace(rollout, notes=(*_replacing(rollout, place=None, one_node=False), _UNSEEN, _KEPT))
    return _placed(rollout, seen, mine, one_node=_mounts_a_claim(item))


def _placed(rollout: ShareRollout, seen: Observation, mine: Sequence[Instance], *, one_node: bool) -> ShareRollout:
    now = snapshot_of(seen)
    prepared = size_in_cluster(rollout.wanted, seen)
    ask = ask_for(prepared, 0)
    emptied = _without(now, mine)
    free = [free_bytes(state, part) for _, state in emptied.devices() for part in state.device.layout.partitions]
    rollout = replace(rollout, largest_bytes=max([0, *free]))
    if rollout.memory_bytes < prepared.footprint.total_bytes:
        needed = format_bytes(prepared.footprint.total_bytes, up=True)
        raise Conflict(
            f"{rollout.wanted.name} needs {needed} to start; {format_bytes(rollout.memory_bytes)} is less",
            hint=f"Ask for {needed} to {format_bytes(rollout.largest_bytes or 0)}, or edit it to need less: a shorter context.",
        )
    surge = bool(rollout.held) and not one_node and isinstance(_roll(now, ask, rollout.held, surge=True), Placement)
    ending = [] if surge else [one for one in mine if one not in rollout.held]
    decision = _roll(_without(now, ending), ask, rollout.held, surge=surge)
    if not isinstance(decision, Placement):
        size, why = format_bytes(rollout.memory_bytes), "; ".join(f"{one.device_id} {one.text}" for one in decision.reasons[:4])
        raise Conflict(
            f"no GPU of the cluster has room for a pod of {rollout.wanted.name} with {size}: {why or decision.summary}",
            hint=f"Up to {format_bytes(rollout.largest_bytes or 0)} would fit now.",
        )
    rollout = replace(rollout, surge=surge)
    return replace(rollout, notes=(*_replacing(rollout, decision, one_node=one_node), _KEPT))


def _want(seen: Observation, item: Object, name: str, memory_bytes: int) -> Deployment:
    if memory_bytes < 1:
        raise InvalidInput("a share of no memory", hint="Ask for more than 0 bytes.")
    metadata = item["metadata"]
    if not (
        labels.MANAGED.items() <= (metadata.get("labels") or {}).items() and labels.ENTRY in metadata.get("annotations", {})
    ):
        raise NotAllowed(
            f"Deployment {metadata['namespace']}/{metadata['name']} was not made by this version of aimgpu",
            hint="Change the annotation gpu-memory (MiB) of its pods where it is written.",
        )
    present = next(one for one in seen.deployments if one.name == name)
    if isinstance(present.ask.want, Whole | PartitionKind):
        kind = "whole GPUs" if isinstance(present.ask.want, Whole) else f"partitions of kind {present.ask.want.kind}"
        raise NotAllowed(f"{name} asks for {kind}, which have no other size", hint="Edit it to ask for memory instead.")
    wanted = replace(present, ask=replace(present.ask, want=Memory(memory_bytes=_whole_mib(memory_bytes))))
    request_share(wanted)  # raises for what a cluster cannot give
    return wanted


def _whole_mib(memory_bytes: int) -> int:
    """What an annotation can say."""
    return -(-memory_bytes // MIB) * MIB


def _roll(world: Snapshot, ask: Ask, held: Sequence[Instance], *, surge: bool) -> Decision:
    """One pod after another, as a rolling update does it; the first that has no place ends it. No pod: one that will start."""
    if not held:
        return decide(world, ask)
    for number, one in enumerate(held):
        world = world if surge else world.without_instance(one.id)
        pod = replace(ask, name=f"{ask.name}-new-{number}")
        decision = decide(world, pod)
        if not isinstance(decision, Placement):
            break
        world = world.with_placement(pod, decision)
        world = world.without_instance(one.id) if surge else world
    return decision


def _without(world: Snapshot, instances: Sequence[Instance]) -> Snapshot:
    for one in instances:
        world = world.without_instance(one.id)
    return world


def _replacing(rollout: ShareRollout, place: Placement | None, *, one_node: bool) -> Iterator[str]:
    """How its pods are replaced, in sentences."""
    size, count = format_bytes(rollout.memory_bytes), len(rollout.held)
    where = f" on {', '.join(slot.partition_id for slot in place.slots)}" if place else ""
    if not count:
        yield f"No pod runs: the next one starts with {size}{where}."
        return
    pods = "Its pod is" if count == 1 else f"Its {count} pods are"
    yield f"{pods} restarted with {size}{where}{'' if count == 1 else ', one at a time'}."
    if rollout.surge:
        yield "The old pod answers until the new one is ready: there is room for both."
        return
    if one_node:
        why = "Its downloads are on a volume that one node mounts at a time"
    else:
        why = "There is no room for the old and the new pod at once" if place else "Whether there is room for both is not known"
    rest = "does not answer" if count == 1 else f"answers with {count - 1} of {count} copies"
    yield f"{why}, so the old pod ends first, and the model {rest} until the new one is ready."


def _mounts_a_claim(item: Object) -> bool:
    spec = (((item.get("spec") or {}).get("template") or {}).get("spec")) or {}
    return any("persistentVolumeClaim" in volume for volume in spec.get("volumes") or ())
