"""Simulated GPUs behind the same protocol as real ones."""

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Layout, Partition, Vendor
from aimgpu.errors import DriverReloadNeeded, LayoutNotApplied, PartitionBusy, UnknownDevice, UnknownLayout
from aimgpu.hardware.amd import modes
from aimgpu.hardware.protocols import Finding, Identity
from aimgpu.hardware.simulated.holders import (
    DEVICE_VARIABLE,
    PARTITION_VARIABLE,
    SCOPE_VARIABLE,
    Holder,
    find_holders,
)
from aimgpu.hardware.simulated.layouts import LayoutBook
from aimgpu.hardware.simulated.products import Product, find_product
from aimgpu.hardware.simulated.state import SimulatedState, State, StateStore

_NAMES_IN_HINT = 12


class _Slot:
    """One simulated GPU: what never changes about it."""

    def __init__(self, product: Product, number: int, index: int, prefix: str) -> None:
        self.product = product
        self.id = f"{prefix}-{product.name.lower()}-{number}"
        self.index = index
        self.hive = f"sim-hive-{product.name.lower()}" if product.linked else None
        self.book = LayoutBook(product, self.id)


class SimulatedHardware:
    """GPUs that are not there. Layouts last as long as the state file; what holds a device is a live process."""

    id_prefix = "sim"

    def __init__(self, products: Sequence[tuple[str, int]], state_path: Path | None = None) -> None:
        """`products`: names and how many of each, e.g. [("MI300X", 2)]. Raises UnknownProduct."""
        self._slots = {slot.id: slot for slot in _make_slots(products, self.id_prefix)}
        self._store = StateStore(state_path)
        self._scope = str(state_path.absolute()) if state_path else uuid.uuid4().hex

    def read_devices(self) -> tuple[Device, ...]:
        """With the layouts that were last applied."""
        state = self._store.read()
        return tuple(self._device(slot, state) for slot in self._slots.values())

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """Bytes are known for what the state file injects only: a simulated tenant's memory is not on any device."""
        state, holders = self._store.read(), find_holders(self._scope)
        return tuple(_usage(slot.id, state, holders) for slot in self._slots.values())

    def apply_layout(self, device_id: str, layout_name: str, *, reload_driver: bool = False) -> Device:
        """Refuses what a real GPU would refuse."""
        slot = self._slot(device_id)
        with self._store.edit() as state:
            current = self._layout(slot, state)
            wanted = self._wanted(slot, layout_name, current)
            if wanted.name != current.name:
                if wanted.memory_mode == current.memory_mode:
                    self._refuse_if_busy(_leaving(slot, current, wanted), state, wanted.name)
                    self._set_layout(slot, wanted, state)
                else:
                    self._change_memory_mode(slot, wanted, state, reload_driver=reload_driver)
            read_back = self._device(slot, state)
        if read_back.layout.name != wanted.name:
            raise LayoutNotApplied(
                f"{device_id} was asked to become {wanted.name} and is {read_back.layout.name}",
                hint="The change was accepted and did not take effect. Look at the kernel log, then try again.",
            )
        return read_back

    def identify(self, device: Device, partition: Partition) -> Identity:
        """Variables by which `find_holders` knows the process."""
        chip = self._slot(device.id).product.chip
        environment = {
            DEVICE_VARIABLE: device.id,
            SCOPE_VARIABLE: self._scope,
            "AIM_PARTITION_ID": str(partition.index),
            PARTITION_VARIABLE: partition.id,
            "AIM_COMPUTE_MODE": device.layout.compute_mode or partition.kind,
        }
        if device.layout.memory_mode is not None:
            environment["AIM_MEMORY_MODE"] = device.layout.memory_mode
        if chip is not None and len(device.layout.partitions) > 1:  # the only partition has every die
            each = chip.xccs // len(device.layout.partitions)
            owned = range(partition.index * each, (partition.index + 1) * each)
            environment["AIM_XCD_ID"] = ",".join(str(xcd) for xcd in owned)
        return Identity(environment=environment)

    def inspect(self) -> tuple[Finding, ...]:
        """Nothing can be wrong with a GPU that is not there, but what the state file says."""
        faults = self._store.read().faults
        return tuple(
            Finding(code="lost", subject=slot.id, text=f"{slot.id} does not answer any more (simulated)")
            for slot in self._slots.values()
            if faults.get(slot.id) == "lost"
        )

    def _change_memory_mode(self, slot: _Slot, wanted: Layout, state: State, *, reload_driver: bool) -> None:
        if not reload_driver:
            others = [member.id for member in self._hive(slot) if member is not slot]
            also = f" It changes {', '.join(others)} too." if others else ""
            raise DriverReloadNeeded(
                f"{wanted.name} on {slot.id} needs memory mode {wanted.memory_mode}, which takes a driver reload",
                hint=f"Pass --reload-driver when all GPU work on this machine may stop.{also}",
                page_hint=f"Choose to reload the driver when all GPU work on this machine may stop.{also}",
            )
        hive = self._hive(slot)
        unchanged = [(other, self._layout(other, state)) for other in self._slots.values() if other not in hive]
        for member in hive:
            self._entry(member, state).pending_memory_mode = wanted.memory_mode
        self._reload(state)
        for member in hive:
            self._set_layout(member, member.book.find(wanted.name, wanted) or self._layout(member, state), state)
        for other, layout in unchanged:  # the driver came back with a compute mode of its choice
            self._set_layout(other, layout, state)

    def _reload(self, state: State) -> None:
        self._refuse_if_busy(self._amd_ids(), state, "a driver reload")
        for slot in self._slots.values():
            chip = slot.product.chip
            if chip is None:
                continue
            entry, current = self._entry(slot, state), self._layout(slot, state)
            memory_mode = entry.pending_memory_mode or current.memory_mode or "NPS1"
            entry.pending_memory_mode = None
            layout = slot.book.find(modes.layout_name(modes.mode_after_reload(memory_mode, chip), memory_mode), current)
            self._set_layout(slot, layout or slot.book.default, state)

    def _refuse_if_busy(self, partitions: Iterable[str], state: State, wanted: str) -> None:
        """`partitions`: ids of partitions, or of devices for everything on them."""
        watched, holders = frozenset(partitions), find_holders(self._scope)
        held = [
            (process.pid, process.name)
            for usage in (_usage(slot.id, state, holders) for slot in self._slots.values())
            for process in usage.processes
            if usage.device_id in watched or process.partition_id in watched
        ]
        if held:
            who = ", ".join(f"pid {pid} ({name})" if name else f"pid {pid}" for pid, name in held)
            raise PartitionBusy(
                f"cannot set {wanted}: {len(held)} process{'es' if len(held) > 1 else ''} in the way: {who}",
                hint="Stop them, or let `aimgpu partition apply` drain what it started.",
                page_hint="Stop them. Models that aimgpu started are drained first.",
            )

    def _set_layout(self, slot: _Slot, layout: Layout, state: State) -> None:
        if state.faults.get(slot.id) != "stuck":
            self._entry(slot, state).layout = layout.name

    def _wanted(self, slot: _Slot, name: str, current: Layout) -> Layout:
        layout = slot.book.find(name, current)
        if layout is None:
            names = [known.name for known in slot.book.layouts]
            more = f", and {len(names) - _NAMES_IN_HINT} more" if len(names) > _NAMES_IN_HINT else ""
            raise UnknownLayout(
                f"{slot.id} ({slot.product.name}) cannot have the layout {name!r}",
                hint=f"It can have: {', '.join(names[:_NAMES_IN_HINT])}{more}.",
            )
        return layout

    def _layout(self, slot: _Slot, state: State) -> Layout:
        name = state.devices[slot.id].layout if slot.id in state.devices else slot.book.default.name
        return slot.book.find(name, slot.book.default) or slot.book.default

    def _device(self, slot: _Slot, state: State) -> Device:
        layout, listed = self._layout(slot, state), slot.book.layouts
        return Device(
            id=slot.id,
            index=slot.index,
            vendor=slot.product.vendor,
            product=slot.product.name,
            market_name=slot.product.market_name,
            memory_bytes=slot.product.memory_bytes,
            compute_units=slot.product.compute_units,
            layout=layout,
            layouts=listed if layout in listed else (*listed, layout),
            hive=slot.hive,
            pending_memory_mode=state.devices[slot.id].pending_memory_mode if slot.id in state.devices else None,
            simulated=True,
            profiles=slot.product.mig,
        )

    def _entry(self, slot: _Slot, state: State) -> SimulatedState:
        return state.devices.setdefault(slot.id, SimulatedState(layout=slot.book.default.name))

    def _hive(self, slot: _Slot) -> list[_Slot]:
        return [other for other in self._slots.values() if other is slot or (slot.hive and other.hive == slot.hive)]

    def _amd_ids(self) -> list[str]:
        return [slot.id for slot in self._slots.values() if slot.product.vendor is Vendor.AMD]

    def _slot(self, device_id: str) -> _Slot:
        if device_id not in self._slots:
            raise UnknownDevice(f"there is no GPU {device_id}", hint=f"GPUs here: {', '.join(self._slots)}.")
        return self._slots[device_id]


def _make_slots(products: Sequence[tuple[str, int]], prefix: str) -> list[_Slot]:
    slots: list[_Slot] = []
    numbers: dict[str, int] = {}
    for name, count in products:
        product = find_product(name)
        for _ in range(count):
            number = numbers.get(product.name, 0)
            numbers[product.name] = number + 1
            slots.append(_Slot(product, number, len(slots), prefix))
    return slots


def _leaving(slot: _Slot, current: Layout, wanted: Layout) -> list[str]:
    """What must be idle: the whole device, but between MIG layouts only the instances that go."""
    if slot.product.chip is not None or current is slot.book.default or wanted is slot.book.default:
        return [slot.id]
    staying = {partition.id for partition in wanted.partitions}
    return [partition.id for partition in current.partitions if partition.id not in staying]


def _usage(device_id: str, state: State, holders: Iterable[Holder]) -> DeviceUsage:
    tenants = [
        ForeignProcess(pid=holder.pid, name=holder.name, memory_bytes=None, partition_id=holder.partition_id)
        for holder in holders
        if holder.device_id == device_id
    ]
    injected = [
        ForeignProcess(pid=entry.pid, name=entry.name, memory_bytes=entry.memory_bytes, partition_id=entry.partition)
        for entry in state.foreign
        if entry.device == device_id
    ]
    processes = (*tenants, *injected)
    known = all(process.memory_bytes is not None for process in processes)
    by_partition: dict[str, int] = {}
    for process in injected:
        if process.partition_id is not None and process.memory_bytes is not None:
            by_partition[process.partition_id] = by_partition.get(process.partition_id, 0) + process.memory_bytes
    return DeviceUsage(
        device_id=device_id,
        used_bytes=sum(process.memory_bytes or 0 for process in processes) if known else None,
        used_bytes_by_partition=by_partition,
        utilization_percent=None,
        processes=processes,
    )
