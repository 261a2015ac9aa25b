"""AIM profiles: what a model of one precision needs of one GPU product, as our JSON and in AMD's own profile format.

A profile never recommends more than the device has nor less than the model needs; where one device does not do, it says so, and
on how many it would.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aimgpu.domain import Device, Footprint, Vendor
from aimgpu.errors import InvalidInput
from aimgpu.sizing.fits import Fits, PartitionFit, find_fits
from aimgpu.sizing.footprint import estimate_need
from aimgpu.sizing.model import ModelFacts
from aimgpu.sizing.request import SizingRequest

PRECISIONS = ("fp16", "int8", "int4")
_GB = 10**9
_HUNDREDTH = _GB // 100
# Parts and precisions that AMD's profile schema knows (aim-build, schemas/general_profile_schema.json).
_AIM_PRODUCTS = ("MI210", "MI250X", "MI300A", "MI300X", "MI308X", "MI325X", "MI350X", "MI355X")
_AIM_PRECISIONS = ("fp4", "fp8", "fp16", "fp32", "bf16", "int4", "int8")
_AIM_COUNTS = (1, 2, 4, 8)
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_ARCHITECTURES = {
    "MI300A": "gfx942",
    "MI300X": "gfx942",
    "MI308X": "gfx942",
    "MI325X": "gfx942",
    "MI350X": "gfx950",
    "MI355X": "gfx950",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model at one precision on one product."""

    facts: ModelFacts
    precision: str
    device: Device
    footprint: Footprint  # on each device
    fits: Fits
    partition: PartitionFit | None  # the smallest that holds it; None: no single device does
    devices: int | None  # None: more than any node has

    @property
    def file_name(self) -> str:
        return f"{self.variant_id}.json".replace("/", "_").replace(":", "_")

    @property
    def variant_id(self) -> str:
        return f"{self.facts.name}-{self.precision}"

    @property
    def memory_requirement_gb(self) -> float:
        """On all its devices together, rounded up: the one figure of tables and files."""
        return _hundredths_up(self.footprint.total_bytes) * (self.devices or 1) / 100

    @property
    def meant_for(self) -> str:
        """What the engine's arguments are computed for, such as its part of the memory that it sees."""
        if self.partition is None:
            return f"{self.devices or 1} x {self.device.product}, {_gb_down(self.device.memory_bytes):g} GB each"
        where = f"a {self.partition.kind} partition of {self.device.product} ({self.partition.layout})"
        return f"{where}, {_gb_down(self.partition.memory_bytes):g} GB"


def make_profile(request: SizingRequest, device: Device) -> Profile:
    """The profile of `request.model` at `request.precision`."""
    asked = replace(request, vendor=device.vendor, gpu=device.product, device_memory_bytes=device.memory_bytes)
    fits = find_fits(asked, device)
    needed = _hundredths_up(estimate_need(asked).total_bytes)
    partition = next((fit for fit in fits.partitions if fit.memory_bytes // _HUNDREDTH >= needed), None)
    devices = 1 if partition else fits.devices_needed
    room = partition.memory_bytes if partition else device.memory_bytes  # what the engine will see as its device
    footprint = estimate_need(replace(asked, tensor_parallel=devices or 1, device_memory_bytes=room))
    return Profile(
        facts=request.model,
        precision=request.precision or request.model.precision,
        device=device,
        footprint=footprint,
        fits=fits,
        partition=partition,
        devices=devices,
    )


def to_json(profile: Profile) -> dict[str, object]:
    each = _hundredths_up(profile.footprint.total_bytes)
    partition = profile.partition
    return {
        "model_id": profile.facts.name,
        "variant_id": profile.variant_id,
        "version": f"1.0.0-{profile.precision}",
        "parameters": _count_text(profile.facts.parameters),
        "precision": profile.precision,
        "memory_requirement_gb": profile.memory_requirement_gb,
        "recommended_partition_gb": _gb_down(partition.memory_bytes) if partition else None,
        "fit": _fit_text(profile),
        "gpu_sharing": _gpu_sharing(profile, each / 100),
        "resource_requirements": {
            "gpu_model": profile.device.product,
            "gpu_count": profile.devices,
            "memory_gb_per_gpu": each / 100 if profile.devices else None,
            "gpu_memory_gb": _gb_down(profile.device.memory_bytes),
            "compute_units": partition.compute_units if partition else profile.device.compute_units,
        },
        "engine": {
            "name": profile.footprint.engine,
            "arguments": dict(profile.footprint.flags),
            "arguments_are_for": profile.meant_for,
        },
        "metadata": {
            "partition_config": _partition_config(partition),
            "context_tokens": profile.footprint.context_tokens,
            "concurrency": profile.footprint.concurrency,
            "exactness": profile.footprint.exactness.value,
            "source": profile.facts.source,
            "notes": list(profile.footprint.notes),
        },
    }


def to_aim(profile: Profile, metric: str = "latency") -> dict[str, object]:
    """AMD's profile format; raises InvalidInput for what its schema cannot say."""
    product = profile.device.product
    if profile.device.vendor is not Vendor.AMD or product not in _AIM_PRODUCTS:
        raise InvalidInput(
            f"AMD's profile format does not know the GPU {product}", hint=f"It knows {', '.join(_AIM_PRODUCTS)}."
        )
    if profile.precision not in _AIM_PRECISIONS:
        raise InvalidInput(
            f"AMD's profile format does not know {profile.precision}", hint=f"It knows {', '.join(_AIM_PRECISIONS)}."
        )
    if profile.devices not in _AIM_COUNTS:
        raise InvalidInput(f"{profile.variant_id} does not fit 8 x {product}", hint="Use a smaller precision or context.")
    as_published = profile.precision in _DTYPES
    return {
        "aim_id": profile.facts.name,
        "model_id": profile.facts.name,
        "metadata": {
            "engine": "vllm",
            "gpu": product,
            "gpu_count": profile.devices,
            "manual_selection_only": not as_published,  # a quantised checkpoint has an id of its own, to be put in
            "metric": metric,
            "precision": profile.precision,
            "type": "unoptimized",
        },
        "engine_args": _engine_args(profile),
        "env_vars": {"GPU_ARCHS": _ARCHITECTURES[product]} if product in _ARCHITECTURES else {},
    }


def aim_profile_id(profile: Profile, metric: str = "latency") -> str:
    """The name that AMD gives such a profile, and its file."""
    return f"vllm-{profile.device.product}-{profile.precision}-tp{profile.devices}-{metric}".lower()


def _engine_args(profile: Profile) -> Mapping[str, object]:
    # Which vLLM an image holds is not known here; without their own flag graphs take a few MiB more than was charged.
    flags = {flag: value for flag, value in profile.footprint.flags.items() if flag != "--cudagraph-capture-sizes"}
    arguments: dict[str, object] = {flag.removeprefix("--"): _typed(value) for flag, value in flags.items()}
    arguments |= {"dtype": _DTYPES.get(profile.precision, "auto"), "tensor-parallel-size": profile.devices}
    return dict(sorted(arguments.items()))


def _typed(value: str) -> object:
    """Flags without a value are null in AMD's format."""
    if not value:
        return None
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def _gpu_sharing(profile: Profile, needed_gb: float) -> dict[str, object]:
    partition = profile.partition
    return {
        "enabled": partition is not None,
        "memory_limit_gb": needed_gb if partition else None,
        "partition_id": None,  # placement chooses it
        "qos_priority": "medium",
        "compute_mode": partition.compute_mode if partition else None,
        "memory_mode": partition.memory_mode if partition else None,
        "partition_count": partition.partitions if partition else None,
        "partition_size_gb": _gb_down(partition.memory_bytes) if partition else None,
    }


def _partition_config(partition: PartitionFit | None) -> dict[str, object] | None:
    if partition is None:
        return None
    return {
        "layout": partition.layout,
        "compute_mode": partition.compute_mode,
        "memory_mode": partition.memory_mode,
        "kind": partition.kind,
        "partition_count": partition.partitions,
        "partition_size_bytes": partition.memory_bytes,
        "copies_per_device": partition.copies,
    }


def _fit_text(profile: Profile) -> str:
    if profile.partition is not None:
        return "fits"
    if profile.devices is None:
        return f"does not fit on any number of {profile.device.product} that was tried"
    return f"does not fit on one {profile.device.product}; fits on {profile.devices}"


def _count_text(parameters: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if parameters >= size:
            return f"{parameters / size:.4g}{unit}"
    return str(parameters)


def _hundredths_up(size: int) -> int:
    """Hundredths of a GB, rounded up: a need is never understated."""
    return -(-size // _HUNDREDTH)


def _gb_down(size: int) -> float:
    return size // _HUNDREDTH / 100
