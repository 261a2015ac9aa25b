"""What a user wants from a GPU, before anything is decided."""

from dataclasses import dataclass
from enum import StrEnum


class Priority(StrEnum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"

    rank: int  # higher goes first; an attribute, because it is asked for several times in every request

    def __init__(self, value: str) -> None:
        self.rank = ("low", "medium", "high").index(value)


class IsolationRequirement(StrEnum):
    """The least isolation that the user accepts."""

    HARDWARE = "hardware"
    ENFORCED = "enforced"  # runtime or better
    ADVISORY = "advisory"
    NONE = "none"


class Spread(StrEnum):
    PACK = "pack"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Size it for me: `memory_bytes` comes from the footprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fraction:
    """A part of a whole device, in millionths."""

    ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionKind:
    """A whole partition of a kind ("cpx", "1g.18gb")."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Whole devices, all on one node."""

    count: int = 1


Want = Auto | Memory | Fraction | PartitionKind | Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One instance's wish. `footprint_bytes` is what the model needs on each device it gets (None: not sized)."""

    name: str  # of the instance or pod that asks; decisions carry it back
    want: Want
    footprint_bytes: int | None = None
    least_bytes: int | None = None  # what the model needs with next to no context; None: not known
    divided: tuple[tuple[int, int], ...] = ()  # (devices, bytes on each), if one device is too small
    devices: int = 1  # several devices of one node, the same share on each
    compute_ppm: int | None = None
    isolation: IsolationRequirement = IsolationRequirement.NONE
    priority: Priority = Priority.MEDIUM
    products: frozenset[str] = frozenset()  # GPU models wanted, such as MI300X; empty: any
    refused_products: frozenset[str] = frozenset()
    vendor: str | None = None
    refused_vendor: str | None = None
    partition_id: str | None = None  # wanted exactly this one
    spread: Spread = Spread.PACK
    with_deployments: frozenset[str] = frozenset()
    not_with_deployments: frozenset[str] = frozenset()
    deployment: str | None = None
    cpu_millis: int = 0
    host_memory_bytes: int = 0
    pinned: bool = False

    @property
    def device_count(self) -> int:
        """Over how many devices the model is divided."""
        return max(self.want.count, self.devices) if isinstance(self.want, Whole) else self.devices
