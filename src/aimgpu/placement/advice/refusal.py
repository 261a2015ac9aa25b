"""A refusal: every device's reason, what is short by how much, and the smallest change that would make it fit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

from aimgpu.domain import Ask, DeviceReason, Refusal
from aimgpu.placement.advice.suggestions import would_fit
from aimgpu.placement.fit import Fit, Misfit, fit_of
from aimgpu.placement.need import Need, resolve_need
from aimgpu.placement.reasons import ReasonCode
from aimgpu.placement.snapshot import NodeState, Snapshot

_Answer = tuple[NodeState, str, Fit | Misfit]
World = tuple[Snapshot, Collection[str]]  # with the instances in it that are only planned


class Case:
    """A need that fits nowhere in a world. What is asked of it is worked out once, and only that: advice takes longest.

    Asks that differ in their names alone share one.
    """

    def __init__(self, world: Callable[[], World], ask: Ask, reserved: Mapping[str, int], avoided_by: frozenset[str]) -> None:
        self._look, self._ask, self._reserved, self._avoided_by = world, ask, reserved, avoided_by

    @cached_property
    def verdict(self) -> str:
        need = self._need
        if not self._answers:
            return "does not fit: there is no GPU"
        if need.count > 1:
            return f"does not fit: no node has {need.count} GPUs that are large enough and free"
        nearest = _nearest(self._answers)
        if len(self._answers) == 1:
            return f"does not fit on {nearest}"
        return f"fits on none of {len(self._answers)} GPUs; the closest is {nearest}"

    @cached_property
    def reasons(self) -> tuple[DeviceReason, ...]:
        return tuple(_reason(self._need, *answer) for answer in self._answers)

    @cached_property
    def would_fit(self) -> tuple[str, ...]:
        snapshot, planned = self._world
        return would_fit(snapshot, self._need, [answer for _, _, answer in self._answers], self._reserved, planned)

    @cached_property
    def _world(self) -> World:
        return self._look()

    @cached_property
    def _need(self) -> Need:
        return resolve_need(self._ask, self._avoided_by)

    @cached_property
    def _answers(self) -> list[_Answer]:
        return answers_of(self._world[0], self._need, self._reserved)


class LateRefusal(Refusal):
    """A refusal that works out its reasons when they are first looked at: in a large fleet that takes longer than refusing.

    Its slots are empty until then, so Python asks `__getattr__` for them, once.
    """

    __slots__ = ("_case",)
    _case: Case

    def __init__(self, ask: str, case: Case) -> None:
        object.__setattr__(self, "ask", ask)
        object.__setattr__(self, "_case", case)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whichever field it is
        if name not in {"summary", "reasons", "would_fit"}:
            raise AttributeError(name)
        value = f"{self.ask} {self._case.verdict}" if name == "summary" else getattr(self._case, name)
        object.__setattr__(self, name, value)
        return value

    def for_another(self, ask: str) -> "LateRefusal":
        """The same for an ask of another name."""
        return LateRefusal(ask, self._case)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Refusal, **{field.name: getattr(self, field.name) for field in fields(Refusal)}), ()


def _values(refusal: Refusal) -> tuple[object, ...]:
    return refusal.ask, refusal.summary, refusal.reasons, refusal.would_fit


def answers_of(snapshot: Snapshot, need: Need, reserved: Mapping[str, int]) -> list[_Answer]:
    """For every device the best it can offer, or why it cannot."""
    return [
        (node, state.device.id, _held(need, node, reserved) or fit_of(need, node, state)) for node, state in snapshot.devices()
    ]


def _held(need: Need, node: NodeState, reserved: Mapping[str, int]) -> Misfit | None:
    least = reserved.get(node.name, 0)
    if least <= need.whole_devices:
        return None
    whom = f"{least} GPUs or more" if least > 1 else "whole GPUs"
    return Misfit(code=ReasonCode.RESERVED, text=f"its node is reserved for requests of {whom}", stage=1)


def _reason(need: Need, node: NodeState, device_id: str, answer: Fit | Misfit) -> DeviceReason:
    if isinstance(answer, Fit):
        text = f"fits, but {need.count} GPUs of one node are required and {node.name} has fewer that fit"
        return DeviceReason(node=node.name, device_id=device_id, code=ReasonCode.COUNT, text=text)
    return DeviceReason(node=node.name, device_id=device_id, code=answer.code, text=answer.text, short_bytes=answer.short_bytes)


def _nearest(answers: Sequence[_Answer]) -> str:
    misses = [(device_id, miss) for _, device_id, miss in answers if isinstance(miss, Misfit)]
    if not misses:
        return "none is left"
    device_id, miss = min(misses, key=lambda found: (-found[1].stage, found[1].short_bytes or 0, found[0]))
    return f"{device_id}: {miss.text}"
