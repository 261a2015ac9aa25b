"""ResourceClaims: what kube-scheduler allocated to a claim on this node, read from the object. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aimgpu.errors import Conflict
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.node.dra_driver.parameters import Parameters, parse_parameters
from aimgpu.kubernetes.vocabulary.names import COMPUTE, DRIVER, GROUP, MEMORY
from aimgpu.units import PPM

_PERCENT = PPM // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """One device, or a share of one, that was allocated."""

    request: str  # "gpu", or "gpu/first" where it was one of alternatives
    pool: str
    device: str
    share_id: str | None = None
    memory_bytes: int | None = None  # None: not shared
    compute_ppm: int | None = None
    admin: bool = False
    partition_id: str | None = None  # known already: a seat of KAI-Scheduler; several GPUs may have one seat

    @property
    def main_request(self) -> str:
        """What a container names: an alternative is not part of it."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraClaim:
    uid: str
    namespace: str
    name: str
    allocated: tuple[Allocated, ...]
    parameters: Mapping[str, Parameters] = field(default_factory=dict)  # by request, as allocated
    pods: tuple[str, ...] = ()  # uids of those that it is reserved for
    model: str = ""  # that its pods serve, as admission wrote it; empty: not known

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"


def read_claim(claim: Mapping[str, Any], uid: str, node_pool: str) -> DraClaim:
    """Raises Conflict where the object is another one by now, or is not allocated here."""
    metadata = claim["metadata"]
    label = f"{metadata['namespace']}/{metadata['name']}"
    if metadata["uid"] != uid:
        raise Conflict(f"claim {label} was replaced by another of its name")
    allocation = (claim.get("status") or {}).get("allocation")
    if not allocation:
        raise Conflict(f"claim {label} is not allocated")
    results = [result for result in allocation["devices"].get("results", ()) if result["driver"] == DRIVER]
    if not results:
        raise Conflict(f"claim {label} has no device of {DRIVER}")
    elsewhere = [result["pool"] for result in results if result["pool"] != node_pool]
    if elsewhere:
        raise Conflict(f"claim {label} is allocated on {elsewhere[0]}, not on {node_pool}")
    _refuse_negative(claim, label)
    allocated = tuple(map(_read_result, results))
    return DraClaim(
        uid=uid,
        namespace=metadata["namespace"],
        name=metadata["name"],
        allocated=allocated,
        parameters=_read_parameters(allocation["devices"].get("config", ()), allocated),
        model=str((metadata.get("annotations") or {}).get(f"{GROUP}/model") or ""),
        pods=tuple(user["uid"] for user in (claim["status"].get("reservedFor") or ()) if user.get("resource") == "pods"),
    )


def _refuse_negative(claim: Mapping[str, Any], label: str) -> None:
    """The scheduler rounds it up to the least that there is, which for compute means no limit."""
    for request in ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ():
        for one in request.get("firstAvailable") or (request.get("exactly") or {},):
            for name, amount in ((one.get("capacity") or {}).get("requests") or {}).items():
                if parse_quantity(amount) < 0:
                    raise Conflict(
                        f"claim {label} asks for {name} {amount}", hint="Ask for a positive amount, or leave it out."
                    )


def _read_result(result: Mapping[str, Any]) -> Allocated:
    consumed = result.get("consumedCapacity") or {}
    memory = consumed.get(MEMORY)
    compute = parse_quantity(consumed[COMPUTE]) if COMPUTE in consumed else 0
    return Allocated(
        request=result["request"],
        pool=result["pool"],
        device=result["device"],
        share_id=result.get("shareID"),
        memory_bytes=None if memory is None else parse_quantity(memory),
        compute_ppm=compute * _PERCENT if 0 < compute < 100 else None,  # noqa: PLR2004 - percent
        admin=bool(result.get("adminAccess")),
    )


def _read_parameters(config: list[Mapping[str, Any]], allocated: tuple[Allocated, ...]) -> dict[str, Parameters]:
    """A claim's own win over its class's; the list has the class's first."""
    found: dict[str, Parameters] = {}
    for entry in sorted(config, key=lambda entry: entry.get("source") == "FromClaim"):
        opaque = entry.get("opaque")
        if not opaque or opaque.get("driver") != DRIVER:
            continue
        parameters = parse_parameters(opaque["parameters"])
        requests = entry.get("requests") or []
        for one in allocated:
            if not requests or one.request in requests or one.main_request in requests:
                found[one.request] = parameters
    return found
