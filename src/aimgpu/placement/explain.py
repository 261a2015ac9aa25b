"""Why here: for one ask, what every device would have given or what it lacked, and the decision with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from aimgpu.domain import Ask, Decision, Placement, Slot
from aimgpu.placement.advice.refusal import answers_of
from aimgpu.placement.decide import session_for
from aimgpu.placement.fit import Fit, Misfit, free_bytes
from aimgpu.placement.need import Need
from aimgpu.placement.preemption.move_plan import MoveKind, apply_plan
from aimgpu.placement.preemption.planner import BatchPlan
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.prices import UNIT
from aimgpu.placement.session import PlacementSession
from aimgpu.placement.snapshot import NodeState, Snapshot
from aimgpu.units import format_bytes


class Verdict(StrEnum):
    """What became of a GPU."""

    CHOSEN = "chosen"
    WOULD_DO = "would do"
    CANNOT = "cannot"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """`loss` is what the ask would take from the mix there, in thousandths of the largest device; less is better."""

    node: str
    device_id: str
    verdict: Verdict
    text: str
    loss: int | None = None
    short_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A decision with every GPU looked at."""

    decision: Decision
    devices: tuple[DeviceVerdict, ...]
    mix_shapes: int
    first: tuple[str, ...] = ()  # what is laid out, moved or stopped before


def explain(snapshot: Snapshot, ask: Ask, *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None) -> Explanation:
    """The decision that `decide` makes, with every device beside it."""
    session = session_for(snapshot, ask, mix=mix, reserved=reserved)
    return _explained(session, session.need_of(ask), session.decide(ask), reserved or {})


def explain_planned(snapshot: Snapshot, batch: BatchPlan, ask: Ask) -> Explanation:
    """What a plan for several asks says of one of them, with every device as it is beside all the others."""
    after = apply_plan(snapshot, batch.plan)
    refusal = next((each for each in batch.refusals if each.ask == ask.name), None)
    if refusal is not None:
        cannot = tuple(
            DeviceVerdict(
                node=each.node, device_id=each.device_id, verdict=Verdict.CANNOT, text=each.text, short_bytes=each.short_bytes
            )
            for each in refusal.reasons
        )
        return Explanation(decision=refusal, devices=cannot, mix_shapes=len(Mix.given(after).with_asks([ask]).counts))
    placement = next(each for each in batch.plan.placements if each.ask == ask.name)
    session = PlacementSession(after.without_instance(ask.name), mix=Mix.given(after))
    first = tuple(step.text for step in batch.plan.steps if step.kind is not MoveKind.PLACE)
    return replace(_explained(session, session.need_of(ask), placement, {}), first=first)


def _explained(session: PlacementSession, need: Need, decision: Decision, reserved: Mapping[str, int]) -> Explanation:
    slots = {(slot.node, slot.device_id): slot for slot in decision.slots} if isinstance(decision, Placement) else {}
    losses = _losses(session, need)
    verdicts = []
    for node, device_id, best in answers_of(session.snapshot, need, reserved):
        at = (node.name, device_id)
        verdicts.append(_verdict(at, _as_chosen(best, slots.get(at), node), chosen=at in slots, loss=losses.get(at)))
    return Explanation(decision=decision, devices=tuple(verdicts), mix_shapes=len(session.mix.counts))


def _as_chosen(best: Fit | Misfit, slot: Slot | None, node: NodeState) -> Fit | Misfit:
    """On the device that was chosen, the partition that was; the best by size alone may be another."""
    if slot is None or (isinstance(best, Fit) and best.slot.partition_id == slot.partition_id):
        return best
    state = next(state for state in node.devices if state.device.id == slot.device_id)
    partition = state.device.partition(slot.partition_id)
    left = free_bytes(state, partition) - slot.memory_bytes if partition is not None else 0
    return Fit(slot=slot, left_bytes=left)


def _verdict(at: tuple[str, str], answer: Fit | Misfit, *, chosen: bool, loss: int | None) -> DeviceVerdict:
    node, device_id = at
    if isinstance(answer, Misfit):
        return DeviceVerdict(
            node=node, device_id=device_id, verdict=Verdict.CANNOT, text=answer.text, short_bytes=answer.short_bytes
        )
    left = format_bytes(max(answer.left_bytes, 0))
    alone = ", alone on it" if answer.slot.exclusive else ""
    text = f"{answer.slot.partition_id}{alone}: {left} would stay free there"
    return DeviceVerdict(
        node=node, device_id=device_id, verdict=Verdict.CHOSEN if chosen else Verdict.WOULD_DO, text=text, loss=loss
    )


def _losses(session: PlacementSession, need: Need) -> dict[tuple[str, str], int]:
    """By node and device, the loss on its best partition."""
    compiled = session.chooser.compiled_for(need.ask, session.need_of, need.avoided)
    fleet = session.fleet
    found = {}
    for number, node in enumerate(fleet.nodes):
        for place, gain in enumerate(session.chooser.device_gains(compiled, number)):
            if gain is not None and place < len(fleet.states[number]):
                found[node.name, fleet.states[number][place].device.id] = -gain * 1000 // UNIT
    return found
