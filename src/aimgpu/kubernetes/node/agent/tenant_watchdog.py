"""Checks from outside that pods stay within their grants: what the driver measures against what the ledger says.

What is found is logged, and the level of a grant whose processes run without the library drops to what is true; the claim's
status follows. Containers are left alone: what happens to a pod is for its owner to decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aimgpu.domain import DeviceUsage, Instance, WatchdogPolicy
from aimgpu.isolation.boundaries import EngineFlags
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.watchdog import Judgement, Violation, Watchdog, Watched, find_attached
from aimgpu.kubernetes.node.dra_driver.checkpoint import ClaimRecord
from aimgpu.kubernetes.node.health import PROC, processes_of_pods
from aimgpu.ledger import Ledger

_TENANT = b"AIMGPU_TENANT="


@dataclass(slots=True, kw_only=True)
class TenantWatchdog:
    interposer: Interposer
    ledger: Ledger
    proc: Path = PROC
    _watched: tuple[Watched, ...] = ()
    _usages: Sequence[DeviceUsage] = ()
    _dog: Watchdog = field(init=False)

    def __post_init__(self) -> None:
        self._dog = Watchdog(lambda: self._usages, lambda: self._watched, lambda _name, _policy: None, self.interposer.regions)

    def look(self, records: Sequence[ClaimRecord], usages: Sequence[DeviceUsage]) -> tuple[Judgement, ...]:
        """Blocking. Foreign processes are not judged here: they are a taint of the GPU."""
        self._usages = usages
        self._watched = self._watch(records)
        found = tuple(verdict for verdict in self._dog.look() if verdict.finding is not Violation.FOREIGN)
        for verdict in found:
            if verdict.finding is Violation.UNHELD and verdict.instance_id is not None and verdict.level is not None:
                self.ledger.lower_level(verdict.instance_id, verdict.level, EngineFlags.name)
        return found

    def _watch(self, records: Sequence[ClaimRecord]) -> tuple[Watched, ...]:
        instances = {instance.id: instance for instance in self.ledger.instances()}
        pods = processes_of_pods({pod for record in records for pod in record.pods}, self.proc)
        regions = self.interposer.regions()
        watched = []
        for record in records:
            pids = frozenset(pid for pod in record.pods for pid in pods.get(pod, ()))
            for tenant, own in assign(pids, record.tenants, self.proc).items():
                if (instance := instances.get(tenant)) is not None:
                    attached = find_attached(regions, own, self.proc)
                    watched.append(_watched(instance, own, attached))
        return tuple(watched)


def assign(pids: frozenset[int], tenants: Sequence[str], proc: Path = PROC) -> Mapping[str, frozenset[int]]:
    """Processes by the tenant that their environment names; one that names none counts for the claim's first."""
    found: dict[str, set[int]] = {tenant: set() for tenant in tenants}
    for pid in pids:
        named = _read_tenant(proc / str(pid))
        found[named if named in found else tenants[0]].add(pid)
    return {tenant: frozenset(own) for tenant, own in found.items()}


def _read_tenant(process: Path) -> str | None:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((one.removeprefix(_TENANT).decode(errors="replace") for one in variables if one.startswith(_TENANT)), None)


def _watched(instance: Instance, pids: frozenset[int], attached: frozenset[int]) -> Watched:
    mechanisms = [grant.mechanisms[:1] for grant in instance.grants]
    return Watched(
        instance_id=instance.id,
        grants=instance.grants,
        pids=pids,
        policy=WatchdogPolicy.WARN,
        interposed=bool(mechanisms) and all(names == (Interposer.name,) for names in mechanisms),
        attached=attached,
    )
