"""How many replicas of a GPU, from the models that are to share it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from aimgpu.errors import InvalidInput
from aimgpu.units import format_bytes

_BILLION = 1_000_000_000
_LEAST_REPLICAS = 2  # NVIDIA's plugin refuses fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A model and what one running copy of it needs on the GPU."""

    name: str
    parameters: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """How many replicas are usual for models of a size: more of them wait too long for their turn."""

    name: str
    least_parameters: int
    fewest: int
    most: int


# Largest first; a model belongs to the first class that it reaches.
CLASSES = (
    SizeClass(name="7B and over", least_parameters=7 * _BILLION, fewest=2, most=4),
    SizeClass(name="1B to 7B", least_parameters=_BILLION, fewest=4, most=8),
    SizeClass(name="under 1B", least_parameters=0, fewest=8, most=16),
)
MOST_REPLICAS = max(each.most for each in CLASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Replicas of one GPU; None: it should not be time-sliced for these models."""

    replicas: int | None
    usual: tuple[int, int]
    gpu_memory_bytes: int
    replica_memory_bytes: int | None
    max_loaded_models: int  # of one pod, for OLLAMA_MAX_LOADED_MODELS
    reasons: tuple[str, ...]


def recommend(models: Sequence[SizedModel], gpu_memory_bytes: int) -> Recommendation:
    """The largest model decides: any pod may have to hold it in the part of the memory that a replica stands for."""
    if not models:
        hint = "Name the models that are to share a GPU, as `aimgpu timeslicing recommend Qwen/Qwen3-8B`."
        raise InvalidInput("no model is named", hint=hint)
    hungriest = max(models, key=lambda each: each.memory_bytes)
    largest = max(models, key=lambda each: each.parameters)
    chosen = size_class(largest.parameters)
    fitting = gpu_memory_bytes // hungriest.memory_bytes if hungriest.memory_bytes else chosen.most
    usual = f"{chosen.fewest} to {chosen.most} replicas are usual for {chosen.name}"
    needs, has = format_bytes(hungriest.memory_bytes, up=True), format_bytes(gpu_memory_bytes)
    reasons = [
        f"{largest.name} has {_billions(largest.parameters)} parameters: {usual}",
        f"one copy of {hungriest.name} needs {needs}, and the GPU has {has}: {fitting} fit at the same time",
    ]
    if len(models) > 1:
        together = sum(each.memory_bytes for each in models)
        room = "fit" if together <= gpu_memory_bytes else "do not fit"
        reasons.append(f"one copy of each of the {len(models)} needs {format_bytes(together, up=True)}: together they {room}")
    replicas: int | None = min(fitting, chosen.most)
    if fitting == 0:
        replicas = None
        reasons.append(
            f"not even one copy fits: take a GPU of {needs} or more, a smaller precision, or divide the model over GPUs"
        )
    elif fitting < _LEAST_REPLICAS:
        replicas = None
        reasons.append(
            "two copies do not fit, so time-slicing would only let pods fail for want of memory: give it a whole GPU"
        )
    elif fitting < chosen.fewest:
        reasons.append(f"memory allows fewer than the usual {chosen.fewest}: {fitting}")
    elif fitting > chosen.most:
        reasons.append(f"memory would hold more, but beyond {chosen.most} each pod waits too long for its turn: {chosen.most}")
    part = gpu_memory_bytes // replicas if replicas else None
    loaded = _loaded_at_once(models, part or gpu_memory_bytes)
    if replicas:
        reasons.append(
            f"a replica stands for {format_bytes(part or 0)}: {loaded} of these models can be loaded in a pod at once"
        )
    return Recommendation(
        replicas=replicas,
        usual=(chosen.fewest, chosen.most),
        gpu_memory_bytes=gpu_memory_bytes,
        replica_memory_bytes=part,
        max_loaded_models=loaded,
        reasons=tuple(reasons),
    )


def size_class(parameters: int) -> SizeClass:
    """The class of a model with this number of parameters."""
    return next(each for each in CLASSES if parameters >= each.least_parameters)


def _loaded_at_once(models: Sequence[SizedModel], memory_bytes: int) -> int:
    """How many of any of them fit at once: counted from the largest down."""
    count, total = 0, 0
    for size in sorted((each.memory_bytes for each in models), reverse=True):
        total += size
        if total > memory_bytes:
            break
        count += 1
    return max(count, 1)


def _billions(parameters: int) -> str:
    return f"{parameters / _BILLION:.1f}B" if parameters >= _BILLION else f"{parameters / 1_000_000:.0f}M"
