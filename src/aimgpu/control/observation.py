"""What the machine, the ledger and the tenants look like now, for metrics and the page; read without ever blocking a reader."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from aimgpu.control.snapshots import foreign_bytes
from aimgpu.control.unattributed_memory import UnattributedMemory
from aimgpu.domain import Deployment, Device, DeviceUsage, Grant, Instance
from aimgpu.hardware.protocols import Hardware
from aimgpu.isolation.region import TenantUse
from aimgpu.procfs import read_process

_DEEPEST = 32
_MOST_READS = 5  # of a ledger that changes all the time

ReadTenants = Callable[[str], Mapping[str, TenantUse]]  # of a partition: what the interposer counted, by instance


def no_tenants(_partition_id: str) -> Mapping[str, TenantUse]:
    """Where no interposer runs."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look. `device_error`: why devices could not be read; what is shown of them is then from an earlier look."""

    taken_at: float = 0.0  # monotonic
    node: str = "localhost"
    devices: tuple[Device, ...] = ()
    usage: Mapping[str, DeviceUsage] = field(default_factory=dict)  # by device
    foreign_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by device, then partition ("": unknown)
    owners: Mapping[int, str] = field(default_factory=dict)  # instance by pid
    instances: tuple[Instance, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    tenants: Mapping[str, TenantUse] = field(default_factory=dict)  # by instance, where the interposer holds it
    device_error: str | None = None
    lost: Mapping[str, str] = field(default_factory=dict)  # devices that could not be read, among others that could -> why
    stale: bool = False  # the devices did not answer in time, and this is what was known before

    @property
    def problem(self) -> str | None:
        """Why some or all devices could not be read."""
        return self.device_error or "; ".join(f"{name}: {reason}" for name, reason in sorted(self.lost.items())) or None

    def error_of(self, device_id: str) -> str | None:
        """Why this device could not be read."""
        return self.device_error or self.lost.get(device_id)

    def measured_by_instance(self) -> dict[tuple[str, str], int]:
        """What the driver reports for each instance and device, if it does."""
        found: dict[tuple[str, str], int] = {}
        for usage in self.usage.values():
            for process in usage.processes:
                owner = self.owners.get(process.pid)
                if owner is not None and process.memory_bytes is not None:
                    key = (owner, usage.device_id)
                    found[key] = found.get(key, 0) + process.memory_bytes
        return found

    def measured_bytes(self, instance_id: str) -> int | None:
        """What the instance holds on its devices: as the driver reports it, else as the interposer counted it."""
        mine = [size for (owner, _), size in self.measured_by_instance().items() if owner == instance_id]
        if mine:
            return sum(mine)
        use = self.tenants.get(instance_id)
        return use.used_bytes if use is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLedger:
    """What an observer reads beside the devices."""

    instances: Callable[[], tuple[Instance, ...]]
    deployments: Callable[[], tuple[Deployment, ...]]

    def read(self) -> tuple[tuple[Instance, ...], tuple[Deployment, ...]]:
        """Both of one moment: a model that was started in between would else be shown as wanted and not started."""
        instances = self.instances()
        for _ in range(_MOST_READS):
            deployments = self.deployments()
            after = self.instances()
            if after is instances or after == instances:
                break
            instances = after
        return instances, deployments


class MachineObserver:
    """Looks in a thread of its own, when asked, and at most one look at a time.

    A reader gets what is known after `patience_seconds` at the latest: a device that hangs makes the answer old, never late.
    """

    def __init__(
        self,
        hardware: Hardware,
        ledger: ObservedLedger,
        *,
        node: str = "localhost",
        read_tenants: ReadTenants = no_tenants,
        patience_seconds: float = 1.0,
    ) -> None:
        self._hardware = hardware
        self._ledger = ledger
        self._node = node
        self._read_tenants = read_tenants
        self._patience_seconds = patience_seconds
        self._unattributed = UnattributedMemory()
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # of the look that is under way
        self._last = Observation()
        self._layouts_read_at = 0.0

    def look(self, *, max_age_seconds: float = 0.0, layouts_age_seconds: float = 0.0) -> Observation:
        """What is there now, or what was within `max_age_seconds`. Never raises for a device.

        The age is that of the devices; what the ledger holds is never older than the call, so that a model that was ready
        before is not seen as waiting. Layouts are read again when they are older than `layouts_age_seconds`, or a grant names a
        partition that they lack.
        """
        with self._lock:
            if self._last.taken_at and not self._last.stale and time.monotonic() - self._last.taken_at <= max_age_seconds:
                return self._with_ledger(self._last)
            done = self._done
            if done is None:
                done = self._done = threading.Event()
                threading.Thread(target=self._look_into, args=(done, layouts_age_seconds), name="observer", daemon=True).start()
        in_time = done.wait(self._patience_seconds)
        with self._lock:
            return self._with_ledger(self._last if in_time else self._overdue())

    def _overdue(self) -> Observation:
        """The ledger does not hang with the devices: what is known of them stays."""
        error = self._last.device_error or "the devices did not answer in time"
        return replace(self._last, node=self._node, device_error=error, stale=True)

    def _with_ledger(self, seen: Observation) -> Observation:
        instances, deployments = self._ledger.read()
        if instances is seen.instances and deployments is seen.deployments:
            return seen
        return replace(seen, instances=instances, deployments=deployments)

    def _look_into(self, done: threading.Event, layouts_age_seconds: float) -> None:
        try:
            found = self._read(layouts_age_seconds)
            with self._lock:
                self._last = found
        finally:
            with self._lock:
                self._done = None
            done.set()

    def _read(self, layouts_age_seconds: float = 0.0) -> Observation:
        error: str | None = None
        devices, usage, lost = self._last.devices, self._last.usage, self._last.lost
        instances, deployments = self._ledger.read()
        grants = tuple(grant for instance in instances for grant in instance.grants)
        try:
            if self._layouts_are_old(layouts_age_seconds, grants):
                devices = _with_lost(self._hardware.read_devices(), self._last.devices)
                self._layouts_read_at = time.monotonic()
            usage = {item.device_id: item for item in self._hardware.read_usage()}
            lost = {one.id: "the driver does not answer for it" for one in devices if one.id not in usage}
        except Exception as caught:  # noqa: BLE001 -- whatever a driver raises must not cost the reader the ledger
            error = f"{type(caught).__name__}: {caught}"
        owners = _owners(instances, usage.values())
        return Observation(
            taken_at=time.monotonic(),
            node=self._node,
            devices=devices,
            usage=usage,
            foreign_bytes={one.id: self._foreign(one, usage.get(one.id), grants, frozenset(owners)) for one in devices},
            owners=owners,
            instances=instances,
            deployments=deployments,
            tenants=self._tenants(grants),
            device_error=error,
            lost=lost,
        )

    def _layouts_are_old(self, age_seconds: float, grants: tuple[Grant, ...]) -> bool:
        if self._last.problem or not self._last.devices or time.monotonic() - self._layouts_read_at >= age_seconds:
            return True
        known = {part.id for device in self._last.devices for part in device.layout.partitions}
        return any(grant.partition_id not in known for grant in grants)

    def _foreign(
        self, device: Device, usage: DeviceUsage | None, grants: tuple[Grant, ...], ours: frozenset[int]
    ) -> Mapping[str, int]:
        here = tuple(grant for grant in grants if grant.device_id == device.id)
        return foreign_bytes(device, usage, here, ours, self._unattributed)

    def _tenants(self, grants: tuple[Grant, ...]) -> dict[str, TenantUse]:
        found: dict[str, TenantUse] = {}
        for partition_id in dict.fromkeys(grant.partition_id for grant in grants):
            found |= self._read_tenants(partition_id)
        return found


def _with_lost(found: tuple[Device, ...], before: tuple[Device, ...]) -> tuple[Device, ...]:
    """A driver leaves out a GPU that fell off the bus; one that was there is not forgotten, or no alert would fire for it."""
    ids = {device.id for device in found}
    return (*found, *(device for device in before if device.id not in ids))


def _owners(instances: tuple[Instance, ...], usages: Iterable[DeviceUsage]) -> dict[int, str]:
    """Whose the processes on the devices are: an instance's own, or one below it."""
    roots = {instance.process.pid: instance.id for instance in instances if instance.process is not None}
    pids = [process.pid for usage in usages for process in usage.processes]
    owners = dict(roots)
    for pid in pids if roots else ():
        ancestor: int | None = pid
        for _ in range(_DEEPEST):
            if ancestor is None or ancestor in roots:
                break
            entry = read_process(ancestor)
            ancestor = entry.parent_pid if entry is not None else None
        if ancestor in roots:
            owners[pid] = roots[ancestor]
    return owners
