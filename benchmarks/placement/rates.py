"""The fewest devices that serve given rates: which partitions each service gets, and which layouts give them.

Each service can be covered by several sets of partitions. A linear program finds prices of partition kinds,
and with them the cheapest covers give a lower bound, sharpened cover by cover. Covers within the slack of that bound are then
combined until a combination can be packed into that number of layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from aimgpu.errors import InvalidInput
from aimgpu.placement.scoring.lp import Array, maximise

Vector = tuple[int, ...]  # Partitions of each kind
_EPSILON = 1e-9
_WIDTHS = (500, 4_000, 30_000)  # combinations kept a service; the last is as hard as it tries
_MOST_MORE = 64  # Devices beyond the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedService:
    """`throughput` is what one partition of a kind serves within the service's limits; kinds that cannot are left out."""

    name: str
    rate: int
    throughput: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePlan:
    devices: int
    bound: float  # no plan needs fewer
    layouts: tuple[Mapping[str, int], ...]  # one per device: partitions of each kind
    partitions: Mapping[str, Mapping[str, int]]  # service: Partitions of each kind

    @property
    def proven_best(self) -> bool:
        return self.devices <= ceil(self.bound - _EPSILON)


def fewest_devices(layouts: Sequence[Mapping[str, int]], services: Sequence[RatedService]) -> RatePlan:
    """Raises InvalidInput where a service cannot be served by any partition."""
    kinds = sorted({kind for layout in layouts for kind in layout})
    shapes = np.array([[layout.get(kind, 0) for kind in kinds] for layout in layouts])
    covers = [_covers(service, kinds) for service in services]
    prices = _prices(shapes, covers)
    bound = sum(float((found @ prices).min()) for found in covers)
    packer = _Packer(shapes, prices)
    first = max(ceil(bound - 1e-6), 1 if services else 0)
    for count in range(first, first + _MOST_MORE):
        for width in _WIDTHS:
            chosen = _combine(covers, prices, count, packer, width)
            if chosen is not None:
                packed = packer.pack(_sum(chosen, len(kinds)), count)
                return _rate_plan(kinds, services, chosen, packed or (), bound)
    raise InvalidInput("no set of layouts serves these rates", hint=f"At most {first + _MOST_MORE} GPUs were tried.")


def _covers(service: RatedService, kinds: Sequence[str]) -> npt.NDArray[np.int64]:
    """Every set of partitions that serves the rate and from which none can be left out."""
    speeds = [service.throughput.get(kind, 0) for kind in kinds]
    usable = [index for index, speed in enumerate(speeds) if speed > 0]
    if not usable:
        raise InvalidInput(f"no partition can serve {service.name} within its limits", hint="Loosen its latency limit.")
    found: set[Vector] = set()

    def extend(place: int, left: int, chosen: list[int]) -> None:
        speed = speeds[usable[place]]
        most = max(-(-left // speed), 0)
        if place == len(usable) - 1:
            found.add(_minimal(speeds, usable, [*chosen, most], service.rate))
            return
        for number in range(most + 1):
            extend(place + 1, left - number * speed, [*chosen, number])

    extend(0, service.rate, [])
    return np.array(sorted(found))


def _minimal(speeds: Sequence[int], usable: Sequence[int], chosen: list[int], rate: int) -> Vector:
    """The set without what it does not need, the slowest partitions going first."""
    spare = sum(speeds[index] * number for index, number in zip(usable, chosen, strict=True)) - rate
    vector = [0] * len(speeds)
    for index, number in sorted(zip(usable, chosen, strict=True), key=lambda pair: speeds[pair[0]]):
        needless = min(spare // speeds[index], number) if spare > 0 else 0
        spare -= needless * speeds[index]
        vector[index] = number - needless
    return tuple(vector)


def _prices(shapes: npt.NDArray[np.int64], covers: Sequence[npt.NDArray[np.int64]]) -> Array:
    """Prices of kinds under which every layout costs at most 1 and the cheapest covers cost the most."""
    kinds, count = shapes.shape[1], len(covers)
    rows = [np.r_[shape, np.zeros(count)] for shape in shapes]
    limits = [1.0] * len(rows)
    fresh = [(service, 0) for service in range(count)]
    while fresh:
        rows += [np.r_[-covers[service][number], np.eye(count)[service]] for service, number in fresh]
        limits += [0.0] * len(fresh)
        solved, _ = maximise(np.r_[np.zeros(kinds), np.ones(count)], np.array(rows, dtype=float), np.array(limits))
        prices, worth = solved[:kinds], solved[kinds:]
        costs = [found @ prices for found in covers]
        fresh = [(service, int(cost.argmin())) for service, cost in enumerate(costs) if worth[service] > cost.min() + 1e-7]
    most = float((shapes @ prices).max(initial=1.0))
    return prices / max(most, 1.0)


def _combine(
    covers: Sequence[npt.NDArray[np.int64]], prices: Array, count: int, packer: "_Packer", width: int
) -> list[Vector] | None:
    """One cover per service such that all fit into `count` devices; None where none was found among those kept."""
    costs = [found @ prices for found in covers]
    slack = count - sum(float(cost.min()) for cost in costs) + _EPSILON
    options = [_within(found, cost - cost.min(), slack) for found, cost in zip(covers, costs, strict=True)]
    order = sorted(range(len(covers)), key=lambda service: len(options[service]))
    kinds = len(prices)
    states: dict[Vector, tuple[float, tuple[Vector, ...]]] = {(0,) * kinds: (0.0, ())}
    for service in order:
        states = _extended(states, options[service], slack, width)
    for total, (_, chosen) in sorted(states.items(), key=lambda item: (item[1][0], item[0])):
        if packer.pack(total, count) is not None:
            return [cover for _, cover in sorted(zip(order, chosen, strict=True))]
    return None


def _within(covers: npt.NDArray[np.int64], extra: Array, slack: float) -> list[tuple[Vector, float]]:
    """Covers that cost at most `slack` more than the cheapest."""
    return [(tuple(covers[number].tolist()), float(extra[number])) for number in np.flatnonzero(extra <= slack)]


def _extended(
    states: Mapping[Vector, tuple[float, tuple[Vector, ...]]], options: list[tuple[Vector, float]], slack: float, width: int
) -> dict[Vector, tuple[float, tuple[Vector, ...]]]:
    found: dict[Vector, tuple[float, tuple[Vector, ...]]] = {}
    for total, (spent, chosen) in states.items():
        for cover, cost in options:
            if spent + cost > slack:
                continue
            key = tuple(map(int.__add__, total, cover))
            if key not in found or found[key][0] > spent + cost + _EPSILON:
                found[key] = (spent + cost, (*chosen, cover))
    if len(found) <= width:
        return found
    return dict(sorted(found.items(), key=lambda item: (item[1][0], item[0]))[:width])


class _Packer:
    """Whether this number of devices gives these counts of partitions of each kind, and with which layouts."""

    def __init__(self, shapes: npt.NDArray[np.int64], prices: Array) -> None:
        self._shapes: list[Vector] = [tuple(shape) for shape in shapes.tolist()]
        self._prices = prices.tolist()
        self._hopeless: set[tuple[Vector, int]] = set()

    def pack(self, wanted: Vector, count: int) -> tuple[Vector, ...] | None:
        kind = next((kind for kind, number in enumerate(wanted) if number), None)
        if kind is None:
            return ()
        cost = sum(number * price for number, price in zip(wanted, self._prices, strict=True))
        if count == 0 or cost > count + 1e-6 or (wanted, count) in self._hopeless:
            return None
        tried = set()
        for shape in self._shapes:
            rest = tuple(max(number - given, 0) for number, given in zip(wanted, shape, strict=True))
            if shape[kind] and rest not in tried:
                tried.add(rest)
                packed = self.pack(rest, count - 1)
                if packed is not None:
                    return (shape, *packed)
        self._hopeless.add((wanted, count))
        return None


def _sum(vectors: Sequence[Vector], width: int) -> Vector:
    return tuple(sum(vector[kind] for vector in vectors) for kind in range(width))


def _rate_plan(
    kinds: Sequence[str], services: Sequence[RatedService], chosen: Sequence[Vector], packed: Sequence[Vector], bound: float
) -> RatePlan:
    def named(vector: Vector) -> dict[str, int]:
        return {kind: number for kind, number in zip(kinds, vector, strict=True) if number}

    return RatePlan(
        devices=len(packed),
        bound=bound,
        layouts=tuple(named(shape) for shape in packed),
        partitions={service.name: named(cover) for service, cover in zip(services, chosen, strict=True)},
    )
