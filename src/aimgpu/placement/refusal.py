"""A Refusal: every Device's reason, what is short by how much, and the smallest change that would make it fit."""

from collections.abc import Mapping, Sequence

from aimgpu.domain import DeviceReason, Refusal
from aimgpu.placement.need import Need
from aimgpu.placement.offers import Offer, Shortfall, offer_of
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.remedies import would_fit
from aimgpu.placement.snapshot import NodeState, Snapshot

_Answer = tuple[NodeState, str, Offer | Shortfall]


def refuse(snapshot: Snapshot, need: Need, reserved: Mapping[str, int] | None = None) -> Refusal:
    """The Refusal of a Need that fits nowhere in this Snapshot."""
    answers = answers_of(snapshot, need, reserved or {})
    reasons = tuple(_reason(need, *answer) for answer in answers)
    if not reasons:
        summary = f"{need.ask.name} fits nowhere: there is no Device"
    elif need.count > 1:
        summary = f"{need.ask.name} fits nowhere: no node has {need.count} Devices that would do"
    else:
        summary = f"{need.ask.name} fits on none of {len(reasons)} Devices: {_nearest(answers)}"
    return Refusal(ask=need.ask.name, summary=summary, reasons=reasons, would_fit=would_fit(snapshot, need))


def answers_of(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> list[_Answer]:
    """For every Device the best it can offer, or why it cannot."""
    return [
        (node, state.device.id, _held(need, node, reserved) or offer_of(need, node, state))
        for node, state in snapshot.devices()
    ]


def _held(need: Need, node: NodeState, reserved: Mapping[str, int]) -> Shortfall | None:
    least = reserved.get(node.name, 0)
    if least <= need.count:
        return None
    return Shortfall(code=ReasonCode.RESERVED, text=f"its node is held for Asks of {least} Devices or more", stage=1)


def _reason(need: Need, node: NodeState, device_id: str, answer: Offer | Shortfall) -> DeviceReason:
    if isinstance(answer, Offer):
        text = f"would do, but {need.count} Devices of one node are wanted and {node.name} has fewer that would"
        return DeviceReason(node=node.name, device_id=device_id, code=ReasonCode.COUNT, text=text)
    return DeviceReason(node=node.name, device_id=device_id, code=answer.code, text=answer.text, short_bytes=answer.short_bytes)


def _nearest(answers: Sequence[_Answer]) -> str:
    misses = [(device_id, miss) for _, device_id, miss in answers if isinstance(miss, Shortfall)]
    if not misses:
        return "none is left"
    device_id, miss = min(misses, key=lambda found: (-found[1].stage, found[1].short_bytes or 0, found[0]))
    return f"nearest is {device_id}, {miss.text}"
