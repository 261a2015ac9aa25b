"""A plan, decided on one snapshot before anything is done, and the steps that it is made of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, ClassVar, Self

from aimgpu.control.plan.prepared import Prepared
from aimgpu.domain import Deployment, Instance, InstanceState, Placement, Refusal, Slot
from aimgpu.placement import Snapshot
from aimgpu.sizing.surplus import describe_service
from aimgpu.units import format_bytes, format_ppm


class StepKind(StrEnum):
    """As shown to users."""

    RELEASE = "release"
    PREEMPT = "preempt"
    UNLOAD = "unload"
    SLEEP = "sleep"
    REGISTER = "register"
    DEPLOY = "deploy"
    WAKE = "wake"
    LAYOUT = "layout"
    RESIZE = "resize"


class Stage(StrEnum):
    """Neighbouring steps of one stage run side by side; the stages of a chain run one after the other."""

    END = "end"
    LAYOUT = "layout"
    RESIZE = "resize"
    START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """What steps that end or unload an instance share."""

    stage: ClassVar[Stage] = Stage.END
    deployment: str
    replica: int
    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndingWithMemory(_Ending):
    memory_bytes: int = 0

    @classmethod
    def of(cls, instance: Instance) -> Self:
        """The step for this instance, with what it holds."""
        return cls(
            deployment=instance.deployment,
            replica=instance.replica,
            instance_id=instance.id,
            memory_bytes=sum(grant.memory_bytes for grant in instance.grants),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """What steps that start, wake or record an instance share."""

    stage: ClassVar[Stage] = Stage.START
    prepared: Prepared
    replica: int

    @property
    def deployment(self) -> str:
        """Its name."""
        return self.prepared.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(_EndingWithMemory):
    """Drain and stop an instance, give back what it holds, forget it."""

    kind: ClassVar[StepKind] = StepKind.RELEASE

    @property
    def text(self) -> str:
        """For people."""
        return f"stop {self.instance_id}" + (f", which frees {format_bytes(self.memory_bytes)}" if self.memory_bytes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(_Ending):
    """Stop an instance for others of higher priority; it stays asleep until a request finds room for it."""

    kind: ClassVar[StepKind] = StepKind.PREEMPT
    beneficiaries: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Shown with the instance for as long as it is unloaded."""
        return f"stopped to make room for {', '.join(self.beneficiaries)}"

    @property
    def text(self) -> str:
        """For people."""
        return f"stop {self.instance_id} to make room for {', '.join(self.beneficiaries)}; a request starts it when it fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(_EndingWithMemory):
    """End the process of an instance that sleeps in place; it stays asleep and holds nothing."""

    kind: ClassVar[StepKind] = StepKind.UNLOAD

    @property
    def text(self) -> str:
        """For people."""
        held = format_bytes(self.memory_bytes)
        return f"stop {self.instance_id}, which sleeps, for the {held} it still holds; a request starts it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PutToSleep(_Ending):
    """Unload a ready instance, in place where its engine can; a request wakes it."""

    kind: ClassVar[StepKind] = StepKind.SLEEP
    beneficiary: str | None = None  # the deployment that needs the room
    forced: bool = False  # of higher priority: requests that outlast the drain are cut off

    @property
    def text(self) -> str:
        """For people."""
        reason = f" to make room for {self.beneficiary}" if self.beneficiary else ", it is idle"
        return f"put {self.deployment} to sleep{reason}; a request wakes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Register(_Beginning):
    """Record an instance that is not loaded: it does not fit now, and a request will wake it."""

    kind: ClassVar[StepKind] = StepKind.REGISTER
    reason: str

    @property
    def text(self) -> str:
        """For people."""
        return f"keep {self.deployment} asleep until a request wakes it: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(_Beginning):
    """Charge a new instance and start it."""

    kind: ClassVar[StepKind] = StepKind.DEPLOY
    placement: Placement

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What it will be granted."""
        return self.placement.slots

    @property
    def text(self) -> str:
        """For people."""
        where = ", ".join(f"{format_bytes(slot.memory_bytes, up=True)} of {slot.partition_id}" for slot in self.slots)
        compute = self.prepared.deployment.ask.compute_ppm
        where += f" with {format_ppm(compute)} of the GPU's compute" if compute is not None else ""
        model = f"{self.prepared.deployment.model}, {self.prepared.engine}"
        granted = min((slot.memory_bytes for slot in self.slots), default=0)
        service = describe_service(self.prepared.footprint, granted).text
        served = f" for {service}" if service else ""
        return f"start {self.deployment} ({model}) on {where}{served}: {self.placement.because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake(_Beginning):
    """Charge an instance that sleeps in place everything it held, and wake it."""

    kind: ClassVar[StepKind] = StepKind.WAKE
    instance_id: str
    slots: tuple[Slot, ...]

    @property
    def text(self) -> str:
        """For people."""
        where = ", ".join(f"{format_bytes(slot.memory_bytes, up=True)} of {slot.partition_id}" for slot in self.slots)
        return f"wake {self.deployment} where it sleeps, with {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLayout:
    """Give a GPU another layout; `before` is what to restore on each GPU that follows it."""

    kind: ClassVar[StepKind] = StepKind.LAYOUT
    stage: ClassVar[Stage] = Stage.LAYOUT
    device_id: str
    after: str
    before: tuple[tuple[str, str], ...]  # GPU and layout, the one that is changed first
    idle: tuple[str, ...]  # partitions that must stay unused meanwhile
    halted: tuple[str, ...]  # the GPUs of these partitions
    reload_driver: bool = False
    deployment: ClassVar[str] = ""

    @property
    def text(self) -> str:
        """For people."""
        return f"change {self.device_id} from {self.before[0][1]} to {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeGrant:
    """Change the memory of a running instance on one partition."""

    kind: ClassVar[StepKind] = StepKind.RESIZE
    stage: ClassVar[Stage] = Stage.RESIZE
    deployment: str
    instance_id: str
    grant_id: str
    partition_id: str
    before_bytes: int
    after_bytes: int

    @property
    def text(self) -> str:
        """For people."""
        sizes = f"from {format_bytes(self.before_bytes, up=True)} to {format_bytes(self.after_bytes, up=True)}"
        return f"change {self.instance_id} {sizes} of {self.partition_id}"


End = Release | Preempt | Unload | PutToSleep
Begin = Start | Wake | Register
Step = End | Begin | ChangeLayout | ResizeGrant
Chain = tuple[Step, ...]


def stages(chain: Chain) -> Iterator[Sequence[Step]]:
    """Runs of neighbouring steps that belong to one stage."""
    for _, run in groupby(chain, key=lambda step: step.stage):
        yield tuple(run)


def begins_of(steps: Iterable[Step]) -> tuple[Begin, ...]:
    """Those of them that start something."""
    return tuple(step for step in steps if isinstance(step, Start | Wake | Register))


def halted_devices(steps: Iterable[Step]) -> list[str]:
    """GPUs on which nothing can be placed while layouts change."""
    return [device for step in steps if isinstance(step, ChangeLayout) for device in step.halted]


def changing_partitions(steps: Iterable[Step]) -> list[str]:
    """Those that must stay unused while layouts change."""
    return [partition for step in steps if isinstance(step, ChangeLayout) for partition in step.idle]


def step_to_json(step: Step) -> dict[str, Any]:
    """As the API and the ledger hold it."""
    slots = step.slots if isinstance(step, Start | Wake) else ()
    return {
        "kind": step.kind.value,
        "deployment": step.deployment,
        "replica": getattr(step, "replica", 0),
        "instance": getattr(step, "instance_id", None),
        "text": step.text,
        "slots": [_slot_to_json(slot) for slot in slots],
    }


def _slot_to_json(slot: Slot) -> dict[str, Any]:
    return {
        "node": slot.node,
        "device": slot.device_id,
        "partition": slot.partition_id,
        "memory_bytes": slot.memory_bytes,
        "compute_ppm": slot.compute_ppm,
        "exclusive": slot.exclusive,
    }


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
    refused: tuple[str, ...] = ()  # deployments of these refusals, of a stack
    room_may_come: bool = False  # of a refused wake: models that may be put to sleep hold the room now
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
        return begins_of(self.steps)

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
