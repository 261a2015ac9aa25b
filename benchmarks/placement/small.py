"""One machine of 8 Devices and 64 Partitions: how long one decision takes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from aimgpu.domain import Ask, Auto, Fraction, IsolationRequirement, Memory, PartitionKind, Placement
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.placement.session import PlacementSession
from aimgpu.units import GIB

ROUNDS = 300


def machine() -> Snapshot:
    """8 x MI300X in CPX, half of the Partitions shared by running instances."""
    hardware = SimulatedHardware([("MI300X", 8)])
    for device in hardware.read_devices():
        hardware.apply_layout(device.id, "CPX/NPS1")
    states = tuple(DeviceState(device=device) for device in hardware.read_devices())
    engine = PlacementSession(Snapshot(nodes=(NodeState(name="box", devices=states),)))
    for number in range(48):
        engine.place(Ask(name=f"old{number}", want=Memory(memory_bytes=(5 + number % 7) * GIB)))
    return engine.snapshot


def asks() -> list[Ask]:
    return [
        Ask(name="auto", want=Auto(), footprint_bytes=7 * GIB),
        Ask(name="memory", want=Memory(memory_bytes=12 * GIB)),
        Ask(name="fraction", want=Fraction(ppm=50_000)),
        Ask(name="kind", want=PartitionKind(kind="cpx")),
        Ask(name="alone", want=Memory(memory_bytes=20 * GIB), isolation=IsolationRequirement.NONE, compute_ppm=50_000),
    ]


def small_figures(figures: dict[str, float]) -> None:
    """Median CPU microseconds of a decision, three ways.

    By an engine that is kept and charged in between; by `decide` on one Snapshot again and again; on one that it never saw.
    """
    snapshot, found = machine(), asks()
    engine = PlacementSession(snapshot)
    for ask in found:
        assert isinstance(engine.decide(ask), Placement), ask.name  # noqa: S101 - a refusal takes another path
    kept = []
    for number in range(ROUNDS):
        ask = found[number % len(found)]
        kept.append(_seconds(partial(engine.decide, ask)))
        kind = engine.chooser.compiled_for(ask)
        charge = engine.chooser.charge_for(kind, engine.chooser.choose(kind) or 0, ask)
        engine.chooser.take(charge)  # so that the next decision finds a changed world
        engine.chooser.release(charge)
    again = [_seconds(partial(decide, snapshot, ask)) for ask in found * (ROUNDS // 10)]
    worlds = [replace(snapshot) for _ in range(ROUNDS)]
    cold = [_seconds(partial(decide, world, found[number % len(found)])) for number, world in enumerate(worlds)]
    figures["small_decision_us"] = round(statistics.median(kept) * 1e6, 1)
    figures["small_decision_p99_us"] = round(sorted(kept)[int(len(kept) * 0.99)] * 1e6, 1)
    figures["small_decision_same_snapshot_us"] = round(statistics.median(again) * 1e6, 1)
    figures["small_decision_from_snapshot_us"] = round(statistics.median(cold) * 1e6, 1)


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
