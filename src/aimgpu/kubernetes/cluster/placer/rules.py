"""Which nodes kube-scheduler would allow for a pod, by the rules that are a node's own: labels, taints, host ports. Pure.

Rules that are not covered here refuse no node: a hint that kube-scheduler cannot follow costs it one look. `unread_rule`
names the hard rules for which no hint is given at all. Neither evaluated nor named there: anti-affinity of pods that run
already against the new one, and limits of attached volumes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.api.quantities import parse_millis, parse_quantity

Object = Mapping[str, Any]
CPU, MEMORY, PODS = "cpu", "memory", "pods"
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_COMPARED = {"Gt": 1, "Lt": -1}
_WHOLE_NUMBER, _INT64 = re.compile("[+-]?[0-9]{1,64}", re.ASCII), 1 << 63
_MOST_MILLIS, _MOST = 10**9, 1 << 50  # no node has more; sums over pods of larger amounts overflow arrays
_ANYWHERE = "0.0.0.0"  # noqa: S104 - what a host port without an address means

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

Port = tuple[str, str, int]  # address, protocol, port


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What of a Node decides about pods."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    allocatable: Mapping[str, int]  # CPU in thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRules:
    """What a pod demands of a node's labels and taints; `volumes`: selector terms of its bound volumes, each to be met."""

    selector: Mapping[str, str]
    terms: Sequence[Object] | None  # of required node affinity, one of which is to be met
    tolerations: Sequence[Object]
    volumes: Sequence[Sequence[Object]] = ()

    @property
    def key(self) -> str:
        """Equal for pods with equal rules."""
        return json.dumps((self.selector, self.terms, self.tolerations, self.volumes), sort_keys=True)

    def allow(self, node: NodeFacts) -> bool:
        return (
            all(node.labels.get(key) == value for key, value in self.selector.items())
            and (self.terms is None or _meets_any(self.terms, node))
            and all(_meets_any(terms, node) for terms in self.volumes)
            and all(_tolerates(self.tolerations, taint) for taint in node.taints if taint.get("effect") in _KEEPS_AWAY)
        )


def read_node(node: Object) -> NodeFacts:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    taints = [*(spec.get("taints") or ()), *([_UNSCHEDULABLE] if spec.get("unschedulable") else ())]
    return NodeFacts(
        name=str(node["metadata"]["name"]),
        labels=dict(node["metadata"].get("labels") or {}),
        taints=[{key: str(taint.get(key) or "") for key in ("key", "value", "effect")} for taint in taints],
        allocatable=read_amounts(status.get("allocatable")),
    )


def required_affinity(spec: Object) -> Object | None:
    """To nodes."""
    found: Object | None = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED)
    return found


def read_rules(spec: Object, volumes: Sequence[Sequence[Object]] = ()) -> NodeRules:
    required = required_affinity(spec)
    return NodeRules(
        selector=dict(spec.get("nodeSelector") or {}),
        terms=None if required is None else list(required.get("nodeSelectorTerms") or ()),
        tolerations=list(spec.get("tolerations") or ()),
        volumes=volumes,
    )


def unread_rule(spec: Object) -> str | None:
    """A hard rule of the pod that is not evaluated here, or None. Soft rules do not count."""
    affinity = spec.get("affinity") or {}
    for kind, name in (("podAffinity", "required pod affinity"), ("podAntiAffinity", "required pod anti-affinity")):
        if (affinity.get(kind) or {}).get(REQUIRED):
            return name
    if any(each.get("whenUnsatisfiable") != "ScheduleAnyway" for each in spec.get("topologySpreadConstraints") or ()):
        return "a topology spread constraint"
    if spec.get("schedulingGroup") or spec.get("workloadRef"):
        return "membership of a group of pods"
    return None


def read_amounts(resources: Object | None) -> dict[str, int]:
    found = dict[str, int]()
    _add(found, {name: (parse_millis if name == CPU else parse_quantity)(text) for name, text in (resources or {}).items()})
    return found


def read_requests(spec: Object) -> dict[str, int]:
    """What kube-scheduler counts for the pod, and one of `pods`: init containers leave theirs to those after them."""
    total, staying, most = dict[str, int](), dict[str, int](), dict[str, int]()
    for container in spec.get("containers") or ():
        _add(total, _requests(container))
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":  # it runs on beside the others
            _add(total, _requests(container))
            _add(staying, _requests(container))
            now = dict(staying)
        else:
            now = dict(staying)
            _add(now, _requests(container))
        most = {name: max(most.get(name, 0), now.get(name, 0)) for name in most | now}
    found = {name: max(total.get(name, 0), most.get(name, 0)) for name in total | most}
    found |= _requests(spec)  # of the pod as a whole, if it has any
    _add(found, read_amounts(spec.get("overhead")))
    return {**{name: amount for name, amount in found.items() if amount}, PODS: 1}


def read_ports(spec: Object) -> frozenset[Port]:
    containers = [*(spec.get("containers") or ()), *(each for each in spec.get("initContainers") or () if _stays(each))]
    return frozenset(
        (str(port.get("hostIP") or _ANYWHERE), str(port.get("protocol") or "TCP"), int(port["hostPort"]))
        for container in containers
        for port in container.get("ports") or ()
        if port.get("hostPort")
    )


def ports_conflict(wanted: Iterable[Port], used: Iterable[Port]) -> bool:
    taken = list(used)
    return any(
        one[1:] == other[1:] and (one[0] == other[0] or _ANYWHERE in (one[0], other[0])) for one in wanted for other in taken
    )


def _stays(container: Object) -> bool:
    return container.get("restartPolicy") == "Always"


def _requests(item: Object) -> dict[str, int]:
    """Limits count where a request is not given."""
    resources = item.get("resources") or {}
    return read_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        total[name] = min(total.get(name, 0) + amount, _MOST_MILLIS if name == CPU else _MOST)


def _meets_any(terms: Sequence[Object], node: NodeFacts) -> bool:
    """Terms without a requirement match nothing."""
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(_meets(one, node.labels) for one in term.get("matchExpressions") or ())
        and all(_meets(one, {"metadata.name": node.name}) for one in term.get("matchFields") or ())
        for term in terms
    )


def _meets(row: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(str(row.get("key"))), [str(each) for each in row.get("values") or ()]
    operator, listed = row.get("operator"), value is not None and value in values
    if operator in ("In", "NotIn"):
        return listed is (operator == "In")
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) is (operator == "Exists")
    return operator in _COMPARED and _compares(value, values, _COMPARED[operator])


def _compares(value: str | None, values: Sequence[str], sign: int) -> bool:
    """As whole numbers of 64 bits, which is what kube-scheduler reads; anything else matches nothing."""
    compared = [value or "", *values]
    if len(values) != 1 or not all(_WHOLE_NUMBER.fullmatch(text) for text in compared):
        return False
    label, bound = map(int, compared)
    return -_INT64 <= min(label, bound) <= max(label, bound) < _INT64 and (label - bound) * sign > 0


def _tolerates(tolerations: Iterable[Object], taint: Mapping[str, str]) -> bool:
    return any(
        (not each.get("effect") or each["effect"] == taint.get("effect"))
        and (not each.get("key") or each["key"] == taint.get("key"))
        and (
            each.get("operator") == "Exists"
            or (
                (each.get("operator") in (None, "", "Equal") and bool(each.get("key")))
                and str(each.get("value") or "") == (taint.get("value") or "")
            )
        )
        for each in tolerations
    )
