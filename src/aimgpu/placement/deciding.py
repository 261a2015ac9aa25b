"""Choosing: Snapshot and Asks in, decisions out."""

from collections.abc import Mapping, Sequence

from aimgpu.domain import Ask, Decision
from aimgpu.placement.engine import Engine
from aimgpu.placement.mix import Mix
from aimgpu.placement.snapshot import Snapshot


def decide(snapshot: Snapshot, ask: Ask, *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None) -> Decision:
    """Where this Ask goes. Raises InvalidInput or UnknownPartition where the Ask itself is wrong.

    `mix` is what Asks to expect; by default what runs and this one. Who decides often keeps an `Engine` instead.
    """
    learned = Mix.given(snapshot).with_asks([ask]) if mix is None and snapshot.running else mix or Mix()
    return Engine(snapshot, mix=learned, reserved=reserved).decide(ask)


def decide_all(
    snapshot: Snapshot, asks: Sequence[Ask], *, mix: Mix | None = None, reserved: Mapping[str, int] | None = None
) -> tuple[Decision, ...]:
    """One decision an Ask, in their order, each seeing what the earlier ones took."""
    learned = Mix.given(snapshot).with_asks(asks) if mix is None else mix
    engine = Engine(snapshot, mix=learned, reserved=reserved)
    return tuple(engine.place(ask) for ask in asks)
