"""What one device can offer to one need: a share of a partition, or the reason why not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Grant, Level, Partition, Slot, granted_compute
from aimgpu.domain.compute import partition_part, partition_ppm, unit_name, whole_units
from aimgpu.placement.need import Need
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.snapshot import UNKNOWN_PARTITION, DeviceState, NodeState
from aimgpu.units import PPM, format_bytes, format_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One share that would do, and what it would leave behind."""

    slot: Slot
    left_bytes: int  # on the partition, after


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Why a device or partition will not do; the nearest to fitting has the greatest `stage` and the least `short_bytes`."""

    code: ReasonCode
    text: str
    stage: int
    short_bytes: int | None = None


def fit_of(need: Need, node: NodeState, state: DeviceState) -> Fit | Misfit:
    """The best share of this device for the need, or the nearest miss."""
    barred = _host_short(need, node) or device_bar(need, state)
    if barred is not None:
        return barred
    if not state.device.layout.partitions:
        text = "has no partition that a model could run on; `aimgpu doctor` reports why"
        return Misfit(code=ReasonCode.LAYOUT, text=text, stage=0)
    found = [_fit_on(need, node, state, partition) for partition in state.device.layout.partitions if _named(need, partition)]
    fits = [fit for fit in found if isinstance(fit, Fit)]
    if fits:
        return min(fits, key=lambda fit: (fit.slot.exclusive, fit.left_bytes, fit.slot.partition_id))
    misses = [miss for miss in found if isinstance(miss, Misfit)]
    if not misses:
        return Misfit(code=ReasonCode.PARTITION, text=f"has no partition {need.ask.partition_id}", stage=0)
    return min(misses, key=lambda miss: (-miss.stage, miss.short_bytes or 0, miss.text))


def free_bytes(state: DeviceState, partition: Partition) -> int:
    """Bytes that may still be granted; negative where foreign processes took what was granted."""
    return ungranted_bytes(partition, _grants_on(state, partition), state.foreign_on(partition))


def ungranted_bytes(partition: Partition, grants: Sequence[Grant], foreign_bytes: int) -> int:
    """The same from the grants on the partition and what others hold there; the only place where it is computed.

    An exclusive grant leaves nothing, whatever its size, and every grant takes at least one byte.
    """
    if any(grant.exclusive for grant in grants):
        return 0
    return partition.memory_bytes - sum(max(grant.memory_bytes, 1) for grant in grants) - foreign_bytes


def device_free_bytes(state: DeviceState) -> int:
    """Bytes that may still be granted on all its partitions; what cannot be attributed to one of them counts once."""
    free = sum(
        max(0, ungranted_bytes(partition, _grants_on(state, partition), state.foreign_bytes.get(partition.id, 0)))
        for partition in state.device.layout.partitions
    )
    return max(0, free - state.foreign_bytes.get(UNKNOWN_PARTITION, 0))


def _grants_on(state: DeviceState, partition: Partition) -> list[Grant]:
    return [grant for grant in state.grants if grant.partition_id == partition.id]


def free_compute_ppm(state: DeviceState, partition: Partition) -> int:
    """Millionths of the partition's compute that may still be granted."""
    return PPM - sum(grant.compute_ppm or 0 for grant in state.grants if grant.partition_id == partition.id)


def stale_grants(state: DeviceState) -> tuple[str, ...]:
    """Grants on partitions that the layout no longer has."""
    present = {partition.id for partition in state.device.layout.partitions}
    return tuple(sorted(grant.id for grant in state.grants if grant.partition_id not in present))


def _host_short(need: Need, node: NodeState) -> Misfit | None:
    """The reason, if the node has too little CPU or host memory."""
    ask = need.ask
    if node.cpu_millis is not None and ask.cpu_millis > node.cpu_millis - node.used_cpu_millis:
        left = node.cpu_millis - node.used_cpu_millis
        return Misfit(code=ReasonCode.CPU, text=f"its node has {left}m of CPU free; {ask.cpu_millis}m is requested", stage=3)
    if node.host_memory_bytes is not None and ask.host_memory_bytes > node.host_memory_bytes - node.used_host_memory_bytes:
        left = node.host_memory_bytes - node.used_host_memory_bytes
        needs = format_bytes(ask.host_memory_bytes, up=True)
        text = f"its node has {format_bytes(max(left, 0))} of host memory free; {needs} is requested"
        return Misfit(code=ReasonCode.HOST_MEMORY, text=text, stage=3, short_bytes=ask.host_memory_bytes - left)
    return None


def _named(need: Need, partition: Partition) -> bool:
    return need.ask.partition_id in (None, partition.id)


def device_bar(need: Need, state: DeviceState) -> Misfit | None:
    """Why no partition of this device can do, if so."""
    device = state.device
    if not _vendor_wanted(need, device):
        return Misfit(
            code=ReasonCode.VENDOR, text=f"is an {device.vendor.value} GPU, which the request does not accept", stage=0
        )
    if not _product_wanted(need, device):
        return Misfit(code=ReasonCode.PRODUCT, text=f"is a {device.product}, which the request does not accept", stage=0)
    stale = stale_grants(state) if state.grants else ()
    if stale:
        text = f"has grants on partitions that its layout no longer has ({', '.join(stale)})"
        return Misfit(code=ReasonCode.LAYOUT, text=text, stage=1)
    return _affinity_bar(need, state)


def _affinity_bar(need: Need, state: DeviceState) -> Misfit | None:
    ask = need.ask
    if not need.avoided and not ask.with_deployments:
        return None
    deployments = {grant.deployment for grant in state.grants}
    unwanted, missing = need.avoided & deployments, ask.with_deployments - deployments
    if unwanted:
        own = unwanted & ask.not_with_deployments
        text = f"runs {', '.join(sorted(own or unwanted))}, which {'this model avoids' if own else 'avoids this model'}"
        return Misfit(code=ReasonCode.NOT_WITH, text=text, stage=2)
    if missing:
        return Misfit(code=ReasonCode.WITH, text=f"does not run {', '.join(sorted(missing))}", stage=2)
    return None


def _vendor_wanted(need: Need, device: Device) -> bool:
    wanted, refused = need.ask.vendor, need.ask.refused_vendor
    vendor = device.vendor.value
    return (wanted is None or wanted.lower() == vendor) and (refused is None or refused.lower() != vendor)


def _product_wanted(need: Need, device: Device) -> bool:
    product = device.product.casefold()
    return product not in need.refused_products and (not need.products or product in need.products)


def _fit_on(need: Need, node: NodeState, state: DeviceState, partition: Partition) -> Fit | Misfit:
    exclusive = _exclusive_here(need, state, partition)
    if exclusive is None:
        return _level_short(need, state, partition)
    wrong_kind = _kind_short(need, state, partition)
    if wrong_kind is not None:
        return wrong_kind
    wanted = partition.memory_bytes if exclusive else need.bytes_on(state.device.memory_bytes)
    short = (
        _too_small(need, state, partition, wanted, exclusive=exclusive)
        or _too_little_compute(need, state, partition)
        or _memory_short(state, partition, wanted, exclusive=exclusive)
        or _compute_short(need, state, partition)
    )
    if short is not None:
        return short
    device = state.device
    slot = Slot(
        node=node.name,
        device_id=device.id,
        partition_id=partition.id,
        memory_bytes=wanted,
        compute_ppm=None
        if need.ask.compute_ppm is None
        else partition_ppm(need.ask.compute_ppm, partition_part(device, partition)),
        exclusive=exclusive,
    )
    return Fit(slot=slot, left_bytes=free_bytes(state, partition) - wanted)


def _exclusive_here(need: Need, state: DeviceState, partition: Partition) -> bool | None:
    """Whether the grant would be exclusive; None where the demanded level is not available either way."""
    if not need.exclusive and state.best_level(partition.id, exclusive=False).rank >= need.least_level.rank:
        return False
    return True if state.best_level(partition.id, exclusive=True).rank >= need.least_level.rank else None


def _level_short(need: Need, state: DeviceState, partition: Partition) -> Misfit:
    best = max(
        state.best_level(partition.id, exclusive=True), state.best_level(partition.id, exclusive=False), key=lambda lv: lv.rank
    )
    least = need.least_level.value + ("" if need.least_level is Level.HARDWARE else " or better")
    can = "can enforce no isolation" if best is Level.NONE else f"can enforce {best.value} isolation at best"
    return Misfit(code=ReasonCode.ISOLATION, text=f"{can}; {least} is required", stage=3)


def _kind_short(need: Need, state: DeviceState, partition: Partition) -> Misfit | None:
    partitions = len(state.device.layout.partitions)
    if need.kind is not None and partition.kind.lower() != need.kind:
        return (
            _too_small_kind(need, state.device)
            or _too_little_compute_of_kind(need, state.device)
            or Misfit(
                code=ReasonCode.LAYOUT,
                text=f"is laid out as {state.device.layout.name}, which has no {need.kind} partition",
                stage=4,
            )
        )
    if need.whole and partitions > 1:
        text = f"is laid out as {state.device.layout.name} ({partitions} partitions); a whole GPU is required"
        return Misfit(code=ReasonCode.LAYOUT, text=text, stage=4)
    return None


def _too_small_kind(need: Need, device: Device) -> Misfit | None:
    """The misfit if no layout of the device has a partition of the wanted kind that is large enough."""
    sizes = [part.memory_bytes for layout in device.layouts for part in layout.partitions if part.kind.lower() == need.kind]
    footprint = need.ask.footprint_bytes or 0
    if not sizes or footprint <= max(sizes):
        return None
    text = f"needs {format_bytes(footprint, up=True)}; a {need.kind} partition has {format_bytes(max(sizes))}"
    return Misfit(code=ReasonCode.MEMORY, text=text, stage=5, short_bytes=footprint - max(sizes))


def _too_little_compute_of_kind(need: Need, device: Device) -> Misfit | None:
    """As `_too_small_kind`, of the compute."""
    wanted = need.ask.compute_ppm
    if wanted is None:
        return None
    found = [
        (replace(device, layout=layout), part)
        for layout in device.layouts
        for part in layout.partitions
        if part.kind.lower() == need.kind
    ]
    parts = [partition_part(laid_out, part) for laid_out, part in found]
    if not found or any(part is None or partition_ppm(wanted, part) is not None for part in parts):
        return None
    laid_out, partition = max(found, key=lambda each: each[1].compute_units or 0)
    held = _compute_text(PPM, laid_out, partition)
    text = f"needs {_wanted_compute(wanted, device)}; a {need.kind} partition has {held}"
    return Misfit(code=ReasonCode.COMPUTE, text=text, stage=5)


def _place_name(state: DeviceState, partition: Partition) -> str:
    return "the GPU" if len(state.device.layout.partitions) == 1 else f"a {partition.kind} partition"


def _too_small(need: Need, state: DeviceState, partition: Partition, wanted: int, *, exclusive: bool) -> Misfit | None:
    """Memory that the partition would not have even if it were free."""
    footprint = need.ask.footprint_bytes or 0
    if exclusive and not need.whole:
        footprint = max(footprint, need.bytes_on(state.device.memory_bytes))
    if footprint > wanted:
        has = f"{_place_name(state, partition)} has {format_bytes(wanted)}"
        text = f"needs {format_bytes(footprint, up=True)}; {has if exclusive else f'{format_bytes(wanted)} is requested'}"
        return Misfit(code=ReasonCode.MEMORY, text=text, stage=5, short_bytes=footprint - wanted)
    if not exclusive and need.bytes_on(state.device.memory_bytes) > partition.memory_bytes:
        has = f"{_place_name(state, partition)} has {format_bytes(partition.memory_bytes)}"
        text = f"needs {format_bytes(wanted, up=True)}; {has}"
        return Misfit(code=ReasonCode.MEMORY, text=text, stage=5, short_bytes=wanted - partition.memory_bytes)
    return None


def _memory_short(state: DeviceState, partition: Partition, wanted: int, *, exclusive: bool) -> Misfit | None:
    """Memory that the partition would have if others left."""
    foreign, free = state.foreign_on(partition), free_bytes(state, partition)
    mine = [grant for grant in state.grants if grant.partition_id == partition.id]
    if exclusive and mine:
        names = ", ".join(sorted({grant.deployment for grant in mine}))
        return Misfit(
            code=ReasonCode.BUSY,
            text=f"is in use by {names}; the whole partition is required",
            stage=6,
            short_bytes=wanted - free,
        )
    if wanted > free:
        held = f" ({format_bytes(foreign)} used by other {state.foreign_kind})" if foreign else ""
        size = format_bytes(partition.memory_bytes)
        text = f"has {format_bytes(max(free, 0))} free of {size}{held}; needs {format_bytes(wanted, up=True)}"
        alone = ungranted_bytes(partition, mine, 0)  # an exclusive grant leaves nothing, whatever others hold
        code = ReasonCode.FOREIGN if foreign and wanted <= alone else ReasonCode.MEMORY
        return Misfit(code=code, text=text, stage=6, short_bytes=wanted - free)
    return None


def _too_little_compute(need: Need, state: DeviceState, partition: Partition) -> Misfit | None:
    """Compute that the partition would not have even if it were free."""
    wanted, part = need.ask.compute_ppm, partition_part(state.device, partition)
    if wanted is None or partition_ppm(wanted, part) is not None:
        return None
    held = "an unknown part" if part is None else _compute_text(PPM, state.device, partition)
    text = f"needs {_wanted_compute(wanted, state.device)}; {_place_name(state, partition)} has {held}"
    return Misfit(code=ReasonCode.COMPUTE, text=text, stage=5)


def _compute_short(need: Need, state: DeviceState, partition: Partition) -> Misfit | None:
    wanted = need.ask.compute_ppm
    here = None if wanted is None else partition_ppm(wanted, partition_part(state.device, partition))
    if wanted is None or here is None:
        return None
    free = max(free_compute_ppm(state, partition), 0)
    if here <= free:
        return None
    text = f"has {_compute_text(free, state.device, partition)} free; needs {_wanted_compute(wanted, state.device)}"
    return Misfit(code=ReasonCode.COMPUTE, text=text, stage=6)


def _compute_text(ppm: int, device: Device, partition: Partition) -> str:
    found = granted_compute(ppm, device, partition) if ppm else None
    return found.text if found else "no compute"


def _wanted_compute(ppm: int, device: Device) -> str:
    percent = f"{format_ppm(ppm)} of the GPU's compute"
    return percent if not device.compute_units else f"{percent} ({whole_units(ppm, device.compute_units)} {unit_name(device)})"
