"""The engine under the openb scorer: `openb_eval.py run --policy benchmarks.placement.openb:Engine`.

Nodes, GPUs and pods become a Snapshot and Asks; every decision is the engine's own. A GPU has 1000 units of memory here, a
pod's share is a fraction of it, and a pod without a GPU asks for CPU and host memory alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.domain import Ask, Auto, Device, Fraction, Layout, Partition, Vendor, Whole
from aimgpu.placement.scoring.chooser import Chooser
from aimgpu.placement.scoring.fleet import Charge, Fleet
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.scoring.valuation import Valuation
from aimgpu.placement.scoring.weights import FILLING_UP, Weights
from aimgpu.placement.snapshot import DeviceState, NodeState, Snapshot

MILLI = 1000
MIB = 1 << 20


class Engine:
    """What the scorer calls: built once a run, then `place` once a pod."""

    weights: Weights = FILLING_UP

    def __init__(
        self,
        cluster: Any,  # noqa: ANN401 - the scorer's own types
        trace: Any,  # noqa: ANN401
        _rng: Any,  # noqa: ANN401
        *,
        reserved: Mapping[str, int] | None = None,
    ) -> None:
        self.asks = [ask_of(kind, number) for number, kind in enumerate(trace.kinds)]
        fleet = Fleet(snapshot_of(cluster))
        self.chooser = Chooser(fleet, Valuation(fleet, mix_of(trace, self.asks), self.weights), reserved=reserved)
        self.kinds = [self.chooser.compiled_for(ask) for ask in self.asks]

    def place(self, number: int, memory_mib: int) -> tuple[int, list[int]] | None:
        charge = self.decide(number, memory_mib)
        return None if charge is None else (charge.node, list(charge.cells))

    def decide(self, number: int, memory_mib: int) -> Charge | None:
        kind = self.kinds[number]
        node = self.chooser.choose(kind, memory_mib * MIB)
        if node is None:
            return None
        charge = self.chooser.charge_for(kind, node, self.asks[number], memory_mib * MIB)
        self.chooser.take(charge)
        return charge


def mix_of(trace: Any, asks: Sequence[Ask]) -> Mix:  # noqa: ANN401
    """What the trace asks for, in whatever order: all that the engine knows of it."""
    counts = tuple((ask, int(count)) for ask, count in zip(asks, trace.count, strict=True))
    return Mix(counts=counts, host_memory_bytes=int(trace.mem[trace.ngpu > 0].sum()) * MIB)


def ask_of(kind: tuple[int, int, int, str], number: int) -> Ask:
    cpu, milli, gpus, spec = kind
    parts = frozenset(part for part in spec.split("|") if part)
    if not gpus:
        return Ask(name=f"kind{number}", want=Auto(), footprint_bytes=0, devices=0, cpu_millis=cpu)
    want = Whole(count=gpus) if milli >= MILLI else Fraction(ppm=milli * 1000)
    return Ask(name=f"kind{number}", want=want, cpu_millis=cpu, products=parts)


def snapshot_of(cluster: Any) -> Snapshot:  # noqa: ANN401 - the scorer's own type
    """Nodes are named by their place in the scorer's order, which is its tie break."""
    models = [cluster.models[model].lower() for model in cluster.model]
    rows = zip(models, cluster.slots.tolist(), cluster.cap_cpu.tolist(), cluster.cap_mem.tolist(), strict=True)
    return Snapshot(nodes=tuple(node_of(f"{number:06d}", *row) for number, row in enumerate(rows)))


def node_of(name: str, model: str, gpus: int, cpu_millis: int, memory_mib: int) -> NodeState:
    devices = tuple(DeviceState(device=device_of(f"{name}-{slot}", model, slot)) for slot in range(gpus))
    return NodeState(name=name, devices=devices, cpu_millis=cpu_millis, host_memory_bytes=memory_mib * MIB)


def device_of(device_id: str, model: str, slot: int) -> Device:
    partition = Partition(id=f"{device_id}/whole-0", device_id=device_id, index=0, kind="whole", memory_bytes=MILLI)
    layout = Layout(name="whole", compute_mode=None, memory_mode=None, partitions=(partition,))
    return Device(
        id=device_id,
        index=slot,
        vendor=Vendor.NVIDIA,
        product=model,
        market_name=None,
        memory_bytes=MILLI,
        compute_units=None,
        layout=layout,
        layouts=(layout,),
        simulated=True,
    )
