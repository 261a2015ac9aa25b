"""Choosing: Snapshot and Ask in, Placement or Refusal out."""

from collections.abc import Sequence

from aimgpu.domain import Ask, Decision, DeviceReason, Placement, Refusal, Spread
from aimgpu.errors import UnknownPartition
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.offers import Offer, Shortfall, offer_of
from aimgpu.placement.remedies import would_fit
from aimgpu.placement.snapshot import NodeState, Snapshot
from aimgpu.units import format_bytes


def decide(snapshot: Snapshot, ask: Ask) -> Decision:
    """Where this Ask goes. Raises InvalidInput or UnknownPartition where the Ask itself is wrong."""
    need = resolve_need(ask)
    if ask.partition_id is not None and not snapshot.has_partition(ask.partition_id):
        raise UnknownPartition(
            f"there is no Partition {ask.partition_id}", hint="`aimgpu gpus` lists the Partitions there are."
        )
    answers: list[tuple[NodeState, str, Offer | Shortfall]] = [
        (node, state.device.id, _host_short(need, node) or offer_of(need, node, state)) for node, state in snapshot.devices()
    ]
    chosen = _choose(need, answers)
    if chosen:
        return Placement(ask=ask.name, slots=tuple(offer.slot for offer in chosen), because=_because(need, chosen))
    return _refusal(snapshot, need, answers)


def decide_all(snapshot: Snapshot, asks: Sequence[Ask]) -> tuple[Decision, ...]:
    """One decision an Ask, in their order, each seeing what the earlier ones took."""
    decisions = []
    for ask in asks:
        decision = decide(snapshot, ask)
        decisions.append(decision)
        if isinstance(decision, Placement):
            snapshot = snapshot.with_placement(ask, decision)
    return tuple(decisions)


def _host_short(need: Need, node: NodeState) -> Shortfall | None:
    """Why the node's CPU or host memory rules its Devices out, if so."""
    ask = need.ask
    if node.cpu_millis is not None and ask.cpu_millis > node.cpu_millis - node.used_cpu_millis:
        left = node.cpu_millis - node.used_cpu_millis
        return Shortfall(code="cpu", text=f"its node has {left} CPU millis free; {ask.cpu_millis} are wanted", stage=3)
    if node.host_memory_bytes is not None and ask.host_memory_bytes > node.host_memory_bytes - node.used_host_memory_bytes:
        left = node.host_memory_bytes - node.used_host_memory_bytes
        text = f"its node has {format_bytes(max(left, 0))} of host memory free; {format_bytes(ask.host_memory_bytes)} is wanted"
        return Shortfall(code="host_memory", text=text, stage=3, short_bytes=ask.host_memory_bytes - left)
    return None


def _choose(need: Need, answers: list[tuple[NodeState, str, Offer | Shortfall]]) -> list[Offer]:
    """The best `count` Devices of one node; empty where no node has so many."""
    by_node: dict[str, list[Offer]] = {}
    for node, _, answer in answers:
        if isinstance(answer, Offer):
            by_node.setdefault(node.name, []).append(answer)
    groups = [
        sorted(offers, key=lambda offer: _rank(need, offer))[: need.count]
        for _, offers in sorted(by_node.items())
        if len(offers) >= need.count
    ]
    return min(groups, key=lambda group: [_rank(need, offer) for offer in group], default=[])


def _rank(need: Need, offer: Offer) -> tuple[bool, int, int, str, str, str]:
    """Least first: shared before exclusive, then the tightest fit, or with `spread` the emptiest Device."""
    slot = offer.slot
    if need.ask.spread is Spread.SPREAD:
        order = (offer.grants_on_device, -offer.device_free_bytes)
    else:
        order = (offer.left_bytes, offer.device_free_bytes)
    return (slot.exclusive, *order, slot.node, slot.device_id, slot.partition_id)


def _because(need: Need, chosen: list[Offer]) -> str:
    if need.ask.partition_id is not None:
        return f"{need.ask.partition_id} was asked for by name"
    how = "emptiest Device" if need.ask.spread is Spread.SPREAD else "tightest fit"
    left = format_bytes(max(offer.left_bytes for offer in chosen))
    alone = "; the Partition is its own" if chosen[0].slot.exclusive else ""
    where = f"{need.count} Devices of {chosen[0].slot.node}, " if need.count > 1 else ""
    return f"{where}{how}: {left} of the Partition stays free{alone}"


def _refusal(snapshot: Snapshot, need: Need, answers: list[tuple[NodeState, str, Offer | Shortfall]]) -> Refusal:
    reasons = tuple(_reason(need, node, device_id, answer) for node, device_id, answer in answers)
    if not reasons:
        summary = f"{need.ask.name} fits nowhere: there is no Device"
    elif need.count > 1:
        summary = f"{need.ask.name} fits nowhere: no node has {need.count} Devices that would do"
    else:
        summary = f"{need.ask.name} fits on none of {len(reasons)} Devices: {_nearest(answers)}"
    return Refusal(ask=need.ask.name, summary=summary, reasons=reasons, would_fit=would_fit(snapshot, need))


def _reason(need: Need, node: NodeState, device_id: str, answer: Offer | Shortfall) -> DeviceReason:
    if isinstance(answer, Offer):
        text = f"would do, but {need.count} Devices of one node are wanted and {node.name} has fewer that would"
        return DeviceReason(node=node.name, device_id=device_id, code="count", text=text)
    return DeviceReason(node=node.name, device_id=device_id, code=answer.code, text=answer.text, short_bytes=answer.short_bytes)


def _nearest(answers: list[tuple[NodeState, str, Offer | Shortfall]]) -> str:
    misses = [(device_id, miss) for _, device_id, miss in answers if isinstance(miss, Shortfall)]
    device_id, miss = min(misses, key=lambda found: (-found[1].stage, found[1].short_bytes or 0, found[0]))
    return f"nearest is {device_id}, {miss.text}"
