"""What it means to have more models than fit on one GPU: how many are awake together, what a swap takes, who is late. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from aimgpu.domain import Footprint, Priority
from aimgpu.placement.residency import MemoryRoom
from aimgpu.placement.residency_replay import ModelShape, Ours, Request, replay
from aimgpu.units import GIB

# vLLM 0.26 on an H200: 0.29 s from wake to first token with 6 GiB of weights (benchmarks/results/engines_h200.json). llm-d
# publishes 3 s for 64 GiB, which is the same. Falling asleep is taken to copy as fast.
_COPY_SECONDS_PER_GIB = 0.047
# ServerlessLLM publishes 4.4 s for 15 GiB of safetensors on NVMe.
_LOAD_SECONDS_PER_GIB = 0.29
_START_SECONDS = 120.0  # vLLM on the same H200: 105 to 131 s
_LEAST_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversubscription:
    """Times are estimates by the size of weights."""

    models: int
    awake_together: int  # counted with the largest models: any set of this number fits
    swap_seconds: float  # the slowest: one falls asleep, another wakes
    asleep_bytes: int  # what all of them hold on the GPU asleep
    requests: int = 0
    late: int = 0


def shape_of(name: str, footprint: Footprint, priority: Priority, first_token_seconds: float) -> ModelShape:
    """As vLLM sleeps: weights and KV cache leave the GPU, the rest stays."""
    weights = footprint.term_bytes("weights")
    copied = max(weights / GIB * _COPY_SECONDS_PER_GIB, _LEAST_SECONDS)
    return ModelShape(
        name=name,
        awake_bytes=footprint.total_bytes,
        asleep_bytes=footprint.total_bytes - weights - footprint.term_bytes("kv_cache"),
        host_bytes=weights,
        wake_seconds=copied,
        sleep_seconds=copied,
        reload_seconds=max(weights / GIB * _LOAD_SECONDS_PER_GIB, _LEAST_SECONDS),
        start_seconds=_START_SECONDS,
        priority=priority,
        first_token_seconds=first_token_seconds,
    )


def assess(shapes: Sequence[ModelShape], room: MemoryRoom, arrivals: Sequence[tuple[float, str]] = ()) -> Oversubscription:
    """`arrivals`: seconds and model, in any order. They are replayed as our policy would serve them."""
    asleep = sum(shape.asleep_bytes for shape in shapes)
    sizes = sorted((shape.awake_bytes - shape.asleep_bytes for shape in shapes), reverse=True)
    together = sum(size <= room.gpu_bytes - asleep for size in accumulate(sizes))
    requests = [Request(at=at, model=model) for at, model in sorted(arrivals)]
    outcome = replay(shapes, requests, room, Ours())
    return Oversubscription(
        models=len(shapes),
        awake_together=together,
        swap_seconds=max((shape.sleep_seconds for shape in shapes), default=0.0)
        + max((shape.wake_seconds for shape in shapes), default=0.0),
        asleep_bytes=asleep,
        requests=len(requests),
        late=outcome.late,
    )


def to_json(found: Oversubscription) -> Mapping[str, float]:
    return {
        "models": found.models,
        "awake_together": found.awake_together,
        "swap_seconds": round(found.swap_seconds, 3),
        "asleep_bytes": found.asleep_bytes,
        "requests": found.requests,
        "late": found.late,
    }
