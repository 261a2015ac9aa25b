"""A plan: what would be done, decided on one snapshot before anything is done; and what it is decided on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aimgpu.control.planning.steps import Begin, Chain, Register, Start, Step, Wake, step_to_json
from aimgpu.domain import Deployment, Instance, InstanceState, Refusal
from aimgpu.placement import Snapshot

GONE = frozenset({InstanceState.FAILED, InstanceState.ABSENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """What a planner looks at: what is wanted, what runs, and one snapshot of the machine."""

    wanted: Mapping[str, Deployment]
    running: tuple[Instance, ...]
    snapshot: Snapshot

    def of(self, name: str) -> tuple[Instance, ...]:
        """The instances of one deployment."""
        return tuple(instance for instance in self.running if instance.deployment == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Chains of steps that may run side by side; with refusals there are none, a stack is taken whole or not at all."""

    operation: str = "apply"
    chains: tuple[Chain, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    unchanged: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # deployments that are wanted too, and left as they are
    queued: tuple[str, ...] = ()  # wanted before and still without room; among `unchanged`
    wants: tuple[Deployment, ...] = ()  # recorded before the first step
    unwants: tuple[str, ...] = ()
    keeps: tuple[Deployment, ...] = ()  # recorded after the last step: what was changed while it ran
    restarts: tuple[str, ...] = ()  # deployments to place again afterwards, each on its own
    details: Mapping[str, Any] = field(default_factory=dict)  # of the operation, for the ledger

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them, chain by chain."""
        return tuple(step for chain in self.chains for step in chain)

    @property
    def begins(self) -> tuple[Begin, ...]:
        """What is charged and started."""
        return tuple(step for step in self.steps if isinstance(step, Start | Wake | Register))

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "steps": [step_to_json(step) for step in self.steps],
            "refusals": [refusal_to_json(refusal) for refusal in self.refusals],
            "unchanged": list(self.unchanged),
            "beside": list(self.beside),
            "queued": list(self.queued),
        }

    def record(self) -> dict[str, Any]:
        """What the ledger keeps of it while it is carried out."""
        steps = [{"kind": step.kind.value, "instance": getattr(step, "instance_id", None)} for step in self.steps]
        return {**self.details, "wants": [item.name for item in self.wants], "unwants": list(self.unwants), "steps": steps}


def without_instances(snapshot: Snapshot, instance_ids: Iterable[str]) -> Snapshot:
    """The snapshot as it will be once these instances are gone."""
    for instance_id in instance_ids:
        snapshot = snapshot.without_instance(instance_id)
    return snapshot


def refusal_to_json(refusal: Refusal) -> dict[str, Any]:
    """As the API shows it."""
    return {
        "ask": refusal.ask,
        "summary": refusal.summary,
        "reasons": [
            {"node": r.node, "device": r.device_id, "code": r.code, "text": r.text, "short_bytes": r.short_bytes}
            for r in refusal.reasons
        ],
        "would_fit": list(refusal.would_fit),
    }
