"""Prepare and unprepare a claim on the node: the layout, the grants, isolation, the CDI file, in this order, and back.

Every step may be the last before a crash. The claim's record says `preparing` until the last step is done; a record that still
says so at a start is undone as a whole, and the kubelet asks again.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from aimgpu.errors import AimGpuError, Conflict, PartitionGone
from aimgpu.hardware.protocols import Hardware
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.dra_driver.candidates import Candidate, list_candidates, shared_memory_bytes
from aimgpu.kubernetes.node.dra_driver.checkpoint import Checkpoint, ClaimRecord, ClaimState, PreparedDevice
from aimgpu.kubernetes.node.dra_driver.claims import Allocated, DraClaim
from aimgpu.kubernetes.node.dra_driver.parameters import LimitScope, Parameters
from aimgpu.kubernetes.node.grants import NodeGrants, NodeSlot, PodTenant
from aimgpu.kubernetes.node.layouts import NodeLayouts

log = logging.getLogger(__name__)

_ADMIN = "admin"  # CDI device of a claim's requests with admin access: they see GPUs that others use, and are charged nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The blocking side of the driver; one caller at a time."""

    hardware: Hardware
    grants: NodeGrants
    layouts: NodeLayouts
    checkpoint: Checkpoint
    specs: SpecFolder
    boot_id: str
    turn: threading.RLock = field(default_factory=threading.RLock)

    def prepare(self, claim: DraClaim) -> tuple[PreparedDevice, ...]:
        """What the kubelet is answered; the same answer for a claim that is prepared already."""
        with self.turn:
            known = self.checkpoint.read(claim.uid)
            if known is not None and self._is_whole(known, claim):
                if set(claim.pods) - set(known.pods):
                    self.checkpoint.write(replace(known, pods=claim.pods))
                return known.devices
            if known is not None:
                self._undo(known)
            return self._prepare(claim)

    def unprepare(self, uid: str) -> bool:
        """Whether the claim was prepared here. A claim that is not known is nothing to undo."""
        with self.turn:
            known = self.checkpoint.read(uid)
            if known is not None:
                self._undo(known)
                log.info("claim.unprepared", extra={"data": {"claim": known.label, "uid": uid}})
            return known is not None

    def unrecorded(self) -> dict[str, str]:
        """Claims that were prepared here and are not in the ledger, as ``namespace/name`` by uid: the ledger was lost."""
        with self.turn:
            known = {record.uid for record in self.checkpoint.read_all()}
            return {uid: label for uid, label in self.specs.labels().items() if uid not in known}

    def adopt(self, claim: DraClaim) -> None:
        """Record a prepared claim that the ledger lost, with what it holds. Its containers run: nothing of theirs is changed.

        Raises what is in the way: the GPU is not as the claim needs it, or the grants do not fit.
        """
        with self.turn:
            chosen = [self._choose(one) for one in claim.allocated]
            tenants = _tenants(claim, [(one, candidate) for one, candidate, _ in chosen])
            record = self._record(claim, tenants)
            with self.checkpoint.together():
                self.checkpoint.write(replace(record, state=ClaimState.PREPARED, devices=self._devices(claim, tenants)))
                self.grants.charge(list(tenants.values()))
            log.warning("claim.adopted", extra={"data": {"claim": claim.label, "uid": claim.uid}})

    def recover(self) -> None:
        """At a start: undo what was cut short or is of another boot, and make the rest true again."""
        with self.turn:
            records = self.checkpoint.read_all()
            for record in records:
                if record.state is not ClaimState.PREPARED or record.boot_id != self.boot_id:
                    reason = "cut short" if record.boot_id == self.boot_id else "another boot"
                    log.info("claim.rolled_back", extra={"data": {"claim": record.label, "reason": reason}})
                    self._undo(record, restore=False)
                else:
                    self._make_true_again(record)
            kept = self.checkpoint.read_all()
            owned = {tenant for record in kept for tenant in record.tenants}
            for instance in self.grants.held():
                if instance.launcher == "pod" and instance.id not in owned and not instance.id.startswith("replica."):
                    self.grants.release(instance.id)
            self.specs.keep_only(record.uid for record in kept)
            self.layouts.restore_idle()

    def prepared(self) -> tuple[ClaimRecord, ...]:
        return self.checkpoint.read_all()

    def _prepare(self, claim: DraClaim) -> tuple[PreparedDevice, ...]:
        chosen = [self._choose(one) for one in claim.allocated]
        tenants = _tenants(claim, [(one, candidate) for one, candidate, _ in chosen])
        record = self._record(claim, tenants)
        self.checkpoint.write(record)
        try:
            for one, candidate, device_id in chosen:
                if not one.admin:
                    self.layouts.ensure(device_id, candidate.partition.id, candidate.layout)
            given = {instance.id: self.grants.enforce(instance) for instance in self.grants.charge(list(tenants.values()))}
            # One device for each tenant, so that a container has the limits of the request that it names.
            edits = {_suffix(tenant, claim): given[tenant.id].edits for tenant in tenants.values()}
            if seen := [candidate.partition for one, candidate, _ in chosen if one.admin]:
                edits[_ADMIN] = self.grants.look(seen)
            self.specs.write(claim.uid, edits, label=claim.label)
            devices = self._devices(claim, tenants)
        except BaseException:
            self._undo(record)
            raise
        self.checkpoint.write(replace(record, state=ClaimState.PREPARED, devices=devices))
        log.info("claim.prepared", extra={"data": {"claim": claim.label, "uid": claim.uid, "pods": list(claim.pods)}})
        return devices

    def _record(self, claim: DraClaim, tenants: dict[str, PodTenant]) -> ClaimRecord:
        return ClaimRecord(
            uid=claim.uid,
            namespace=claim.namespace,
            name=claim.name,
            state=ClaimState.PREPARING,
            boot_id=self.boot_id,
            tenants=tuple(tenant.id for tenant in tenants.values()),
            pods=claim.pods,
        )

    def _devices(self, claim: DraClaim, tenants: dict[str, PodTenant]) -> tuple[PreparedDevice, ...]:
        prepared = (
            PreparedDevice(
                requests=(one.request,) if one.request == one.main_request else (one.request, one.main_request),
                pool=one.pool,
                device=one.device,
                share_id=one.share_id,
                cdi_ids=(self.specs.device_id(claim.uid, _ADMIN if one.admin else _suffix(tenants[key], claim)),),
            )
            for one in claim.allocated
            if one.admin or (key := _tenant_key(claim, one)) in tenants
        )
        return tuple(dict.fromkeys(prepared))  # several GPUs of one seat are one device to the kubelet

    def _choose(self, one: Allocated) -> tuple[Allocated, Candidate, str]:
        """A request for all memory of a device that is offered whole and in shares takes the whole device."""
        candidate, device_id = self._candidate(one)
        everything = one.memory_bytes == shared_memory_bytes(candidate.partition) and one.compute_ppm is None
        if everything and one.device == candidate.name:
            one = replace(one, memory_bytes=None)
        return one, candidate, device_id

    def _candidate(self, one: Allocated) -> tuple[Candidate, str]:
        if one.partition_id is not None:
            return self._existing(one.partition_id)
        for device in self.hardware.read_devices():
            for repartition in (False, True):
                found = list_candidates(device, repartition=repartition).find(one.device)
                if found is not None:
                    candidate, shared = found
                    if shared and one.memory_bytes is None and not one.admin:
                        raise Conflict(f"{one.device} was allocated without the capacity that it takes")
                    return candidate, device.id
        raise PartitionGone(f"there is no device {one.device} on this node any more")

    def _existing(self, partition_id: str) -> tuple[Candidate, str]:
        for device in self.hardware.read_devices():
            for candidate in list_candidates(device, repartition=False).candidates:
                if candidate.partition.id == partition_id:
                    return candidate, device.id
        raise PartitionGone(f"there is no partition {partition_id} on this node any more")

    def _undo(self, record: ClaimRecord, *, restore: bool = True) -> None:
        self.specs.remove(record.uid)
        for tenant in record.tenants:
            self.grants.release(tenant)
        self.checkpoint.remove(record.uid)
        if restore:
            self.layouts.restore_idle()

    def _is_whole(self, known: ClaimRecord, claim: DraClaim) -> bool:
        """Whether what was prepared is what the claim says now, and still there."""
        held = {(device.device, device.share_id) for device in known.devices}
        wanted = {(one.device, one.share_id) for one in claim.allocated}
        same = known.state is ClaimState.PREPARED and known.boot_id == self.boot_id and held == wanted
        return same and self.specs.exists(known.uid)

    def _make_true_again(self, record: ClaimRecord) -> None:
        """After a restart of the agent: its containers may run, so what they were given must be there."""
        instances = {instance.id: instance for instance in self.grants.held()}
        try:
            given = {}
            for tenant in record.tenants:
                if tenant not in instances:
                    raise Conflict(f"{tenant} holds nothing in the ledger")
                given[tenant] = self.grants.enforce(instances[tenant])
            if not self.specs.exists(record.uid) and record.tenants:
                prefix = f"{record.uid}."
                edits = {name.removeprefix(prefix): one.edits for name, one in given.items()}
                self.specs.write(record.uid, edits, label=record.label)
        except AimGpuError as error:
            # Its pods may still run; they keep what they have, and the GPU's taint says what is wrong.
            log.warning("claim.not_restored", extra={"data": {"claim": record.label, "reason": error.message}})


def _tenants(claim: DraClaim, chosen: Sequence[tuple[Allocated, Candidate]]) -> dict[str, PodTenant]:
    """Tenants by the key of `_tenant_key`, in the order of the allocation."""
    slots: dict[str, list[NodeSlot]] = {}
    for one, candidate in chosen:
        if one.admin:
            continue  # may look at a device that others use, and is charged nothing
        slot = NodeSlot(
            device_id=candidate.partition.device_id,
            partition_id=candidate.partition.id,
            memory_bytes=one.memory_bytes,
            compute_ppm=one.compute_ppm,
        )
        slots.setdefault(_tenant_key(claim, one), []).append(slot)
    tenants = {}
    for key, held in slots.items():
        parameters = _parameters_of(claim, key)
        tenants[key] = PodTenant(
            id=f"{claim.uid}.{key}",
            owner=claim.label,
            model=claim.model,
            slots=tuple(held),
            isolation=parameters.isolation,
            priority=parameters.priority,
        )
    return tenants


def _tenant_key(claim: DraClaim, one: Allocated) -> str:
    limits = claim.parameters.get(one.request, Parameters()).limits
    return "all" if limits is LimitScope.CLAIM else one.main_request


def _parameters_of(claim: DraClaim, key: str) -> Parameters:
    for one in claim.allocated:
        if _tenant_key(claim, one) == key and one.request in claim.parameters:
            return claim.parameters[one.request]
    return Parameters()


def _suffix(tenant: PodTenant, claim: DraClaim) -> str:
    return tenant.id.removeprefix(f"{claim.uid}.")
