"""What is asked for, and how often: all that prices are made from."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Auto, Fraction, Memory, Whole
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import PPM

_Key = tuple[object, ...]
_MOST_SHAPES = 4096
_SHAPES: dict[_Key, Ask] = {}  # one object per shape, so that others can know it by identity
_SHAPE_OF: dict[int, tuple[Ask, Ask]] = {}  # by identity of the ask, which is kept alive here
_ORDERS: dict[int, tuple[Ask, str]] = {}  # by identity of the shape, which is kept alive here


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shapes of asks with their counts. An ask's name, priority and affinity do not matter to its shape."""

    counts: tuple[tuple[Ask, int], ...] = ()
    host_memory_bytes: int = 0  # of all asks for devices together, if there is more than one node to choose from

    @classmethod
    def of(cls, asks: Iterable[Ask]) -> "Mix":
        found = tuple(asks)
        return cls(counts=tuple(sorted(_counted(found), key=_order)), host_memory_bytes=_host_bytes(found))

    @classmethod
    def given(cls, snapshot: Snapshot) -> "Mix":
        """Learned from what runs. An ask that was sized elsewhere counts with the bytes that its instance was given."""
        counted = _counted(snapshot.running.values())
        if any(shape.footprint_bytes is None and isinstance(shape.want, Auto) for shape, _ in counted):
            given = {grant.instance_id: grant.memory_bytes for _, state in snapshot.devices() for grant in state.grants}
            sized = (_sized(ask, given.get(instance_id)) for instance_id, ask in snapshot.running.items())
            counted = _counted(ask for ask in sized if ask is not None)
        host = _host_bytes(snapshot.running.values()) if len(snapshot.nodes) > 1 else 0
        return cls(counts=tuple(sorted(counted, key=_order)), host_memory_bytes=host)

    def with_asks(self, asks: Iterable[Ask]) -> "Mix":
        """The mix with these asks counted too."""
        counts, more = list(self.counts), tuple(asks)
        for item in _counted(more):
            order = _order(item)
            place = bisect_left(counts, order, key=_order)
            if place < len(counts) and _order(counts[place]) == order:
                counts[place] = (item[0], counts[place][1] + item[1])
            else:
                counts.insert(place, item)
        return Mix(counts=tuple(counts), host_memory_bytes=self.host_memory_bytes + _host_bytes(more))


def shape_of(ask: Ask) -> Ask:
    """The ask without what does not change its size or where it may go; one object per shape."""
    return _interned(_key(ask), ask)


def _key(ask: Ask) -> _Key:
    """What asks of one shape share. Members of an enum are known by identity: they hash in Python."""
    want = ask.want
    amount = want.memory_bytes if want.__class__ is Memory else want
    size = (amount, ask.footprint_bytes, ask.devices, ask.compute_ppm, id(ask.isolation), ask.cpu_millis)
    return (size, ask.products, ask.refused_products, ask.vendor, ask.refused_vendor, id(ask.spread))


def _interned(key: _Key, ask: Ask) -> Ask:
    shape = _SHAPES.get(key)
    if shape is None:
        if len(_SHAPES) >= _MOST_SHAPES:
            _SHAPES.clear()
            _SHAPE_OF.clear()
            _ORDERS.clear()
        shape = _SHAPES[key] = Ask(
            name="",
            want=ask.want,
            footprint_bytes=ask.footprint_bytes,
            devices=ask.devices,
            compute_ppm=ask.compute_ppm,
            isolation=ask.isolation,
            cpu_millis=ask.cpu_millis,
            products=ask.products,
            refused_products=ask.refused_products,
            vendor=ask.vendor,
            refused_vendor=ask.refused_vendor,
            spread=ask.spread,
        )
    return shape


def _counted(asks: Iterable[Ask]) -> list[tuple[Ask, int]]:
    """How often each shape is asked for. Running asks are the same objects from snapshot to snapshot."""
    found: dict[int, int] = {}
    shapes: dict[int, Ask] = {}
    for ask in asks:
        known = _SHAPE_OF.get(id(ask))
        shape = known[1] if known is not None and known[0] is ask else _remember_shape(ask)
        number = id(shape)
        shapes[number] = shape
        found[number] = found.get(number, 0) + 1
    return [(shapes[number], count) for number, count in found.items()]


def _host_bytes(asks: Iterable[Ask]) -> int:
    return sum(ask.host_memory_bytes for ask in asks if ask.devices > 0)


def _remember_shape(ask: Ask) -> Ask:
    if len(_SHAPE_OF) >= _MOST_SHAPES:
        _SHAPE_OF.clear()
    shape = _interned(_key(ask), ask)
    _SHAPE_OF[id(ask)] = (ask, shape)
    return shape


def _order(item: tuple[Ask, int]) -> str:
    """In an order that does not depend on who asked first; a set's repr differs from process to process."""
    shape = item[0]
    known = _ORDERS.get(id(shape))
    if known is not None and known[0] is shape:
        return known[1]
    plain = replace(shape, products=frozenset(), refused_products=frozenset())
    order = repr((plain, sorted(shape.products), sorted(shape.refused_products)))
    _ORDERS[id(shape)] = (shape, order)
    return order


def _sized(ask: Ask, granted_bytes: int | None) -> Ask | None:
    if not isinstance(ask.want, Auto) or ask.footprint_bytes is not None:
        return ask
    return None if granted_bytes is None else replace(ask, footprint_bytes=granted_bytes)


def devices_ppm(ask: Ask, device_bytes: int) -> int:
    """The part of devices of this size that an ask takes, in millionths of one device."""
    want = ask.want
    if isinstance(want, Whole):
        return max(want.count, ask.devices) * PPM
    if isinstance(want, Fraction):
        return want.ppm * ask.devices
    memory_bytes = want.memory_bytes if isinstance(want, Memory) else ask.footprint_bytes or 0
    return min(memory_bytes * PPM // max(device_bytes, 1), PPM) * ask.devices
