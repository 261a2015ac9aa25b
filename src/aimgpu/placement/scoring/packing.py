"""Filling empty devices: which layout each gets and who shares which partition, device by device, dearest first."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aimgpu.domain import Layout, Partition
from aimgpu.placement.layouts import laid_out
from aimgpu.placement.need import Need
from aimgpu.placement.scoring.lp import Array, maximise
from aimgpu.placement.scoring.partition_class import Terms, partition_class_of, terms_for
from aimgpu.placement.scoring.prices import STEPS
from aimgpu.placement.snapshot import DeviceState

_EPSILON = 1e-6
_MOST_ROUNDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A partition of a layout, and how each need would take it."""

    partition: Partition
    terms: tuple[Terms | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One device's layout, and for each of its partitions how many of each need go there."""

    device_id: str
    layout: Layout
    rooms: tuple[tuple[Room, Counter[int]], ...]


class Fill:
    """What one kind of device can hold of some needs; the same answers serve the bound and the plan."""

    def __init__(self, template: DeviceState, needs: Sequence[Need]) -> None:
        self.needs = list(needs)
        self.layouts = _distinct(template, self.needs)

    def fits_somewhere(self, number: int) -> bool:
        return any(room.terms[number] is not None for _, rooms in self.layouts for room in rooms)

    def bound(self, demand: Sequence[int]) -> tuple[float, Array]:
        """No fewer devices can hold the demand; and the prices that show it, by linear programming.

        Sizes are rounded down here, so every real plan is among what is compared.
        """
        wanted = np.array(demand, dtype=float)
        patterns = list(np.eye(len(wanted)))
        best, shown = 0.0, np.zeros(len(wanted))
        for _ in range(_MOST_ROUNDS if len(wanted) else 0):
            prices, _ = maximise(wanted, np.array(patterns), np.ones(len(patterns)))
            dearest, pattern = max((self._hold(rooms, prices, demand, down=True) for _, rooms in self.layouts), key=_first)
            scaled = float(prices @ wanted) / max(dearest, 1.0)
            if scaled > best:
                best, shown = scaled, prices / max(dearest, 1.0)
            if dearest <= 1 + _EPSILON:
                break
            patterns.append(pattern)
        return best, shown

    def best_device(self, state: DeviceState, prices: Array, left: Sequence[int]) -> Filled | None:
        """The dearest filling of one empty device with what is left; fewer partitions where it makes no difference."""
        found: tuple[float, Layout, list[tuple[Room, Counter[int]]]] | None = None
        for layout, rooms in self.layouts:
            value, filled = self._fill(rooms, prices, left)
            if value > _EPSILON and (found is None or value > found[0] + _EPSILON):
                found = (value, layout, filled)
        if found is None:
            return None
        own = next(layout for layout in state.device.layouts if layout.name == found[1].name)
        by_index = {partition.index: partition for partition in own.partitions}
        rooms_here = tuple((replace(room, partition=by_index[room.partition.index]), taken) for room, taken in found[2])
        return Filled(device_id=state.device.id, layout=own, rooms=rooms_here)

    def _fill(self, rooms: Sequence[Room], prices: Array, left: Sequence[int]) -> tuple[float, list[tuple[Room, Counter[int]]]]:
        remaining, filled, value = list(left), list[tuple[Room, Counter[int]]](), 0.0
        for room in sorted(rooms, key=lambda room: (room.partition.memory_bytes, room.partition.index)):
            worth, taken = _fill_room(room, prices, remaining, down=False)
            value += worth
            for number, count in taken.items():
                remaining[number] -= count
            filled.append((room, taken))
        return value, filled

    def _hold(self, rooms: Sequence[Room], prices: Array, demand: Sequence[int], *, down: bool) -> tuple[float, Array]:
        value, pattern = 0.0, np.zeros(len(prices))
        known: dict[tuple[int, tuple[Terms | None, ...]], tuple[float, Counter[int]]] = {}
        for room in rooms:
            key = (room.partition.memory_bytes, room.terms)
            if key not in known:
                known[key] = _fill_room(room, prices, demand, down=down)
            value += known[key][0]
            for number, count in known[key][1].items():
                pattern[number] += count
        return value, pattern


def _first(found: tuple[float, Array]) -> float:
    return found[0]


def _distinct(template: DeviceState, needs: Sequence[Need]) -> list[tuple[Layout, list[Room]]]:
    """Layouts that differ in what they can hold, fewest partitions first; those that keep the memory mode come first."""
    empty = replace(template, grants=(), foreign_bytes={})
    found: dict[tuple[object, ...], tuple[Layout, list[Room]]] = {}
    mode = template.device.layout.memory_mode
    order = sorted(template.device.layouts, key=lambda each: (each.memory_mode != mode, len(each.partitions), each.name))
    for layout in order:
        state = laid_out(empty, layout)
        rooms = []
        for partition in layout.partitions:
            partition_class = partition_class_of(state, partition)
            rooms.append(Room(partition=partition, terms=tuple(terms_for(need, partition_class) for need in needs)))
        shape = tuple(sorted((room.partition.memory_bytes, repr(room.terms)) for room in rooms))
        found.setdefault(shape, (layout, rooms))
    return list(found.values())


def _fill_room(room: Room, prices: Array, left: Sequence[int], *, down: bool) -> tuple[float, Counter[int]]:
    """The dearest for one partition: one need alone, or several that share it."""
    alone = [
        (float(prices[number]), -number)
        for number, terms in enumerate(room.terms)
        if terms is not None and terms.exclusive and left[number] > 0
    ]
    worth, taken = _share(room, prices, left, down=down)
    if alone and max(alone)[0] > worth + _EPSILON:
        return max(alone)[0], Counter({-max(alone)[1]: 1})
    return worth, taken


def _share(room: Room, prices: Array, left: Sequence[int], *, down: bool) -> tuple[float, Counter[int]]:
    """A knapsack over thousandths of the partition; shares are rounded down for a bound, up for a plan."""
    cell = room.partition.memory_bytes
    items = []
    for number, terms in enumerate(room.terms):
        if terms is None or terms.exclusive or left[number] <= 0 or prices[number] <= _EPSILON:
            continue
        size = terms.memory_bytes * STEPS // cell if down else -(-terms.memory_bytes * STEPS // cell)
        most = left[number] if size == 0 else min(left[number], STEPS // size)
        items += [(size * part, float(prices[number]) * part, number, part) for part in _halves(most)]
    worth = np.zeros(STEPS + 1)
    chosen = []
    for size, price, _, _ in items:
        better = np.zeros(STEPS + 1, dtype=bool)
        candidate = worth[: STEPS + 1 - size] + price
        better[size:] = candidate > worth[size:] + 1e-12
        worth = worth.copy()
        worth[size:] = np.maximum(worth[size:], candidate)
        chosen.append(better)
    taken: Counter[int] = Counter()
    free = STEPS
    for (size, _, number, part), better in zip(reversed(items), reversed(chosen), strict=True):
        if better[free]:
            taken[number] += part
            free -= size
    return float(worth[STEPS]), taken


def _halves(most: int) -> list[int]:
    """Parts that sum to `most` and make every smaller number."""
    parts, size = [], 1
    while most > 0:
        parts.append(min(size, most))
        most -= size
        size *= 2
    return parts
