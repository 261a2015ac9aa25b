"""Everything the page reads, as one read-only object that a daemon or a cluster fills in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aimgpu.control.observation import Observation
from aimgpu.control.plan.eviction import Resident
from aimgpu.control.plan.prepared import Prepared
from aimgpu.control.sizing_inputs.model_names import ModelCandidate
from aimgpu.domain import Deployment, Priority
from aimgpu.placement import Snapshot

Json = dict[str, Any]
Scores = Mapping[str, Any]  # the gateway's models, promises, queue bounds and pressure


class LookAtMachine(Protocol):
    def __call__(self, *, max_age_seconds: float = 0.0, layouts_age_seconds: float = 0.0) -> Observation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model that can be deployed, in the form that an engine here reads."""

    candidate: ModelCandidate
    on_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    version: str
    url: str  # "http://127.0.0.1:8080"
    look: LookAtMachine
    read_scores: Callable[[], Scores]
    read_residents: Callable[[], Sequence[Resident]]
    read_waiting: Callable[[], Mapping[str, str]]  # deployments that have no room, with the reason
    wait_for_change: Callable[[float], bool]  # until something about the models changes, or time is up; True: changed
    read_notes: Callable[[], Sequence[str]]
    take_snapshot: Callable[[], Snapshot]
    size: Callable[[Deployment], Prepared]  # without fetching anything; raises AimGpuError
    catalogue: Callable[[], Sequence[Json]]  # models that can be deployed by name
    search: Callable[[str], Sequence[FoundModel]]  # models with this in their name, best first
    engines: Callable[[], Sequence[Json]]  # name, available, reason
    cluster: "Callable[[], ClusterFacts] | None" = None  # None: the page of one machine
    explain: Callable[[str], Sequence[Json]] | None = None  # why a model is where it is; None: from the snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What the page of a cluster differs by."""

    models: Mapping[str, str]  # the namespace of each
    namespace: str  # where a new model goes unless another is named
    endpoint: str | None  # of the gateway, as pods of the cluster call it
    own_rights: bool  # changes are made with the rights of the page's own user; else with a token of the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The changes that have no route of their own in the control API; each raises AimGpuError."""

    sleep: Callable[[str], bool]
    wake: Callable[[str], bool]
    change: Callable[[str, "Change"], Deployment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What can change about a model that runs, without restarting it; None: as it is."""

    priority: Priority | None = None
    pinned: bool | None = None
    keep_seconds: int | None = None
