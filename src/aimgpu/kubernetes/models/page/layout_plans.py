"""A change of one GPU's layout on a cluster: what it would stop, and the PartitionPlan that carries it out. Pure.

The operator evicts every pod of the node that has a share, not only those on this GPU; their controllers make them again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.control.plan.layout import PlannedLayoutChange
from aimgpu.control.plan.prepared import ask_for
from aimgpu.domain import Ask, Deployment, Device, Placement, Refusal
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import AimGpuError, InvalidInput, UnknownDevice
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.models.page.cluster_sizing import size_in_cluster, snapshot_of
from aimgpu.kubernetes.vocabulary.custom_resources import COMPUTE_MODES, VERSION
from aimgpu.kubernetes.vocabulary.names import GROUP
from aimgpu.placement.decide import decide_all

_DONE = ("Succeeded", "Failed")


def preview_layout(seen: Observation, device_id: str, name: str) -> PlannedLayoutChange:
    """What pods of the node would be evicted, and which of them would fit again. Raises UnknownDevice or UnknownLayout."""
    device = _find(seen, device_id)
    layout, node = find_layout(device, name), _node_of(device_id)
    moved = [one for one in seen.instances if any(grant.node == node for grant in one.grants)]
    changed = replace(
        seen,
        devices=tuple(replace(one, layout=layout) if one is device else one for one in seen.devices),
        instances=tuple(one for one in seen.instances if one not in moved),
        foreign_bytes={gpu: held for gpu, held in seen.foreign_bytes.items() if _node_of(gpu) != node},
    )
    wanted = {one.name: one for one in seen.deployments}
    asks = [ask for one in moved if (ask := _ask(wanted[one.deployment], one.replica, seen)) is not None]
    decisions = decide_all(snapshot_of(changed), asks)
    fits = {ask.name for ask, decision in zip(asks, decisions, strict=True) if isinstance(decision, Placement)}
    return PlannedLayoutChange(
        device_id=device_id,
        before=device.layout.name,
        after=layout.name,
        layouts={device_id: device.layout.name},
        idle=(),
        halted=(),
        needs_reload=False,  # where the driver has to be reloaded the node agent does that, on a node that is drained
        stops=tuple(one.id for one in moved),
        returns=tuple(one.id for one in moved if f"{one.deployment}-{one.replica}" in fits),
        does_not_fit=tuple(one for one in decisions if isinstance(one, Refusal)),
    )


def plan_layout(nodes: Sequence[Object], seen: Observation, device_id: str, name: str) -> Object:
    """The PartitionPlan; another wish for the same GPU has another name."""
    layout, node = find_layout(_find(seen, device_id), name), _node_of(device_id)
    if layout.compute_mode not in COMPUTE_MODES:
        wanted = {"mig": layout.name}
    else:
        wanted = {"computeMode": layout.compute_mode, **({"memoryMode": layout.memory_mode} if layout.memory_mode else {})}
    digest = hashlib.sha256(f"{device_id}/{layout.name}/{seen.taken_at}".encode()).hexdigest()[:10]
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "PartitionPlan",
        "metadata": {"name": f"page-{digest}"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "gpus": [_index_on_node(nodes, node, device_id)],
            "layout": wanted,
        },
    }


def describe_plans(plans: Sequence[Object]) -> list[str]:
    """Those under way, and those that failed, in sentences."""
    found = []
    for plan in sorted(plans, key=lambda one: str(one["metadata"]["name"])):
        status: Mapping[str, Any] = plan.get("status") or {}
        phase = str(status.get("phase") or "Pending")
        if (plan.get("spec") or {}).get("layout") and (phase == "Failed" or phase not in _DONE):
            found.append(f"PartitionPlan {plan['metadata']['name']}: {phase}. {status.get('message') or ''}".strip())
    return found


def _find(seen: Observation, device_id: str) -> Device:
    for device in seen.devices:
        if device.id == device_id:
            return device
    names = ", ".join(device.id for device in seen.devices[:20]) or "none"
    raise UnknownDevice(f"there is no GPU {device_id!r}", hint=f"GPUs here: {names}.")


def _node_of(device_id: str) -> str:
    return device_id.partition("/")[0]


def _index_on_node(nodes: Sequence[Object], node: str, device_id: str) -> int:
    gpus = [gpu for one in nodes if one["metadata"]["name"] == node for gpu in (one.get("status") or {}).get("gpus") or ()]
    for gpu in gpus:
        if f"{node}/{gpu['id']}" == device_id:
            return int(gpu.get("index") or 0)
    raise InvalidInput(f"node {node} does not report {device_id} any more")


def _ask(deployment: Deployment, replica: int, seen: Observation) -> Ask | None:
    """None for a model that cannot be sized: whether it fits again is not known."""
    try:
        return ask_for(size_in_cluster(deployment, seen), replica)
    except AimGpuError:
        return None
