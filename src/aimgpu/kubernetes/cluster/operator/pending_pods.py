"""What pods that wait need of a layout: from admission's annotations, their own claims, or their limits. Pure.

What is not understood for certain (a selector of another form, devices that must be of different GPUs) is not counted: a layout
that is changed for nothing evicts nobody, but it may take from others what they would have got.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.kubernetes.api.foreign_objects import leaving_out
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.operator.pod_gpus import CLASS_OF_RESOURCE, claims_of, is_marked, limits_of, requests_of
from aimgpu.kubernetes.vocabulary.annotations import GpuRequest, parse_annotations
from aimgpu.kubernetes.vocabulary.names import (
    DRIVER,
    MEMORY,
    PARTITION_CLASS,
    SHARED_CLASS,
    SHARED_PARTITION_CLASS,
    WHOLE_CLASS,
)
from aimgpu.units import MIB

WHOLE = "SPX"
_MOST_DEVICES = 64  # of one request or limit: all needs of a pod are met by one GPU, which has no more partitions
_TERM = re.compile(rf"device\.attributes\[['\"]{re.escape(DRIVER)}['\"]\]\.(\w+) *== *['\"]([^'\"]+)['\"]")
_DRIVER_TERM = re.compile(rf"device\.driver *== *['\"]{re.escape(DRIVER)}['\"]")
_PROFILE = re.compile(r"amd\.com/(spx|dpx|tpx|qpx|cpx)_(nps[0-9])")  # as the device plugin names partitions (`mixed`)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNeed:
    """One partition, or a share of one; `resource`: by the device plugin, under this name."""

    request: GpuRequest
    partitioned: bool = False  # any partition but the whole GPU
    product: str | None = None
    resource: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """A pod that kube-scheduler found no GPU for; all its needs are to be met by one GPU, each by one of its alternatives."""

    name: str  # namespace/name
    needs: tuple[tuple[LayoutNeed, ...], ...]


def find_pending(
    pods: Iterable[Mapping[str, Any]],
    claims: Mapping[tuple[str, str], Mapping[str, Any]],
    read_time: Callable[[str], float],
    before: float,
) -> list[PendingPod]:
    """Those of ours that kube-scheduler could not place since then; oldest first. `claims`: by namespace and name."""
    found = []
    for pod in pods:
        with leaving_out(pod):
            metadata = pod["metadata"]
            conditions = {each["type"]: each for each in (pod.get("status") or {}).get("conditions") or ()}
            scheduled = conditions.get("PodScheduled") or {}
            if scheduled.get("status") != "False" or metadata.get("deletionTimestamp"):
                continue
            since = read_time(scheduled.get("lastTransitionTime") or metadata["creationTimestamp"])
            needs = needs_of(pod, claims)
            if needs and since <= before:
                found.append((since, PendingPod(name=f"{metadata['namespace']}/{metadata['name']}", needs=needs)))
    return [pod for _, pod in sorted(found, key=lambda each: (each[0], each[1].name))]


def needs_of(pod: Mapping[str, Any], claims: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[tuple[LayoutNeed, ...], ...]:
    """Empty where it needs nothing of a layout, or something that is not understood."""
    if is_marked(pod):
        try:
            request = parse_annotations(pod["metadata"].get("annotations") or {}, pod["spec"])
        except InvalidInput:  # admission refuses such a pod; this one was changed since
            request = None
        return ((LayoutNeed(request=request),),) if request is not None else ()
    found: list[tuple[LayoutNeed, ...]] = []
    try:
        for each in claims_of(pod):
            found += _claim_needs(claims.get((pod["metadata"]["namespace"], each.name)) or {})
        for resource, count in limits_of(pod).items():
            found += [(need,) for need in _limit_needs(resource)] * _bounded(count)
    except NotUnderstood:
        return ()
    return tuple(found)


class NotUnderstood(Exception):
    """The pod is left out."""


def _claim_needs(claim: Mapping[str, Any]) -> list[tuple[LayoutNeed, ...]]:
    """None of one that has its devices already."""
    if "allocation" in (claim.get("status") or {}):
        return []
    devices = (claim.get("spec") or {}).get("devices") or {}
    found = []
    for request in devices.get("requests") or ():
        alternatives = list(requests_of({"spec": {"devices": {"requests": [request]}}}))
        needs = [need for one in alternatives if (need := _class_need(one)) is not None]
        if not needs:  # of another driver, or access that takes nothing
            continue
        counts = {_bounded(one.get("count") or 1) for one in alternatives}
        if len(needs) < len(alternatives) or len(counts) > 1 or any(one.get("allocationMode") == "All" for one in alternatives):
            raise NotUnderstood
        found += [tuple(needs)] * counts.pop()
    if len(found) > 1 and any("distinctAttribute" in one for one in devices.get("constraints") or ()):
        raise NotUnderstood
    return found


def _bounded(count: int) -> int:
    """The count; raises NotUnderstood where it is too large to write out each need."""
    if count > _MOST_DEVICES:
        raise NotUnderstood
    return count


def _class_need(request: Mapping[str, Any]) -> LayoutNeed | None:
    """None: it does not depend on the layout, or is not ours."""
    name = request.get("deviceClassName")
    attributes = read_selectors(request.get("selectors") or ()) if name in _NEEDS else {}
    memory = ((request.get("capacity") or {}).get("requests") or {}).get(MEMORY)
    make = _NEEDS.get(str(name))
    return None if make is None else make(attributes, memory)


def _whole(attributes: Mapping[str, str], _memory: str | None) -> LayoutNeed:
    return LayoutNeed(request=_request({**attributes, "computeMode": WHOLE}, None), product=attributes.get("productName"))


def _partition(attributes: Mapping[str, str], _memory: str | None) -> LayoutNeed:
    return LayoutNeed(request=_request(attributes, None), partitioned=True, product=attributes.get("productName"))


def _share(attributes: Mapping[str, str], memory: str | None) -> LayoutNeed | None:
    """One without memory takes the node's default share of any partition."""
    if memory is None and not {"computeMode", "memoryMode"} & set(attributes):
        return None
    return LayoutNeed(request=_request(attributes, memory or "1Mi"), product=attributes.get("productName"))


def _share_of_partition(attributes: Mapping[str, str], memory: str | None) -> LayoutNeed | None:
    found = _share(attributes, memory or "1Mi")
    return None if found is None else LayoutNeed(request=found.request, partitioned=True, product=found.product)


_NEEDS: Mapping[str, Callable[[Mapping[str, str], str | None], LayoutNeed | None]] = {
    WHOLE_CLASS: _whole,
    PARTITION_CLASS: _partition,
    SHARED_CLASS: _share,
    SHARED_PARTITION_CLASS: _share_of_partition,
}


def _request(attributes: Mapping[str, str], memory: str | None) -> GpuRequest:
    try:
        mib = None if memory is None else -(-parse_quantity(memory) // MIB)
    except AimGpuError as error:
        raise NotUnderstood from error
    return GpuRequest(
        container="", memory_mib=mib, compute_mode=attributes.get("computeMode"), memory_mode=attributes.get("memoryMode")
    )


def read_selectors(selectors: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Attributes that a device must have; raises where an expression says anything but that."""
    found: dict[str, str] = {}
    for selector in selectors:
        for term in str((selector.get("cel") or {}).get("expression") or "").split("&&"):
            if _DRIVER_TERM.fullmatch(term.strip()):
                continue
            match = _TERM.fullmatch(term.strip())
            if match is None:
                raise NotUnderstood
            name, value = match.groups()
            if name == "partitionProfile":  # of AMD's partitions: their mode in small letters
                name, value = "computeMode", value.upper()
            if name not in ("computeMode", "memoryMode", "productName") or found.get(name, value) != value:
                raise NotUnderstood
            found[name] = value
    return found


def _limit_needs(resource: str) -> list[LayoutNeed]:
    if resource in CLASS_OF_RESOURCE:
        need = _class_need({"deviceClassName": CLASS_OF_RESOURCE[resource]})
        return [] if need is None else [need]
    match = _PROFILE.fullmatch(resource)
    if match is None:
        return []
    modes = {"computeMode": match[1].upper(), "memoryMode": match[2].upper()}
    return [LayoutNeed(request=_request(modes, None), resource=resource)]


def offers_profiles(resources: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a node's device plugin names partitions by their modes: then it will offer those of another layout so."""
    return any(_PROFILE.fullmatch(str(one.get("name"))) for one in resources)
