"""What was measured on a GPU beside what the sizing says of it: rows of `run.py`, and their figures."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from aimgpu.domain import Vendor
from aimgpu.sizing import ModelFacts, SizingRequest, built_in, estimate_footprint

_ALLOCATOR_TERMS = ("weights", "kv_cache", "activations", "engine")  # torch does not see the device context

Row = dict[str, Any]


def estimated(row: Row, version: str, gpu: str) -> Row:
    """The row with the estimate of today's formulas."""
    facts = built_in().find(row["model"])
    if facts is None or "measured_bytes" not in row:
        return row
    footprint = estimate_footprint(_request(row, facts, version, gpu))
    total = sum(term.memory_bytes for term in footprint.terms if term.name in _ALLOCATOR_TERMS)
    return row | {
        "parameters_catalogue": facts.parameters,
        "estimated_bytes": total,
        "error_percent": round(100 * (total / row["measured_bytes"] - 1), 2) + 0.0,
        "terms": {term.name: term.memory_bytes for term in footprint.terms},
    }


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """New rows in the place of old ones of the same case, and of a model that was skipped."""
    measured = list(new)
    again = {row["model"] for row in measured}
    kept = [row for row in old if "skipped" not in row or row["model"] not in again]
    return list({_case(row): row for row in (*kept, *measured)}.values())


def figures_of(rows: Iterable[Row], context_bytes: int | None) -> Row:
    errors = [float(row["error_percent"]) for row in rows if "error_percent" in row]
    figures: Row = {"points": len(errors), "context_bytes": context_bytes}
    if errors:
        figures |= {
            "mape": round(statistics.fmean(map(abs, errors)), 2),
            "worst_under": -min(0.0, *errors) + 0.0,
            "worst_over": max(0.0, *errors),
        }
    return figures


def _case(row: Row) -> tuple[object, ...]:
    return tuple(row.get(name) for name in ("model", "prompt", "answer", "batch"))


def _request(row: Row, facts: ModelFacts, version: str, gpu: str) -> SizingRequest:
    return SizingRequest(
        model=_as_built(facts, row.get("window")),
        engine="transformers",
        engine_version=version,
        precision="bf16",
        context_tokens=row["prompt"] + row["answer"],
        prompt_tokens=row["prompt"],
        concurrency=row["batch"],
        vendor=Vendor.NVIDIA if "NVIDIA" in gpu else Vendor.AMD,
        gpu=gpu.removeprefix("NVIDIA ").removeprefix("AMD Instinct ").split(",")[0],
    )


def _as_built(facts: ModelFacts, window: int | None) -> ModelFacts:
    """A window that the family's default gave the model, though the catalogue's has none, was in every layer."""
    shape = facts.architecture
    if shape is None or not window or shape.sliding_window:
        return facts
    return replace(facts, architecture=replace(shape, sliding_window=window, sliding_layers=shape.layers))
