"""Layout changes that a claim needs: made when it is prepared, undone when the GPU is idle again.

The ledger has the old layout before anything changes, so that a change that was cut short is rolled back at the next start.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from aimgpu.domain import Device
from aimgpu.domain.slices import Placed, layout_name
from aimgpu.errors import AimGpuError, Conflict, HardwareUnavailable, PartitionGone
from aimgpu.hardware.protocols import Hardware
from aimgpu.ledger import Ledger

log = logging.getLogger(__name__)

KIND = "layout"


@dataclass(slots=True, kw_only=True)
class NodeLayouts:
    hardware: Hardware
    ledger: Ledger
    allowed: bool  # whether a claim may change a layout
    planned: bool = False  # a PartitionPlan changes the node now: claims change nothing
    changing: set[str] = field(default_factory=set)  # GPUs being repartitioned now

    def ensure(self, device_id: str, partition_id: str, wanted: str) -> None:
        """Make that partition exist. `wanted`: the name of a layout, or a MIG placement to add.

        Raises PartitionGone where layouts are fixed, Conflict where grants are in the way, or what the hardware raises.
        """
        device = self._device(device_id)
        if device.partition(partition_id) is not None:
            return
        if self.planned or not self.allowed:
            why = "a PartitionPlan changes this node" if self.planned else "claims may not change layouts on this node"
            raise PartitionGone(f"{device_id} is {device.layout.name} and has no {partition_id}; {why}")
        target = self._target(device, partition_id, wanted)
        self._note(device)
        self.changing.add(device_id)
        try:
            after = self.hardware.apply_layout(device_id, target)
        finally:
            self.changing.discard(device_id)
        if after.partition(partition_id) is None:
            raise HardwareUnavailable(f"{device_id} is {after.layout.name} now, which has no {partition_id}")
        log.info("layout.applied", extra={"data": {"device": device_id, "layout": after.layout.name}})

    def restore_idle(self) -> tuple[str, ...]:
        """Undo the changes of GPUs that hold no grant any more; returns those that were restored."""
        restored = []
        for operation in self.ledger.operations():
            device_id = operation.body.get("device")
            if operation.kind != KIND or device_id in self._held():
                continue
            try:
                device = self._device(str(device_id))
                if device.layout.name != operation.body["before"]:
                    self.changing.add(device.id)
                    self.hardware.apply_layout(device.id, operation.body["before"])
            except AimGpuError as error:
                # A process that is just ending may still hold the GPU; the next round tries again.
                log.warning("layout.restore_failed", extra={"data": {"device": device_id, "reason": error.message}})
                continue
            finally:
                self.changing.discard(str(device_id))
            self.ledger.finish(operation.id)
            restored.append(str(device_id))
            log.info("layout.restored", extra={"data": {"device": device_id, "layout": operation.body["before"]}})
        return tuple(restored)

    def held_devices(self) -> frozenset[str]:
        """GPUs that hold a grant."""
        return frozenset(self._held())

    def accept(self, device_id: str) -> None:
        """The layout that it has now is wanted: there is nothing to go back to."""
        for operation in self.ledger.operations():
            if operation.kind == KIND and operation.body.get("device") == device_id:
                self.ledger.finish(operation.id)

    def _target(self, device: Device, partition_id: str, wanted: str) -> str:
        held = self._held().get(device.id, frozenset())
        if not device.profiles or "@" not in wanted:
            if held:
                raise Conflict(f"{device.id} is {device.layout.name} and in use, it cannot become {wanted} for {partition_id}")
            return wanted
        # MIG: instances that are in use stay, idle ones make room.
        kept = [part for part in device.layout.partitions if part.id in held]
        if any(part.start is None for part in kept):
            raise Conflict(f"{device.id} is in use as a whole, it cannot have {wanted}")
        kind, _, start = wanted.partition("@")
        placed = [Placed(kind=part.kind, start=part.start or 0) for part in kept]
        return layout_name([*placed, Placed(kind=kind, start=int(start))])

    def _note(self, device: Device) -> None:
        """The layout that the GPU had before the first of several changes."""
        known = (operation for operation in self.ledger.operations() if operation.kind == KIND)
        if not any(operation.body.get("device") == device.id for operation in known):
            self.ledger.begin(KIND, {"device": device.id, "before": device.layout.name})

    def _held(self) -> dict[str, Collection[str]]:
        held: dict[str, set[str]] = {}
        for grant in self.ledger.grants():
            held.setdefault(grant.device_id, set()).add(grant.partition_id)
        return dict(held)

    def _device(self, device_id: str) -> Device:
        found = next((device for device in self.hardware.read_devices() if device.id == device_id), None)
        if found is None:
            raise HardwareUnavailable(f"{device_id} is not there", hint="Look at `aimgpu gpus` and the kernel log.")
        return found
