"""Published buffer sizes of llama.cpp beside the estimate.

The points are split by a hash of their source, before anyone looks at an error: one half is looked at when a formula is mended,
the other only tells how good it is.
"""

import csv
import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from aimgpu.domain import Vendor
from aimgpu.sizing import ModelFacts, SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.catalogue import read_rows
from aimgpu.units import MIB

_FOLDER = Path(__file__).parent
_ALLOWED_MIB = 150
_TERM_OF = {"model": "weights", "kv": "kv_cache", "compute": "activations"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPoint:
    """One load that a log tells of, and the request that sizes it."""

    id: str
    source: str
    backend: str
    held_out: bool
    request: SizingRequest
    measured_mib: Mapping[str, float]  # model, kv and compute, those that the log told


def read_buffer_points() -> list[BufferPoint]:
    with (_FOLDER / "llamacpp_points.csv").open(encoding="utf-8", newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    return [_read_point(cells) for cells in csv.DictReader(lines)]


def buffers_off_mib(point: BufferPoint) -> dict[str, float]:
    """Estimate less measurement of each buffer, and of those that were told together."""
    terms = {term.name: term.memory_bytes for term in estimate_footprint(point.request).terms}
    off = {name: round(terms[_TERM_OF[name]] / MIB - told, 1) for name, told in point.measured_mib.items()}
    return off | {"total": round(sum(off.values()), 1)}


def buffer_rows(points: Iterable[BufferPoint]) -> list[dict[str, object]]:
    return [_row(point) for point in points]


def buffer_figures(points: Sequence[BufferPoint]) -> dict[str, float]:
    off = {point.id: abs(buffers_off_mib(point)["total"]) for point in points}
    held = [off[point.id] for point in points if point.held_out]
    return {
        "llamacpp_points": len(off),
        "llamacpp_worst_mib": max(off.values()),
        "llamacpp_mean_mib": round(statistics.fmean(off.values()), 1),
        "llamacpp_within_150_mib": sum(value <= _ALLOWED_MIB for value in off.values()),
        "llamacpp_heldout_points": len(held),
        "llamacpp_heldout_within_150_mib": sum(value <= _ALLOWED_MIB for value in held),
        "llamacpp_heldout_worst_mib": max(held, default=0),
        "llamacpp_heldout_mean_mib": round(statistics.fmean(held), 1) if held else 0,
    }


def _row(point: BufferPoint) -> dict[str, object]:
    request = point.request
    return {
        "id": point.id,
        "engine": "llamacpp",
        "model": request.model.name,
        "quant": request.precision or "",
        "backend": point.backend,
        "build": request.engine_version,
        "context": request.context,
        "slots": request.concurrency,
        "ubatch": request.batched_tokens,
        "kv": request.kv_precision,
        "flash": request.flash_attention,
        "half": "held out" if point.held_out else "learnt from",
        "measured_mib": dict(point.measured_mib),
        "off_mib": buffers_off_mib(point),
        "source": point.source,
    }


def _read_point(cells: Mapping[str, str]) -> BufferPoint:
    measured = {name: float(cells[f"{name}_mib"]) for name in _TERM_OF if cells[f"{name}_mib"]}
    even = hashlib.sha256(cells["source"].encode()).digest()[0] % 2 == 0
    return BufferPoint(
        id=cells["id"],
        source=cells["source"],
        backend=cells["backend"],
        held_out=not even and cells["seen"] != "yes",
        request=_request(cells),
        measured_mib=measured,
    )


def _request(cells: Mapping[str, str]) -> SizingRequest:
    model = _model(cells["model"])
    if cells["full_window"] == "yes" and model.architecture is not None:
        model = replace(model, architecture=replace(model.architecture, sliding_window=int(cells["context"])))
    return SizingRequest(
        model=model,
        engine="llamacpp",
        engine_version=f"b{cells['build']}",
        precision=cells["precision"] or None,
        context_tokens=int(cells["context"]),
        concurrency=int(cells["slots"]),
        shared_cache=cells["shared"] == "yes",
        batched_tokens=int(cells["ubatch"]),
        kv_precision=cells["kv"],
        flash_attention=cells["flash"] == "on",
        vendor=Vendor.AMD if cells["backend"] == "rocm" else Vendor.NVIDIA,
    )


def _model(name: str) -> ModelFacts:
    return _shapes().get(name) or built_in().find(name) or _unknown(name)


@cache
def _shapes() -> dict[str, ModelFacts]:
    return {row.facts.name: row.facts for row in read_rows((_FOLDER / "llamacpp_shapes.csv").read_text("utf-8"))}


def _unknown(name: str) -> ModelFacts:
    raise LookupError(name)
