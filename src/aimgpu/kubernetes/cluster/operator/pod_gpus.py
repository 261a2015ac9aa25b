"""Where a pod names GPUs: its claims, its limits of extended resources, and the claim that kube-scheduler makes. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.vocabulary.annotations import asks_in_vain
from aimgpu.kubernetes.vocabulary.names import (
    CLASSES,
    DRIVER,
    KAI_RESERVATIONS,
    LABEL_SHARE,
    MANAGED_BY,
    PARTITION_CLASS,
    PARTITION_RESOURCE,
    SHARED_CLASS,
    SHARED_RESOURCE,
    WHOLE_CLASS,
    WHOLE_RESOURCE,
)

_BY_CLASS = "deviceclass.resource.kubernetes.io/"  # a limit that names a DeviceClass itself
CLASS_OF_RESOURCE = {
    WHOLE_RESOURCE: WHOLE_CLASS,
    PARTITION_RESOURCE: PARTITION_CLASS,
    SHARED_RESOURCE: SHARED_CLASS,
    **{f"{_BY_CLASS}{name}": name for name in CLASSES},
}
_FINISHED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClaim:
    """A claim that a pod names; `shared`: others may name it too, and who uses it is in the claim."""

    name: str
    shared: bool = False


def may_ask(pod: Mapping[str, Any]) -> bool:
    """Whether a pod can concern us, by its spec alone: most of a cluster's pods have neither claims nor such limits."""
    if pod["metadata"].get("namespace") == KAI_RESERVATIONS:  # holds a GPU for KAI-Scheduler and is nobody's workload
        return False
    claims = (pod.get("spec") or {}).get("resourceClaims")
    return is_marked(pod) or bool(claims) or bool(limits_of(pod)) or asks_in_vain(pod)


def is_marked(pod: Mapping[str, Any]) -> bool:
    """By admission, which made its claim."""
    return LABEL_SHARE in (pod["metadata"].get("labels") or {})


def is_finished(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in _FINISHED


def node_of(pod: Mapping[str, Any]) -> str:
    """Empty: it has none yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def limits_of(pod: Mapping[str, Any]) -> dict[str, int]:
    """How many of each extended resource the pod takes from its node; init containers leave theirs to those after them."""
    spec = pod.get("spec") or {}
    together: dict[str, int] = {}
    for container in (*(spec.get("containers") or ()), *filter(_stays, spec.get("initContainers") or ())):
        for name, count in _limits(container):
            together[name] = together.get(name, 0) + count
    for container in spec.get("initContainers") or ():
        for name, count in _limits(container):
            together[name] = max(together.get(name, 0), count)
    return together


def claims_of(pod: Mapping[str, Any]) -> list[PodClaim]:
    """By name; one that is made for this pod is named in its status as soon as it is there."""
    status = pod.get("status") or {}
    named = [str(one["resourceClaimName"]) for one in _spec_claims(pod) if one.get("resourceClaimName")]
    made = [one.get("resourceClaimName") for one in status.get("resourceClaimStatuses") or ()]
    special = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    return [
        *(PodClaim(name=name, shared=True) for name in named),
        *(PodClaim(name=str(name)) for name in (*made, special) if name and name not in named),
    ]


def mapped_resources(pod: Mapping[str, Any]) -> set[str]:
    """Those of its limits that a claim answers instead of a device plugin."""
    special = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    return {str(one.get("resourceName")) for one in special.get("requestMappings") or ()}


def requests_of(claim: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a claim asks for, alternatives one by one; access for administrators takes nothing."""
    for request in ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ():
        for one in request.get("firstAvailable") or (request.get("exactly") or {},):
            if not one.get("adminAccess"):
                yield one


def results_of(claim: Mapping[str, Any] | None, *, admin: bool = False) -> list[Mapping[str, Any]]:
    """What the scheduler allocated of our devices; `admin`: also access for administrators, which takes nothing of them."""
    allocation = ((claim or {}).get("status") or {}).get("allocation") or {}
    results: Iterable[Mapping[str, Any]] = (allocation.get("devices") or {}).get("results") or ()
    return [one for one in results if one.get("driver") == DRIVER and (admin or not one.get("adminAccess"))]


def concerns(claim: Mapping[str, Any]) -> bool:
    """Whether a claim is for GPUs of ours: by its classes, or by what it got where it names a class of someone else."""
    labels = claim["metadata"].get("labels") or {}
    if MANAGED_BY.items() <= labels.items() or results_of(claim):
        return True
    is_open = "allocation" not in (claim.get("status") or {})
    return is_open and any(one.get("deviceClassName") in CLASSES for one in requests_of(claim))


def is_reserved_for(claim: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return any(user.get("resource") == "pods" and user.get("name") == pod["metadata"]["name"] for user in users)


def _spec_claims(pod: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (pod.get("spec") or {}).get("resourceClaims") or ()


def _stays(container: Mapping[str, Any]) -> bool:
    """An init container that runs beside the others."""
    return container.get("restartPolicy") == "Always"


def _limits(container: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
        if "/" in name and (count := parse_quantity(amount)) > 0:
            yield name, count
