"""What the annotations of a pod ask for. KAI's keys are validated as KAI-Scheduler 0.12 validates them; ours add to them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from aimgpu.domain import IsolationRequirement, Priority
from aimgpu.errors import AimGpuError, InvalidInput, suggest_nearest
from aimgpu.hardware.amd.modes import are_compatible, memory_ranges
from aimgpu.kubernetes.vocabulary.names import DRIVER, GROUP, LABEL_SHARE
from aimgpu.units import PPM, parse_duration_ms, parse_ppm, parse_token_time_ms

DEFAULT_SCHEDULER = "default-scheduler"
KAI = "kai-scheduler"  # schedulerName of pods that it places
FRACTION, MEMORY = "gpu-fraction", "gpu-memory"
NUM_DEVICES, CONTAINER_NAME = "gpu-fraction-num-devices", "gpu-fraction-container-name"
SHARING = f"{GROUP}/gpu-sharing"
COMPUTE = f"{GROUP}/compute"
COMPUTE_MODE, MEMORY_MODE = f"{GROUP}/compute-mode", f"{GROUP}/memory-mode"
ISOLATION, PRIORITY = f"{GROUP}/isolation", f"{GROUP}/qos-priority"
SLO_PREFIX = f"{GROUP}/slo-"
HANDLED = f"{GROUP}/claim"  # written by admission: the template that the pod's claim is made from
RESOURCE = f"{GROUP}/resource"  # written by admission: the extended resource that the container's limit is of
MODEL = f"{GROUP}/model"  # names the model where it cannot be read from the pod
CONCURRENCY = f"{GROUP}/concurrency"  # how many requests at once have their whole context
_MPS = "mps"  # of KAI-Scheduler
TRIGGERS = (SHARING, FRACTION, MEMORY, COMPUTE_MODE, MEMORY_MODE)  # any of these makes a pod ours
REVIEWED = (*TRIGGERS, NUM_DEVICES, CONTAINER_NAME)  # the last two alone are refused, as KAI does
REVIEWED_PREFIXES = (f"{GROUP}/", "gpu-")  # one of ours that is misspelt is refused rather than overlooked

# Limits that give a pod GPUs, or parts of one, in another way.
_GPU_RESOURCE = re.compile(
    rf"nvidia\.com/(gpu|mig-).*|amd\.com/(gpu.*|[sdtqc]px_nps[0-9].*)|{re.escape(GROUP)}/.*"
    rf"|deviceclass\.resource\.kubernetes\.io/(.*\.)?{re.escape(DRIVER)}"
)
_FRACTION = re.compile(r"\+?([0-9]{1,12}\.?[0-9]{0,12}|\.[0-9]{1,12})([eE][+-]?[0-9]{1,2})?", re.ASCII)  # as Go's ParseFloat
_WHOLE_NUMBER = re.compile(r"[0-9]{1,20}", re.ASCII)
_LARGEST_NUMBER = 2**64 - 1  # that KAI reads
_LARGEST_MIB = (2**63 - 1) >> 20  # that a quantity of bytes holds; no GPU has this much, so the pod waits
_COMPUTE_MODES = ("SPX", "DPX", "TPX", "QPX", "CPX")
_MEMORY_MODES = ("NPS1", "NPS2", "NPS4", "NPS8")
_GFX_TARGETS = (90402, 90500)  # MI300 and MI350 series
_MOST_DEVICES = 64
_SLO_LATENCIES = ("ttft", "latency")
_SLO_PERCENTILES = ("p50", "p90", "p95", "p99")
# What only says more about a share, and what a served model's objects have for the gateway: KServe copies those to the pods.
_MORE = (COMPUTE, ISOLATION, PRIORITY, CONCURRENCY)
_SERVED = ("engine", "context", "replicas", "keep", "slo", "stack-entry", "served-model-name")
_KNOWN = (*TRIGGERS[:1], *TRIGGERS[3:], *_MORE, MODEL, HANDLED, RESOURCE, *(f"{GROUP}/{name}" for name in _SERVED))
_PLAIN = (FRACTION, MEMORY, NUM_DEVICES, CONTAINER_NAME)
_NEAR = 0.8  # of a misspelt name without our prefix: others use such names too
_Choice = TypeVar("_Choice", IsolationRequirement, Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What one container of a pod wants of GPUs. Neither fraction nor memory nor modes: sized from its model."""

    container: str
    fraction_ppm: int | None = None
    memory_mib: int | None = None
    devices: int = 1
    compute_percent: int | None = None
    compute_mode: str | None = None
    memory_mode: str | None = None
    isolation: IsolationRequirement | None = None
    priority: Priority | None = None
    objectives: Mapping[str, str] = field(default_factory=dict)  # as written: "ttft-p95": "500ms"

    @property
    def wants_partition(self) -> bool:
        """A partition of a kind; with a fraction or memory too, a share inside one."""
        return self.compute_mode is not None or self.memory_mode is not None

    @property
    def sized_by_model(self) -> bool:
        return self.fraction_ppm is None and self.memory_mib is None and not self.wants_partition


def parse_annotations(annotations: Mapping[str, str], spec: Mapping[str, Any]) -> GpuRequest | None:
    """None where nothing is asked for. Raises InvalidInput with the annotation, its value and what can be written."""
    _refuse_unknown(annotations)
    sharing = annotations.get(SHARING)
    if sharing not in (None, "true", "false"):
        _refuse(SHARING, sharing, 'Write "true" or "false".')
    if sharing == "false" or not any(key in annotations for key in TRIGGERS):
        _refuse_orphans(annotations, spec)
        return None
    if CONCURRENCY in annotations:
        _count(CONCURRENCY, annotations[CONCURRENCY], "requests, such as 8")
    if annotations.get(_MPS) not in (None, "false") and spec.get("schedulerName") != KAI:
        _refuse(_MPS, annotations[_MPS], "Remove it: the node agent starts MPS where the chart has agent.mps=true.")
    fraction, memory = annotations.get(FRACTION), annotations.get(MEMORY)
    if fraction is not None and memory is not None:
        raise InvalidInput(f"{FRACTION} and {MEMORY} are both given", hint="Give one of them.")
    container = _container(annotations.get(CONTAINER_NAME), spec)
    _refuse_whole_gpus(spec, own=(container, annotations.get(RESOURCE)))
    devices = annotations.get(NUM_DEVICES)
    if devices is not None and fraction is None and memory is None:
        raise InvalidInput(f"{NUM_DEVICES} needs {FRACTION} or {MEMORY}", hint="Give one of them, or leave it out.")
    compute_mode, memory_mode = _modes(annotations)
    return GpuRequest(
        container=container,
        fraction_ppm=None if fraction is None else _fraction_ppm(fraction),
        memory_mib=None if memory is None else min(_count(MEMORY, memory, "MiB, such as 4096"), _LARGEST_MIB),
        devices=1 if devices is None else _device_count(devices),
        compute_percent=_compute_percent(annotations.get(COMPUTE)),
        compute_mode=compute_mode,
        memory_mode=memory_mode,
        isolation=_choice(IsolationRequirement, ISOLATION, annotations),
        priority=_choice(Priority, PRIORITY, annotations),
        objectives=_objectives(annotations),
    )


def asks_in_vain(pod: Mapping[str, Any]) -> bool:
    """Whether a pod asks for a share by annotation and has none, because admission did not see its creation."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    scheduler = (pod.get("spec") or {}).get("schedulerName") or DEFAULT_SCHEDULER
    if scheduler != DEFAULT_SCHEDULER or LABEL_SHARE in (metadata.get("labels") or {}):  # others read such names too
        return False
    asks = any(key in annotations for key in TRIGGERS) and annotations.get(SHARING) != "false"
    return asks and HANDLED not in annotations and RESOURCE not in annotations


def _refuse_unknown(annotations: Mapping[str, str]) -> None:
    """Nobody would read it."""
    for key in annotations:
        if key.startswith(f"{GROUP}/") and key not in _KNOWN and not key.startswith(SLO_PREFIX):
            near = suggest_nearest([key], _KNOWN)
            raise InvalidInput(f"the annotation {key} is not known", hint=f"{near}The reference of annotations lists all.")
        if key.startswith("gpu-") and key not in _PLAIN:
            near_plain = get_close_matches(key, [*_PLAIN, SHARING.rpartition("/")[2]], 1, _NEAR)
            if near_plain:
                wanted = near_plain[0] if near_plain[0] in _PLAIN else SHARING
                raise InvalidInput(f"the annotation {key} is not known", hint=f"Did you mean {wanted}?")


def _refuse_orphans(annotations: Mapping[str, str], spec: Mapping[str, Any]) -> None:
    """Annotations that only say more about a request, without one."""
    if annotations.get(SHARING) == "false":
        return
    for key in (NUM_DEVICES, CONTAINER_NAME):
        if key in annotations:
            raise InvalidInput(f"{key} needs {FRACTION} or {MEMORY}", hint="Give one of them, or leave it out.")
    served = f"{GROUP}/engine" in annotations or any(_GPU_RESOURCE.fullmatch(name) for name in _limits_of(spec))
    for key in annotations:
        gateways = served and key in (PRIORITY, CONCURRENCY)  # of a model with whole GPUs
        if (key in _MORE or key.startswith(SLO_PREFIX)) and not gateways:
            raise InvalidInput(
                f"{key} has no effect without a share of a GPU",
                hint=f"Ask for one ({FRACTION}, {MEMORY}, {SHARING} or {COMPUTE_MODE}), or leave it out.",
            )


def _limits_of(spec: Mapping[str, Any]) -> Iterator[str]:
    for container in containers_of(spec):
        yield from (str(name) for name in (container.get("resources") or {}).get("limits") or {})


def _refuse_whole_gpus(spec: Mapping[str, Any], *, own: tuple[str, str | None]) -> None:
    """`own`: container and name of a limit that admission itself wrote."""
    for container in containers_of(spec):
        resources = container.get("resources") or {}
        for name in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}:
            if (str(container.get("name")), name) == own:
                continue
            if _GPU_RESOURCE.fullmatch(name):
                raise InvalidInput(
                    f"container {container.get('name')!r} has a limit of {name}, and the pod asks for a share of a GPU",
                    hint=f"Remove {name}, or the annotations that ask for a share.",
                )


def containers_of(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Containers first, then init containers: the first is the one that gets the GPU if none is named."""
    return (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))


def _container(name: str | None, spec: Mapping[str, Any]) -> str:
    known = [str(container.get("name")) for container in containers_of(spec)]
    if name is None:
        return known[0] if known else ""
    if name not in known:
        _refuse(CONTAINER_NAME, name, f"The containers of the pod are {', '.join(known) or 'none'}.")
    return name


def _fraction_ppm(text: str) -> int:
    part = Decimal(text) if _FRACTION.fullmatch(text) else Decimal(0)
    ppm = int(part * PPM)
    if ppm <= 0 or part >= 1:
        _refuse(FRACTION, text, "Write a number between 0 and 1, without either, such as 0.5.")
    return ppm


def _count(key: str, text: str, example: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text) or not 0 < int(text) <= _LARGEST_NUMBER:
        _refuse(key, text, f"Write a positive whole number of {example}.")
    return int(text)


def _device_count(text: str) -> int:
    count = _count(NUM_DEVICES, text, "GPUs, such as 2")
    if count > _MOST_DEVICES:
        _refuse(NUM_DEVICES, text, f"Write at most {_MOST_DEVICES}.")
    return count


def _compute_percent(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        percent, rest = divmod(parse_ppm(text) * 100, PPM)
    except AimGpuError as error:
        raise InvalidInput(f"{COMPUTE} cannot be {text[:40]!r}", hint=error.hint) from error
    if rest or not 0 < percent <= 100:  # noqa: PLR2004 - percent
        _refuse(COMPUTE, text, "Write whole percent of a GPU, such as 30%.")
    return percent


def _modes(annotations: Mapping[str, str]) -> tuple[str | None, str | None]:
    compute, memory = annotations.get(COMPUTE_MODE), annotations.get(MEMORY_MODE)
    if compute is not None and compute.upper() not in _COMPUTE_MODES:
        _refuse(COMPUTE_MODE, compute, f"It can be {', '.join(_COMPUTE_MODES)}.")
    if memory is not None and memory.upper() not in _MEMORY_MODES:
        _refuse(MEMORY_MODE, memory, f"It can be {', '.join(_MEMORY_MODES)}.")
    if compute is not None and memory is not None and not are_possible(compute.upper(), memory.upper()):
        fitting = [mode for mode in _MEMORY_MODES if are_possible(compute.upper(), mode)]
        raise InvalidInput(
            f"no GPU can be in {compute.upper()} with {memory.upper()}",
            hint=f"{compute.upper()} goes with {', '.join(fitting)}.",
        )
    return compute.upper() if compute else None, memory.upper() if memory else None


def are_possible(compute_mode: str, memory_mode: str) -> bool:
    """Whether a GPU of any series that can be partitioned takes both modes together."""
    return memory_ranges(memory_mode) is not None and any(
        are_compatible(compute_mode, memory_mode, target) for target in _GFX_TARGETS
    )


def _choice(kind: type[_Choice], key: str, annotations: Mapping[str, str]) -> _Choice | None:
    text = annotations.get(key)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        _refuse(key, text, f"It can be {', '.join(item.value for item in kind)}.")


def _objectives(annotations: Mapping[str, str]) -> Mapping[str, str]:
    found = {}
    for key, text in annotations.items():
        if key.startswith(SLO_PREFIX):
            _check_objective(key, text)
            found[key.removeprefix(SLO_PREFIX)] = text
    return found


def _check_objective(key: str, text: str) -> None:
    measure, _, percentile = key.removeprefix(SLO_PREFIX).partition("-")
    if measure == "availability" and not percentile:
        parse: Callable[[str], object] = parse_ppm
    elif measure in _SLO_LATENCIES and percentile in _SLO_PERCENTILES:
        parse = parse_duration_ms
    elif measure == "tpot" and percentile in _SLO_PERCENTILES:
        parse = parse_token_time_ms
    else:
        raise InvalidInput(
            f"{key} is not a promise that can be made",
            hint=f"Write {SLO_PREFIX}ttft-p95, -tpot-p95, -latency-p95 (p50, p90, p95, p99) or {SLO_PREFIX}availability.",
        )
    try:
        parse(text)
    except AimGpuError as error:
        raise InvalidInput(f"{key} cannot be {text[:40]!r}", hint=error.hint or error.message) from error


def _refuse(key: str, text: str, hint: str) -> NoReturn:
    raise InvalidInput(f"{key} cannot be {text[:40]!r}", hint=hint)
