"""What is kept of a pod: little of most, all of those that wait with our gate. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.api.mirror import Key
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, is_finished, node_of
from aimgpu.kubernetes.cluster.placer.rules import Port, read_ports, read_requests, required_affinity
from aimgpu.kubernetes.vocabulary.names import GATE, HINT

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """`waiting`: the pod itself, while ours is the last of its gates; else empty."""

    key: Key
    uid: str
    node: str  # empty: not bound
    hinted: str  # by its annotation, which anybody may write; empty: no hint was given
    pending: bool  # kube-scheduler was told so, and may still bind it there
    finished: bool
    daemon: bool
    requests: Mapping[str, int]
    ports: frozenset[Port]
    claims: tuple[str, ...]
    waiting: Object

    @property
    def place(self) -> str:
        """The node on which it takes room: its own, or the one that it was sent to. Empty: none."""
        return "" if self.finished else self.node or (self.hinted if self.pending else "")

    @property
    def order(self) -> tuple[int, str, Key]:
        """By priority, then age."""
        priority = int(self.waiting["spec"].get("priority") or 0)
        return -priority, str(self.waiting["metadata"].get("creationTimestamp") or ""), self.key


def read_pod(pod: Object) -> PodView:
    metadata, spec = pod["metadata"], pod["spec"]
    gates = [gate.get("name") for gate in spec.get("schedulingGates") or ()]
    owner: Mapping[str, Any] = next((each for each in metadata.get("ownerReferences") or () if each.get("controller")), {})
    leaving = bool(metadata.get("deletionTimestamp"))
    hinted = str((metadata.get("annotations") or {}).get(HINT) or "")
    refused = any(one.get("reason") == "Unschedulable" for one in (pod.get("status") or {}).get("conditions") or ())
    return PodView(
        key=(metadata["namespace"], metadata["name"]),
        uid=str(metadata.get("uid") or ""),
        node=node_of(pod),
        hinted=hinted,
        pending=not (gates or leaving or refused) and _is_sent_to(hinted, pod),
        finished=is_finished(pod),
        daemon=owner.get("kind") == "DaemonSet",
        requests=read_requests(spec),
        ports=read_ports(spec),
        claims=tuple(each.name for each in claims_of(pod)),
        waiting=pod if gates == [GATE] and not node_of(pod) and not leaving else {},
    )


def row_of(node: str) -> Object:
    """Of required node affinity: this node alone."""
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def _is_sent_to(node: str, pod: Mapping[str, Any]) -> bool:
    """Whether the pod was sent to this node, by a hint or by affinity."""
    spec = pod["spec"]
    if node and (pod.get("status") or {}).get("nominatedNodeName") == node:
        return True
    terms = (required_affinity(spec) or {}).get("nodeSelectorTerms") or ()
    pinned = bool(terms) and all(row_of(node) in (term.get("matchFields") or ()) for term in terms)
    return pinned and spec.get("schedulerName") == "default-scheduler"


def is_gated(pod: Mapping[str, Any]) -> bool:
    return any(gate.get("name") == GATE for gate in (pod.get("spec") or {}).get("schedulingGates") or ())
