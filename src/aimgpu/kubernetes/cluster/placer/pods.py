"""What is kept of a pod: little of most, all of those that wait with our gate. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aimgpu.kubernetes.api.mirror import Key
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, is_finished, node_of
from aimgpu.kubernetes.cluster.placer.rules import Port, read_ports, read_requests
from aimgpu.kubernetes.vocabulary.names import GATE, HINT

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """`waiting`: the pod itself, while ours is the last of its gates; else empty."""

    key: Key
    uid: str
    node: str  # empty: not bound
    hinted: str  # where kube-scheduler was to look first; empty: no hint was given
    pending: bool  # it may still be bound there
    finished: bool
    daemon: bool
    requests: Mapping[str, int]
    ports: frozenset[Port]
    claims: tuple[str, ...]
    waiting: Object

    @property
    def place(self) -> str:
        """Where its room is taken: the node, or the one that it was sent to. Empty: nowhere."""
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
    refused = any(one.get("reason") == "Unschedulable" for one in (pod.get("status") or {}).get("conditions") or ())
    return PodView(
        key=(metadata["namespace"], metadata["name"]),
        uid=str(metadata.get("uid") or ""),
        node=node_of(pod),
        hinted=str((metadata.get("annotations") or {}).get(HINT) or ""),
        pending=not (gates or leaving or refused),
        finished=is_finished(pod),
        daemon=owner.get("kind") == "DaemonSet",
        requests=read_requests(spec),
        ports=read_ports(spec),
        claims=tuple(each.name for each in claims_of(pod)),
        waiting=pod if gates == [GATE] and not node_of(pod) and not leaving else {},
    )


def is_gated(pod: Mapping[str, Any]) -> bool:
    return any(gate.get("name") == GATE for gate in (pod.get("spec") or {}).get("schedulingGates") or ())
