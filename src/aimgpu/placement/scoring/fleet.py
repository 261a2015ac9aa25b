"""A snapshot as arrays: every partition of every node is a cell, and charging one touches one node.

Nodes stand by name, devices by id, partitions by index, so nothing depends on the order of listing; a node's cells are one
row, `wide` cells per device. Exact integers throughout; `code` is the cell's class and free thousandths in one number, which
lets a request kind score a cell by one table look-up.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aimgpu.domain import Ask, Grant, Level, Partition
from aimgpu.placement.scoring.partition_class import PartitionClass, partition_class_of
from aimgpu.placement.scoring.prices import STEPS
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.units import PPM

ROW = STEPS + 1  # codes per partition class
UNLIMITED = 1 << 60  # CPU or host memory that is not known does not limit
_MOST_MOVED = 4096
_COUNTS = [list(range(count)) for count in range(65)]
MICRO = 1_000_000  # free devices of a node are counted in millionths


class Charge(NamedTuple):
    """What one instance takes from one node; taking and releasing are the same record with opposite signs."""

    node: int
    cells: tuple[int, ...]  # columns of the node's row
    memory_bytes: tuple[int, ...]  # one per cell; the whole cell where exclusive
    compute_ppm: tuple[int, ...] = ()  # of each cell; empty where compute is not limited
    cpu_millis: int = 0
    host_memory_bytes: int = 0
    deployment: str = ""


class Fleet:
    """Mutable free resources of all nodes; `changed` says when each last did."""

    capacity: npt.NDArray[np.int64]  # a row a node, a column a cell
    free: npt.NDArray[np.int64]
    class_numbers: npt.NDArray[np.int64]  # by cell; 0: padding, or not to be used

    def __init__(self, snapshot: Snapshot) -> None:
        self.nodes: list[NodeState] = sorted(snapshot.nodes, key=lambda node: node.name)
        self.states: list[list[DeviceState]] = [sorted(node.devices, key=lambda state: state.device.id) for node in self.nodes]
        self.index = {node.name: number for number, node in enumerate(self.nodes)}
        self.classes: list[PartitionClass | None] = [None]
        deep = max((len(states) for states in self.states), default=0)
        wide = max((len(state.device.layout.partitions) for states in self.states for state in states), default=0)
        self.shape = (len(self.nodes), max(deep, 1), max(wide, 1))
        self.wide = self.shape[2]
        self._where: dict[str, dict[tuple[int, int], int]] | None = None  # made when a deployment is first looked for
        self._moved: list[tuple[Charge, int]] = []  # since the start, while it is not made
        self._partitions: list[list[Sequence[Partition]]] = []  # by node and place, in the order of cells
        self.cpu = _free(self.nodes, "cpu_millis", "used_cpu_millis")
        self.host = _free(self.nodes, "host_memory_bytes", "used_host_memory_bytes")
        self.changes = 0
        self.changed = np.zeros(len(self.nodes), dtype=np.int32)  # the last change of each node, counted over all
        self._known: dict[tuple[object, ...], int] = {}  # what partitions are distinguished by
        self._fill()
        usable = np.maximum(self.free, 0)  # foreign processes can hold what was granted
        usable *= STEPS
        usable //= self.capacity
        self.code = self.class_numbers * ROW
        self.code += usable

    def partition_at(self, node: int, cell: int) -> Partition:
        place, number = divmod(cell, self.wide)
        return self._partitions[node][place][number]

    # What few decisions look at is made when it is first looked at: from a snapshot that was never seen most is asked once.

    @cached_property
    def compute(self) -> npt.NDArray[np.int64]:
        """Millionths of each cell's compute that are free."""
        return np.array([row.compute for row in self._rows], dtype=np.int64).reshape(self.free.shape)

    @cached_property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Memory of each device, by node and place."""
        return self._by_place(lambda state: state.device.memory_bytes, 1)

    @cached_property
    def tenants(self) -> npt.NDArray[np.int64]:
        """Grants on each device, by node and place."""
        return self._by_place(lambda state: len(state.grants), 0)

    @cached_property
    def devices(self) -> npt.NDArray[np.int64]:
        """Free devices of each node, in millionths."""
        free = np.maximum(self.free, 0).reshape(self.shape) * MICRO // self.device_bytes[:, :, None]
        total: npt.NDArray[np.int64] = free.sum(axis=(1, 2))
        return total

    @cached_property
    def cells(self) -> dict[str, list[tuple[int, int]]]:
        """Where each partition id is, node and column; ids repeat on nodes. Few asks look one up by its id."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, places in enumerate(self._partitions):
            for place, partitions in enumerate(places):
                for cell, partition in enumerate(partitions, start=place * self.wide):
                    found.setdefault(partition.id, []).append((number, cell))
        return found

    @property
    def where(self) -> dict[str, dict[tuple[int, int], int]]:
        """By deployment: Grants on each device, by node and place."""
        if self._where is None:
            self._where = {}
            for number, states in enumerate(self.states):
                for place, state in enumerate(states):
                    for grant in state.grants:
                        _count(self._where, grant.deployment, (number, place), 1)
            for charge, sign in self._moved:
                self._note_where(self._where, charge, sign)
            self._moved.clear()
        return self._where

    def take(self, charge: Charge) -> None:
        """Charge what an instance takes."""
        self._apply(charge, -1)

    def release(self, charge: Charge) -> None:
        """Give it back."""
        self._apply(charge, 1)

    def _fill(self) -> None:
        _, deep, wide = self.shape
        self._rows = rows = [_Row(deep * wide) for _ in self.states]
        for row, states in zip(rows, self.states, strict=True):
            places = [ordered(state.device.layout.partitions) for state in states]
            self._partitions.append(places)
            for place, (state, partitions) in enumerate(zip(states, places, strict=True)):
                self._fill_device(row, place, state, partitions)
        columns = [row.capacity for row in rows], [row.free for row in rows], [row.class_numbers for row in rows]
        made = np.array(columns, dtype=np.int64).reshape(3, len(rows), deep * wide)
        self.capacity, self.free, self.class_numbers = made[0], made[1], made[2]

    def _by_place(self, read: Callable[[DeviceState], int], padding: int) -> npt.NDArray[np.int64]:
        deep = self.shape[1]
        rows = [[read(state) for state in states] + [padding] * (deep - len(states)) for states in self.states]
        return np.array(rows, dtype=np.int64).reshape(len(rows), deep)

    def _fill_device(self, row: "_Row", place: int, state: DeviceState, partitions: Sequence[Partition]) -> None:
        first = place * self.wide
        last = first + len(partitions)
        row.capacity[first:last] = sizes = [partition.memory_bytes for partition in partitions]
        free, compute = sizes.copy(), [PPM] * len(sizes)
        if state.grants and not _charge_grants(state, partitions, free, compute):
            return
        if state.foreign_bytes:
            free = [left - state.foreign_on(partition) for left, partition in zip(free, partitions, strict=True)]
        row.class_numbers[first:last] = self._class_numbers(state, partitions)
        row.free[first:last], row.compute[first:last] = free, compute

    def _class_numbers(self, state: DeviceState, partitions: Sequence[Partition]) -> list[int]:
        """Partitions of one device that are alike are looked at once."""
        shared, exclusive = state.shared_levels, state.exclusive_levels
        numbers, known, last = list[int](), self._known, None
        device = state.device
        same = (device.product, id(device.vendor), device.memory_bytes, device.compute_units, len(partitions))
        count, alike = 1, bool(partitions) and _alike(partitions)
        kinds = 1 if alike or device.compute_units else len({partition.kind for partition in partitions})
        if alike and _has_same_levels(partitions, shared) and _has_same_levels(partitions, exclusive):
            partitions, count = partitions[:1], len(partitions)
        for partition in partitions:
            levels = (shared.get(partition.id), exclusive.get(partition.id)) if shared or exclusive else None
            key = (partition.kind, partition.memory_bytes, partition.compute_units, levels)
            if key == last:
                numbers.append(numbers[-1])
                continue
            last = key
            number = known.get((same, kinds, key))
            if number is None:
                number = known[same, kinds, key] = self._class_number(partition_class_of(state, partition))
            numbers.append(number)
        return numbers * count

    def _class_number(self, partition_class: PartitionClass) -> int:
        if partition_class in self.classes:
            return self.classes.index(partition_class)
        self.classes.append(partition_class)
        return len(self.classes) - 1

    def _apply(self, charge: Charge, sign: int) -> None:
        node = charge.node
        cpu, host = self.cpu.item(node), self.host.item(node)
        if cpu < UNLIMITED:
            self.cpu[node] = cpu + sign * charge.cpu_millis
        if host < UNLIMITED:
            self.host[node] = host + sign * charge.host_memory_bytes
        tenants = self.tenants
        for cell, memory_bytes in zip(charge.cells, charge.memory_bytes, strict=True):
            place = cell // self.wide
            self._charge_cell((node, cell), place, sign * memory_bytes)
            tenants[node, place] -= sign
        if self._where is not None:
            self._note_where(self._where, charge, sign)
        else:
            self._moved.append((charge, sign))
            if len(self._moved) >= _MOST_MOVED:
                _ = self.where
        if charge.compute_ppm:
            for cell, ppm in zip(charge.cells, charge.compute_ppm, strict=True):
                self.compute[node, cell] += sign * ppm
        self.changes += 1
        self.changed[node] = self.changes

    def _note_where(self, where: dict[str, dict[tuple[int, int], int]], charge: Charge, sign: int) -> None:
        for cell in charge.cells:
            _count(where, charge.deployment, (charge.node, cell // self.wide), -sign)

    def _charge_cell(self, at: tuple[int, int], place: int, change: int) -> None:
        before, capacity = self.free.item(at), self.capacity.item(at)
        free = before + change
        if (change < 0 and free < 0) or free > capacity:
            raise ValueError(f"cell {at} would have {free} of {capacity} bytes free")
        size, usable = self.device_bytes.item(at[0], place), max(free, 0)
        self.devices[at[0]] += usable * MICRO // size - max(before, 0) * MICRO // size
        self.free[at] = free
        self.code[at] = self.class_numbers.item(at) * ROW + usable * STEPS // capacity


class _Row:
    """A node's cells while they are counted; one numpy call per node costs less than one per cell."""

    __slots__ = ("capacity", "class_numbers", "compute", "free")

    def __init__(self, cells: int) -> None:
        self.capacity = [1] * cells
        self.free = [0] * cells
        self.compute = [PPM] * cells
        self.class_numbers = [0] * cells


def _charge_grants(state: DeviceState, partitions: Sequence[Partition], free: list[int], compute: list[int]) -> bool:
    """Subtract what is granted; False where a grant is on a partition that the layout no longer has."""
    cells = {partition.id: cell for cell, partition in enumerate(partitions)}
    alone = list[int]()
    for grant in state.grants:
        cell = cells.get(grant.partition_id)
        if cell is None:
            return False
        free[cell] -= grant.memory_bytes or 1
        if grant.compute_ppm:
            compute[cell] -= grant.compute_ppm
        if grant.exclusive:
            alone.append(cell)
    for cell in alone:
        free[cell] = 0
    return True


def _count(where: dict[str, dict[tuple[int, int], int]], deployment: str, at: tuple[int, int], change: int) -> None:
    there = where.setdefault(deployment, {})
    there[at] = there.get(at, 0) + change


def charges_of(fleet: Fleet, snapshot: Snapshot) -> dict[str, Charge]:
    """What each running instance was charged; who holds nothing that the layouts still have is left out."""
    held: dict[str, list[tuple[Grant, Partition]]] = {}
    for node, state in snapshot.devices():
        for grant in state.grants:
            partition = state.device.partition(grant.partition_id)
            if partition is not None and grant.node == node.name:
                held.setdefault(grant.instance_id, []).append((grant, partition))
    return {instance_id: _charge_of(fleet, found, snapshot.running.get(instance_id)) for instance_id, found in held.items()}


def _charge_of(fleet: Fleet, held: Sequence[tuple[Grant, Partition]], ask: Ask | None) -> Charge:
    grant, _ = held[0]
    home = fleet.index[grant.node]
    return Charge(
        node=home,
        cells=tuple(cell for _, partition in held for node, cell in fleet.cells[partition.id] if node == home),
        memory_bytes=tuple(partition.memory_bytes if each.exclusive else max(each.memory_bytes, 1) for each, partition in held),
        compute_ppm=tuple(each.compute_ppm or 0 for each, _ in held),
        cpu_millis=ask.cpu_millis if ask else 0,
        host_memory_bytes=ask.host_memory_bytes if ask else 0,
        deployment=grant.deployment,
    )


def ordered(partitions: Sequence[Partition]) -> Sequence[Partition]:
    """In the order of cells."""
    count = len(partitions)
    if count < len(_COUNTS) and [partition.index for partition in partitions] == _COUNTS[count]:
        return partitions
    return sorted(partitions, key=lambda partition: (partition.index, partition.id))


def _alike(partitions: Sequence[Partition]) -> bool:
    """Whether all of them are of one size and kind."""
    first = partitions[0]
    kind, memory_bytes, units = first.kind, first.memory_bytes, first.compute_units
    for partition in partitions:
        if partition.memory_bytes != memory_bytes or partition.kind != kind or partition.compute_units != units:
            return False
    return True


def _has_same_levels(partitions: Sequence[Partition], levels: Mapping[str, frozenset[Level]]) -> bool:
    if not levels:
        return True
    listed = len(levels) == len(partitions) and partitions[0].id in levels and partitions[-1].id in levels
    return listed and len(set(levels.values())) == 1


def _free(nodes: Sequence[NodeState], total: str, used: str) -> npt.NDArray[np.int64]:
    values = []
    for node in nodes:
        known = getattr(node, total)
        values.append(UNLIMITED if known is None else known - getattr(node, used))
    return np.array(values, dtype=np.int64)
