"""Weaker wishes that would be met at once: one wish of the ask is let go or lowered, the others stand."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from aimgpu.domain import Ask, Auto, Device, Fraction, IsolationRequirement, Level, Memory, Partition, PartitionKind, Whole
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.scoring.chooser import Chooser
from aimgpu.placement.scoring.fleet import Fleet
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.placement.scoring.weights import COMING_AND_GOING
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import PPM, format_bytes, format_ppm, parse_bytes

_WEAKER = {
    IsolationRequirement.HARDWARE: (IsolationRequirement.ENFORCED, IsolationRequirement.ADVISORY, IsolationRequirement.NONE),
    IsolationRequirement.ENFORCED: (IsolationRequirement.ADVISORY, IsolationRequirement.NONE),
    IsolationRequirement.ADVISORY: (IsolationRequirement.NONE,),
    IsolationRequirement.NONE: (),
}
_MOST_TRIED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """The place where a weaker ask would fit: the first of its devices."""

    node: str
    device: Device
    partition: Partition
    deployments: frozenset[str]  # on that device
    level: Level


def weaker_wishes(
    snapshot: Snapshot, need: Need, reserved: Mapping[str, int], codes: Collection[ReasonCode]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One sentence for each wish that alone stands in the way; first those that put right what could be met nowhere.

    `codes` are the reasons that devices gave.
    """
    finder = _Finder(snapshot, need, reserved)
    ways = [finder.isolation(), finder.kind(), finder.compute(), finder.partition()]
    for stopping, way in (
        ((ReasonCode.PRODUCT, ReasonCode.VENDOR), finder.identity()),
        ((ReasonCode.WITH, ReasonCode.NOT_WITH), finder.affinity()),
        ((ReasonCode.CPU, ReasonCode.HOST_MEMORY), finder.host()),
    ):
        if any(code in codes for code in stopping):
            ways.append(way)
    return (*finder.size(), *finder.divided()), tuple(text for texts in ways for text in texts)


def divided(ask: Ask) -> Iterator[tuple[Ask, str]]:
    """The ask over more devices, the fewest first, and how that is written."""
    for count, each in ask.divided:
        if count <= ask.device_count:
            continue
        if isinstance(ask.want, Whole):
            yield replace(ask, want=Whole(count=count), devices=1, footprint_bytes=each), f"gpu: {{whole: {count}}}"
        elif isinstance(ask.want, PartitionKind):
            how = f"gpu: {{partition: {ask.want.kind}, devices: {count}}}"
            yield replace(ask, devices=count, footprint_bytes=each), how
        else:
            yield replace(ask, want=Auto(), devices=count, footprint_bytes=each), f"gpu: {{devices: {count}}}"


class _Finder:
    """Tries asks; the arrays that this takes are made when the first is tried."""

    def __init__(self, snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> None:
        self._snapshot, self._ask, self._reserved = snapshot, need.ask, reserved
        self._avoided_by = need.avoided - need.ask.not_with_deployments

    @cached_property
    def _chooser(self) -> Chooser:
        fleet = Fleet(self._snapshot)
        return Chooser(fleet, Valuation(fleet, Mix(), COMING_AND_GOING), reserved=self._reserved)

    @property
    def _fleet(self) -> Fleet:
        return self._chooser.fleet

    def isolation(self) -> Iterator[str]:
        for demand in _WEAKER[self._ask.isolation]:
            spot = self._spot(replace(self._ask, isolation=demand))
            if spot is not None:
                best = "fits" if spot.level is Level.NONE else f"can enforce {spot.level.value} isolation at best"
                yield f"Accept isolation: {demand.value}; {spot.device.id} {best}."
                return

    def size(self) -> Iterator[str]:
        """More where too little for the model was asked for."""
        ask, footprint = self._ask, self._ask.footprint_bytes
        if isinstance(ask.want, Memory | Fraction) and footprint:
            rounded = format_bytes(footprint, up=True)
            for memory_bytes, size in ((parse_bytes(rounded), rounded), (footprint, f"{footprint}B")):
                spot = self._spot(replace(ask, want=Memory(memory_bytes=memory_bytes)))
                if spot is not None and _bytes_on(ask.want, spot.device) < footprint:
                    yield f"Request at least {size}, which the model needs: {spot.device.id} has that."
                    return

    def divided(self) -> Iterator[str]:
        """Over the fewest devices that together hold what is too large for one."""
        for tried, how in divided(self._ask):
            spot = self._spot(tried)
            if spot is not None:
                each = format_bytes(tried.footprint_bytes or 0, up=True)
                yield f"Split it over {tried.device_count} GPUs ({how}): {spot.node} has the {each} that each then needs."
                return

    def kind(self) -> Iterator[str]:
        """Another kind where that one is too small or not available."""
        ask = self._ask
        if isinstance(ask.want, PartitionKind):
            kinds = sorted(
                {
                    (partition_class.cell_bytes, partition_class.kind)
                    for partition_class in self._fleet.classes
                    if partition_class is not None
                }
            )
            for _, kind in kinds:
                spot = self._spot(replace(ask, want=PartitionKind(kind=kind)))
                if spot is not None:
                    yield f"Request a {kind} partition: {spot.partition.id} is free."
                    return

    def compute(self) -> Iterator[str]:
        wanted = self._ask.compute_ppm
        if wanted is None:
            return
        for ppm in sorted(self._free_compute(wanted), reverse=True)[:_MOST_TRIED]:
            spot = self._spot(replace(self._ask, compute_ppm=ppm))
            if spot is not None:
                yield f"Request at most {format_ppm(ppm)} of the GPU's compute: {spot.device.id} has that much free."
                return

    def _free_compute(self, below: int) -> set[int]:
        """Millionths of a whole device that are free on one of its partitions."""
        fleet, found = self._fleet, set[int]()
        for number, ppm in set(zip(fleet.class_numbers.ravel().tolist(), fleet.compute.ravel().tolist(), strict=True)):
            partition_class = fleet.classes[number]
            part = partition_class.compute_part if partition_class is not None else None
            if part is not None:
                found.add(int(ppm * part))
        return {ppm for ppm in found if 0 < ppm < below}

    def identity(self) -> Iterator[str]:
        ask = self._ask
        any_part = replace(ask, products=frozenset(), refused_products=frozenset())
        any_vendor = replace(ask, vendor=None, refused_vendor=None)
        neither = replace(any_part, vendor=None, refused_vendor=None)
        for weaker in (any_part, any_vendor, neither):
            spot = self._spot(weaker) if weaker != ask else None
            if spot is not None:
                yield f"Accept a {spot.device.product} ({spot.device.vendor.value}) as well: {spot.device.id} fits."
                return

    def affinity(self) -> Iterator[str]:
        ask = self._ask
        if ask.not_with_deployments:
            spot = self._spot(replace(ask, not_with_deployments=frozenset()))
            if spot is not None:
                names = ", ".join(sorted(ask.not_with_deployments & spot.deployments))
                yield f"Let it run beside {names}: {spot.device.id} fits."
        if ask.with_deployments:
            spot = self._spot(replace(ask, with_deployments=frozenset()))
            if spot is not None:
                names = ", ".join(sorted(ask.with_deployments - spot.deployments))
                yield f"Let it run without {names}: {spot.device.id} fits."

    def partition(self) -> Iterator[str]:
        if self._ask.partition_id is not None:
            spot = self._spot(replace(self._ask, partition_id=None))
            if spot is not None:
                yield f"Do not name a partition: {spot.partition.id} fits."

    def host(self) -> Iterator[str]:
        ask = self._ask
        for cpu in _below(self._fleet.cpu.tolist(), ask.cpu_millis):
            spot = self._spot(replace(ask, cpu_millis=cpu))
            if spot is not None:
                yield f"Request at most {cpu}m of CPU: {spot.node} has that much free."
                break
        for host in _below(self._fleet.host.tolist(), ask.host_memory_bytes):
            spot = self._spot(replace(ask, host_memory_bytes=host))
            if spot is not None:
                yield f"Request at most {format_bytes(host)} of host memory: {spot.node} has that much free."
                break

    def _spot(self, ask: Ask) -> _Spot | None:
        chooser, fleet = self._chooser, self._fleet
        compiled = chooser.compiled_for(ask, partial(resolve_need, avoided_by=self._avoided_by), self._avoided_by)
        node = chooser.choose(compiled, ask.host_memory_bytes)
        if node is None:
            return None
        cell = chooser.charge_for(compiled, node, ask).cells[0]
        state = fleet.states[node][cell // fleet.wide]
        partition = fleet.partition_at(node, cell)
        alone = chooser.terms_at(compiled, node, cell).exclusive
        return _Spot(
            node=fleet.nodes[node].name,
            device=state.device,
            partition=partition,
            deployments=frozenset(grant.deployment for grant in state.grants),
            level=state.best_level(partition.id, exclusive=alone),
        )


def _bytes_on(want: Memory | Fraction, device: Device) -> int:
    return want.memory_bytes if isinstance(want, Memory) else device.memory_bytes * want.ppm // PPM


def _below(free: list[int], wanted: int) -> list[int]:
    return sorted({amount for amount in free if 0 <= amount < wanted}, reverse=True)[:_MOST_TRIED]
