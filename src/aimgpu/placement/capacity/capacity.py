"""How many devices of a kind a set of asks needs, under which layouts, and how close that is to the best possible."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from aimgpu.domain import Ask, Device, Layout, Level, Refusal
from aimgpu.placement.need import resolve_need
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.preemption.move_plan import MovePlan, apply_plan
from aimgpu.placement.preemption.planner import plan_all
from aimgpu.placement.scoring.mix import shape_of
from aimgpu.placement.scoring.packing import Fill
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot
from aimgpu.units import PPM

_EPSILON = 1e-6
_MOST_MORE = 256  # devices beyond the bound
_FEW = 40  # asks for which room is also made one by one
FREELY = Limits(may_stop=False, may_reload_driver=True, most_moves=1 << 30)
QUICKLY = replace(FREELY, most_tried=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """`bound` is proven: no plan whatever needs fewer devices."""

    devices: int
    bound: int
    layouts: tuple[str, ...]  # one per device
    plan: MovePlan
    after: Snapshot  # the devices with everything placed

    @property
    def proven_best(self) -> bool:
        return self.devices == self.bound


def plan_capacity(template: DeviceState, asks: Sequence[Ask]) -> Capacity | Refusal:
    """The fewest devices like `template` on which all asks fit; a refusal where one fits on none, however many there are."""
    bound = _bound(template, asks)
    if isinstance(bound, Refusal):
        return bound
    counts = range(bound, bound + _MOST_MORE)
    found = _search(template, asks, counts[-1:], QUICKLY)  # where the most do not do, none of the fewer can
    found = _search(template, asks, counts, FREELY if isinstance(found, Refusal) else QUICKLY)
    if isinstance(found, Capacity) and found.devices > bound and len(asks) <= _FEW:
        better = _search(template, asks, range(bound, found.devices), FREELY)
        found = better if isinstance(better, Capacity) else found
    return found if isinstance(found, Refusal) else replace(found, bound=bound)


def _search(template: DeviceState, asks: Sequence[Ask], counts: Sequence[int], limits: Limits) -> Capacity | Refusal:
    """The first count on which all asks fit."""
    refused: tuple[Refusal, ...] = ()
    for count in counts:
        snapshot = _machine(template, count)
        batch = plan_all(snapshot, asks, limits)
        if not batch.refusals:
            after = apply_plan(snapshot, batch.plan)
            layouts = tuple(state.device.layout.name for _, state in after.devices())
            return Capacity(devices=count, bound=counts[0], layouts=layouts, plan=batch.plan, after=after)
        refused = batch.refusals
    return refused[0]


def device_named(device: Device, device_id: str, index: int) -> Device:
    """The same device under another id, in no hive."""
    return replace(
        device,
        id=device_id,
        index=index,
        hive=None,
        layout=_layout_named(device.layout, device_id),
        layouts=tuple(_layout_named(layout, device_id) for layout in device.layouts),
    )


def _bound(template: DeviceState, asks: Sequence[Ask]) -> int | Refusal:
    shapes = Counter(shape_of(ask) for ask in asks)
    needs = [resolve_need(ask) for ask in shapes]
    fill = Fill(template, needs)
    for number, need in enumerate(needs):
        if not fill.fits_somewhere(number):
            return _hopeless(template, next(ask for ask in asks if shape_of(ask) == need.ask))
    demand = [need.count * count for need, count in zip(needs, shapes.values(), strict=True)]
    together = max((need.count for need in needs), default=0)
    compute = sum((need.ask.compute_ppm or 0) * count for need, count in zip(needs, demand, strict=True))
    return max(ceil(fill.bound(demand)[0] - _EPSILON), together, -(-compute // PPM))


def _hopeless(template: DeviceState, ask: Ask) -> Refusal:
    refusals = plan_all(_machine(template, max(resolve_need(ask).count, 1)), [ask], FREELY).refusals
    nowhere = Refusal(ask=ask.name, summary=f"{ask.name} fits on no {template.device.product}", reasons=())
    return refusals[0] if refusals else nowhere


def _machine(template: DeviceState, count: int) -> Snapshot:
    """So many empty devices on one node."""
    return Snapshot(nodes=(NodeState(name="node", devices=tuple(_copy(template, number) for number in range(count))),))


def _copy(template: DeviceState, number: int) -> DeviceState:
    device_id = f"gpu{number:03d}"
    return DeviceState(
        device=device_named(template.device, device_id, number),
        shared_levels=_renamed(template.shared_levels, device_id),
        exclusive_levels=_renamed(template.exclusive_levels, device_id),
    )


def _renamed(levels: Mapping[str, frozenset[Level]], device_id: str) -> dict[str, frozenset[Level]]:
    return {f"{device_id}/{name.rsplit('/', 1)[-1]}": each for name, each in levels.items()}


def _layout_named(layout: Layout, device_id: str) -> Layout:
    partitions = tuple(
        replace(partition, id=f"{device_id}/{partition.id.rsplit('/', 1)[-1]}", device_id=device_id)
        for partition in layout.partitions
    )
    return replace(layout, partitions=partitions)
