"""A Refusal: every Device's reason, what is short by how much, and the smallest change that would make it fit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from aimgpu.domain import DeviceReason, Refusal
from aimgpu.placement.need import Need
from aimgpu.placement.offers import Offer, Shortfall, offer_of
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.remedies import would_fit
from aimgpu.placement.snapshot import NodeState, Snapshot

_Answer = tuple[NodeState, str, Offer | Shortfall]


class LateRefusal(Refusal):
    """A Refusal that works out its reasons when they are first looked at: in a large fleet that takes longer than refusing.

    Its slots are empty until then, so Python asks `__getattr__` for them, once.
    """

    __slots__ = ("_work",)
    _work: Callable[[], Refusal]

    def __init__(self, ask: str, work: Callable[[], Refusal]) -> None:
        object.__setattr__(self, "ask", ask)
        object.__setattr__(self, "_work", work)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whichever field it is
        if name not in {"summary", "reasons", "would_fit"}:
            raise AttributeError(name)
        done = self._work()
        for field in fields(Refusal):
            object.__setattr__(self, field.name, getattr(done, field.name))
        return getattr(done, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Refusal, **{field.name: getattr(self, field.name) for field in fields(Refusal)}), ()


def _values(refusal: Refusal) -> tuple[object, ...]:
    return refusal.ask, refusal.summary, refusal.reasons, refusal.would_fit


def refuse(
    snapshot: Snapshot, need: Need, reserved: Mapping[str, int] | None = None, planned: Collection[str] = frozenset()
) -> Refusal:
    """The Refusal of a Need that fits nowhere in this Snapshot, in which the `planned` instances do not run yet."""
    held = reserved or {}
    answers = answers_of(snapshot, need, held)
    reasons = tuple(_reason(need, *answer) for answer in answers)
    if not reasons:
        summary = f"{need.ask.name} fits nowhere: there is no Device"
    elif need.count > 1:
        summary = f"{need.ask.name} fits nowhere: no node has {need.count} Devices that would do"
    else:
        devices = "the one Device" if len(reasons) == 1 else f"any of {len(reasons)} Devices"
        summary = f"{need.ask.name} does not fit on {devices}: {_nearest(answers)}"
    advice = would_fit(snapshot, need, [answer for _, _, answer in answers], held, planned)
    return Refusal(ask=need.ask.name, summary=summary, reasons=reasons, would_fit=advice)


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
