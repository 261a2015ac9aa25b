"""How a footprint looks: as JSON, and as a waterfall in the terminal."""

from collections.abc import Iterable, Iterator

from aimgpu.domain import Device, Exactness, Footprint, Term
from aimgpu.sizing.fits import Fits, Saving
from aimgpu.units import format_bytes, format_ppm

_BAR = 40
_PPM_STEP = 1000  # a tenth of a percent is enough for people


def footprint_json(
    footprint: Footprint, source: str, fits: Fits, savings: Iterable[Saving], device: Device
) -> dict[str, object]:
    """The terms, where it fits, and what would save memory."""
    return {
        "model": footprint.model,
        "engine": footprint.engine,
        "engine_version": footprint.engine_version,
        "precision": footprint.precision,
        "context_tokens": footprint.context_tokens,
        "concurrency": footprint.concurrency,
        "source": source,
        "total_bytes": footprint.total_bytes,
        "exactness": footprint.exactness,
        "terms": footprint.terms,
        "flags": dict(footprint.flags),
        "fits": fits,
        "savings": tuple(savings),
        "notes": footprint.notes,
        "gpu": {"product": device.product, "memory_bytes": device.memory_bytes, "simulated": device.simulated},
    }


def waterfall(footprint: Footprint) -> Iterator[str]:
    """One line a term, each bar beginning where the one before ended."""
    total = max(footprint.total_bytes, 1)
    before = 0
    width = max(len(term.name) for term in footprint.terms)
    for term in footprint.terms:
        start, end = before * _BAR // total, (before + term.memory_bytes) * _BAR // total
        before += term.memory_bytes
        bar = " " * start + "█" * max(end - start, 1 if term.memory_bytes else 0)
        yield f"  {term.name:{width}}  {bar[:_BAR]:{_BAR}}  {format_bytes(term.memory_bytes, up=True):>10}  {_mark(term)}"
    yield f"  {'total':{width}}  {'█' * _BAR}  {format_bytes(footprint.total_bytes, up=True):>10}  {footprint.exactness.value}"


def _mark(term: Term) -> str:
    """How sure it is; where runs were measured, what the formula alone would say."""
    estimated = term.inputs.get("estimated_bytes")
    if term.exactness is not Exactness.MEASURED or not isinstance(estimated, int):
        return term.exactness.value
    return f"measured in {term.inputs.get('runs')} runs, estimated {format_bytes(estimated)}"


def fit_lines(fits: Fits, device: Device) -> Iterator[str]:
    """Where it fits, in sentences."""
    name = f"{device.product}{' (simulated)' if device.simulated else ''}, {format_bytes(fits.device_bytes)}"
    if not fits.whole:
        yield f"Does not fit on one {name}."
        if fits.devices_needed:
            each = format_bytes(fits.bytes_per_device, up=True)
            yield f"It would on {fits.devices_needed}, with {each} on each (--tensor-parallel {fits.devices_needed})."
        return
    part = -(-(fits.fraction_ppm or 0) // _PPM_STEP) * _PPM_STEP
    where = "one" if fits.devices_needed in (None, 1) else str(fits.devices_needed)
    of = "of it" if where == "one" else "of each"
    yield f"Fits on {where} {name}: {format_ppm(part)} {of}, {_copies(fits.copies_per_device)} side by side."
    for fit in fits.partitions:
        where = f"{fit.kind} ({fit.layout}, {format_bytes(fit.memory_bytes)} each)"
        yield f"  partition {where}: {_copies(fit.copies)} on the device"


def _copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


def saving_lines(savings: Iterable[Saving]) -> Iterator[str]:
    """What would save memory, in sentences."""
    for saving in savings:
        yield f"  {saving.change}: saves {format_bytes(saving.saved_bytes)}, needs {format_bytes(saving.total_bytes, up=True)}"


def flag_line(footprint: Footprint) -> str:
    """The flags, or variables, as they are typed."""
    glue = "=" if footprint.engine == "ollama" else " "
    return " ".join(f"{name}{glue}{value}".strip() for name, value in footprint.flags.items())
