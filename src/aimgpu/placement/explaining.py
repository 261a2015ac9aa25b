"""Why here: for one Ask, what every Device would have given or what it lacked, and the decision with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain import Ask, Decision, Placement
from aimgpu.placement.deciding import engine_for
from aimgpu.placement.engine import Engine
from aimgpu.placement.mix import Mix
from aimgpu.placement.need import Need
from aimgpu.placement.offers import Offer, Shortfall
from aimgpu.placement.prices import UNIT
from aimgpu.placement.refusal import answers_of
from aimgpu.placement.snapshot import Snapshot
from aimgpu.units import format_bytes


class Verdict(StrEnum):
    CHOSEN = "chosen"
    WOULD_DO = "would do"
    CANNOT = "cannot"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """`loss` is what the Ask would take from the mix there, in thousandths of the largest Device; less is better."""

    node: str
    device_id: str
    verdict: Verdict
    text: str
    loss: int | None = None
    short_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    decision: Decision
    devices: tuple[DeviceVerdict, ...]
    mix_shapes: int


def explain(snapshot: Snapshot, ask: Ask, *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None) -> Explanation:
    """The decision that `decide` makes, with every Device beside it."""
    engine = engine_for(snapshot, ask, mix=mix, reserved=reserved)
    decision = engine.decide(ask)
    need = engine.need_of(ask)
    taken = {(slot.node, slot.device_id) for slot in decision.slots} if isinstance(decision, Placement) else set()
    losses = _losses(engine, need)
    verdicts = tuple(
        _verdict(node.name, device_id, answer, chosen=(node.name, device_id) in taken, loss=losses.get((node.name, device_id)))
        for node, device_id, answer in answers_of(snapshot, need, reserved or {})
    )
    return Explanation(decision=decision, devices=verdicts, mix_shapes=len(engine.mix.counts))


def _verdict(node: str, device_id: str, answer: Offer | Shortfall, *, chosen: bool, loss: int | None) -> DeviceVerdict:
    if isinstance(answer, Shortfall):
        return DeviceVerdict(
            node=node, device_id=device_id, verdict=Verdict.CANNOT, text=answer.text, short_bytes=answer.short_bytes
        )
    left = format_bytes(max(answer.left_bytes, 0))
    alone = ", alone on it" if answer.slot.exclusive else ""
    text = f"{answer.slot.partition_id}{alone}: {left} would stay free there"
    return DeviceVerdict(
        node=node, device_id=device_id, verdict=Verdict.CHOSEN if chosen else Verdict.WOULD_DO, text=text, loss=loss
    )


def _losses(engine: Engine, need: Need) -> dict[tuple[str, str], int]:
    """By node and Device, the loss on its best Partition."""
    kind = engine.chooser.kind_of(need.ask)
    fleet = engine.fleet
    found = {}
    for number, node in enumerate(fleet.nodes):
        for place, gain in enumerate(engine.chooser.device_gains(kind, number)):
            if gain is not None and place < len(fleet.states[number]):
                found[node.name, fleet.states[number][place].device.id] = -gain * 1000 // UNIT
    return found
