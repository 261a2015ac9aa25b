"""A Snapshot as arrays: every Partition of every node is a cell, and charging one touches one node.

Nodes stand by name, Devices by id, Partitions by index, so that nothing depends on how they were listed; a node's cells are one
row, `wide` cells a Device. Exact integers throughout; `code` is the cell's Trait and its free thousandths in one number, which
lets a request kind score a cell by one table look-up.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aimgpu.domain import Ask, Grant, Partition
from aimgpu.placement.fit import stale_grants
from aimgpu.placement.scoring.partition_class import PartitionClass, partition_class_of
from aimgpu.placement.scoring.prices import STEPS
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.units import PPM

ROW = STEPS + 1  # codes a trait
UNLIMITED = 1 << 60  # CPU or host memory that is not known does not limit
MICRO = 1_000_000  # free Devices of a node are counted in millionths


class Charge(NamedTuple):
    """What one instance takes from one node; taking and releasing are the same record with opposite signs."""

    node: int
    cells: tuple[int, ...]  # columns of the node's row
    memory_bytes: tuple[int, ...]  # one a cell; the whole cell where exclusive
    compute_ppm: tuple[int, ...] = ()  # of each cell; empty where compute is not limited
    cpu_millis: int = 0
    host_memory_bytes: int = 0
    deployment: str = ""


class Fleet:
    """Mutable free resources of all nodes; `version` ticks on a node whenever it changes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.nodes: list[NodeState] = sorted(snapshot.nodes, key=lambda node: node.name)
        self.states: list[list[DeviceState]] = [sorted(node.devices, key=lambda state: state.device.id) for node in self.nodes]
        self.index = {node.name: number for number, node in enumerate(self.nodes)}
        self.traits: list[PartitionClass | None] = [None]
        deep = max((len(states) for states in self.states), default=0)
        wide = max((len(state.device.layout.partitions) for states in self.states for state in states), default=0)
        self.shape = (len(self.nodes), max(deep, 1), max(wide, 1))
        self.wide = self.shape[2]
        rows = (self.shape[0], self.shape[1] * self.wide)
        self.capacity = np.ones(rows, dtype=np.int64)
        self.free = np.zeros(rows, dtype=np.int64)
        self.compute = np.full(rows, PPM, dtype=np.int64)
        self.trait = np.zeros(rows, dtype=np.int32)  # 0: padding, or a Device that must not be used
        self.device_bytes = np.ones(self.shape[:2], dtype=np.int64)
        self.tenants = np.zeros(self.shape[:2], dtype=np.int64)  # Grants a Device
        self.where: dict[str, dict[tuple[int, int], int]] = {}  # deployment: Grants on each Device, by node and place
        self._partitions: list[list[list[Partition]]] = []  # by node and place, in the order of cells
        self.cpu = _free(self.nodes, "cpu_millis", "used_cpu_millis")
        self.host = _free(self.nodes, "host_memory_bytes", "used_host_memory_bytes")
        self.version = np.zeros(len(self.nodes), dtype=np.int32)
        self._known: dict[PartitionClass, int] = {}
        self._fill()
        usable = np.maximum(self.free, 0)  # foreign processes can hold what was granted
        self.code = (self.trait * ROW + usable * STEPS // self.capacity).astype(np.int32)
        self.devices = (usable * MICRO // np.repeat(self.device_bytes, self.wide, axis=1)).sum(axis=1)

    def partition_at(self, node: int, cell: int) -> Partition:
        place, number = divmod(cell, self.wide)
        return self._partitions[node][place][number]

    @cached_property
    def cells(self) -> dict[str, list[tuple[int, int]]]:
        """Where each Partition id is, node and column; ids repeat on nodes. Few Asks look one up by its id."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, places in enumerate(self._partitions):
            for place, partitions in enumerate(places):
                for cell, partition in enumerate(partitions, start=place * self.wide):
                    found.setdefault(partition.id, []).append((number, cell))
        return found

    def take(self, charge: Charge) -> None:
        self._apply(charge, -1)

    def release(self, charge: Charge) -> None:
        self._apply(charge, 1)

    def _fill(self) -> None:
        for number, states in enumerate(self.states):
            row = _Row(self.free.shape[1])
            self._partitions.append([ordered(state.device.layout.partitions) for state in states])
            for place, state in enumerate(states):
                self.device_bytes[number, place] = state.device.memory_bytes
                self.tenants[number, place] = len(state.grants)
                self._fill_device(row, number, place, state)
            self.capacity[number], self.free[number] = row.capacity, row.free
            self.compute[number], self.trait[number] = row.compute, row.trait

    def _fill_device(self, row: "_Row", number: int, place: int, state: DeviceState) -> None:
        by_cell: dict[str, list[Grant]] = {}
        for grant in state.grants:
            by_cell.setdefault(grant.partition_id, []).append(grant)
            there = self.where.setdefault(grant.deployment, {})
            there[number, place] = there.get((number, place), 0) + 1
        first, partitions = place * self.wide, self._partitions[number][place]
        last = first + len(partitions)
        row.capacity[first:last] = sizes = [partition.memory_bytes for partition in partitions]
        if by_cell and stale_grants(state):
            return
        row.trait[first:last] = self._trait_numbers(state, partitions)
        row.free[first:last] = sizes
        for cell, partition in enumerate(partitions, start=first) if by_cell or state.foreign_bytes else ():
            if partition.id in by_cell:
                held, ppm = _taken(by_cell[partition.id], partition.memory_bytes)
                row.free[cell] -= held
                row.compute[cell] -= ppm
            if state.foreign_bytes:
                row.free[cell] -= state.foreign_on(partition)

    def _trait_numbers(self, state: DeviceState, partitions: Sequence[Partition]) -> list[int]:
        """Partitions of one Device that are alike are looked at once."""
        seen: dict[tuple[object, ...], int] = {}
        numbers = []
        for partition in partitions:
            levels = (state.shared_levels.get(partition.id), state.exclusive_levels.get(partition.id))
            key = (partition.kind, partition.memory_bytes, partition.compute_units, *levels)
            if key not in seen:
                seen[key] = self._trait_number(partition_class_of(state, partition))
            numbers.append(seen[key])
        return numbers

    def _trait_number(self, trait: PartitionClass) -> int:
        number = self._known.get(trait)
        if number is None:
            number = self._known[trait] = len(self.traits)
            self.traits.append(trait)
        return number

    def _apply(self, charge: Charge, sign: int) -> None:
        node = charge.node
        if charge.cpu_millis and self.cpu[node] < UNLIMITED:
            self.cpu[node] += sign * charge.cpu_millis
        if charge.host_memory_bytes and self.host[node] < UNLIMITED:
            self.host[node] += sign * charge.host_memory_bytes
        for cell, memory_bytes in zip(charge.cells, charge.memory_bytes, strict=True):
            place = cell // self.wide
            self._charge_cell((node, cell), place, sign * memory_bytes)
            self.tenants[node, place] -= sign
            there = self.where.setdefault(charge.deployment, {})
            there[node, place] = there.get((node, place), 0) - sign
        for cell, ppm in zip(charge.cells, charge.compute_ppm, strict=False):
            self.compute[node, cell] += sign * ppm
        self.version[node] += 1

    def _charge_cell(self, at: tuple[int, int], place: int, change: int) -> None:
        before, capacity = self.free.item(at), self.capacity.item(at)
        free = before + change
        if (change < 0 and free < 0) or free > capacity:
            raise ValueError(f"cell {at} would have {free} of {capacity} bytes free")
        size, usable = self.device_bytes.item(at[0], place), max(free, 0)
        self.devices[at[0]] += usable * MICRO // size - max(before, 0) * MICRO // size
        self.free[at] = free
        self.code[at] = self.trait.item(at) * ROW + usable * STEPS // capacity


class _Row:
    """A node's cells while they are counted; one numpy call a node is less than one a cell."""

    __slots__ = ("capacity", "compute", "free", "trait")

    def __init__(self, cells: int) -> None:
        self.capacity = [1] * cells
        self.free = [0] * cells
        self.compute = [PPM] * cells
        self.trait = [0] * cells


def charges_of(fleet: Fleet, snapshot: Snapshot) -> dict[str, Charge]:
    """What each running instance was charged; who holds nothing that the Layouts still have is left out."""
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


def ordered(partitions: Iterable[Partition]) -> list[Partition]:
    """In the order of cells."""
    return sorted(partitions, key=lambda partition: (partition.index, partition.id))


def _taken(grants: Sequence[Grant], cell_bytes: int) -> tuple[int, int]:
    """Bytes and compute that Grants take of a cell; an exclusive one takes all."""
    ppm = sum([grant.compute_ppm or 0 for grant in grants])
    if any(grant.exclusive for grant in grants):
        return cell_bytes, ppm
    return sum([max(grant.memory_bytes, 1) for grant in grants]), ppm


def _free(nodes: Sequence[NodeState], total: str, used: str) -> npt.NDArray[np.int64]:
    values = []
    for node in nodes:
        known = getattr(node, total)
        values.append(UNLIMITED if known is None else known - getattr(node, used))
    return np.array(values, dtype=np.int64)
