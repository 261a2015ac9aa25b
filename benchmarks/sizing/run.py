"""How near the sizing is to measured memory, beside the formulas of other tools on the same points, and how fast it is.

    python -m benchmarks.sizing.run POINTS.csv        (or AIMGPU_MEMORY_POINTS=POINTS.csv)

The points are not part of the project. One measured run a line, with the columns id, engine, engine_version, gpu, model, quant,
tp, input_tokens, output_tokens, max_model_len, max_num_seqs, max_batched_tokens, weights_gib, kv_gib, activation_gib,
total_gib, note. Published sources of such runs: the speed benchmarks in the Qwen2.5 and Qwen3 documentation (peak of torch's
allocator), start-up logs of vLLM and llama.cpp. The buffers of llama.cpp in this folder are part of the project, and are
set beside the estimate in every run.
"""

import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from aimgpu.domain import Footprint
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from benchmarks.recording import write_result
from benchmarks.sizing.llamacpp import buffer_figures, buffer_rows, read_buffer_points
from benchmarks.sizing.peers import PEERS
from benchmarks.sizing.points import GIB, Point, read_point

_ALLOCATOR_TERMS = ("weights", "kv_cache", "activations", "engine")  # torch does not see the device context
_TERM_OF = {"weights": "weights", "kv": "kv_cache", "activation": "activations"}
_SIZINGS = 1000
_HIDDEN_COPIES = 4  # what `aimgpu.sizing.engines.transformers` assumes; the held-out check refits it

_LEAST_LOGS = 3
_GROUPS: dict[str, Callable[[Point], str]] = {
    "left_out": lambda point: point.model.name,
    "family_left_out": lambda point: point.model.architecture.family if point.model.architecture else "",
    "precision_left_out": lambda point: point.quant,
}

Row = dict[str, object]


def main() -> int:
    with _points_file().open(encoding="utf-8", newline="") as file:
        read = [(cells["id"], read_point(cells)) for cells in csv.DictReader(file)]
    points = [point for _, point in read if isinstance(point, Point)]
    skipped: list[Row] = [{"id": name, "skipped": why} for name, why in read if isinstance(why, str)]
    rows = [_row(point) for point in points]
    buffers = read_buffer_points()
    rows += buffer_rows(buffers)
    figures = _figures(points) | _held_out(points) | buffer_figures(buffers) | {"sizings_per_second": _sizings_per_second()}
    figures["llamacpp_worst_mib"] = max(figures["llamacpp_worst_mib"], figures.get("llamacpp_given_worst_mib", 0))
    _print(rows, skipped, figures)
    write_result(
        "sizing", figures, [*rows, *skipped], packages=("aimgpu",), command="python -m benchmarks.sizing.run POINTS.csv"
    )
    return 0


def _points_file() -> Path:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("AIMGPU_MEMORY_POINTS")
    if not given:
        sys.exit("give the CSV of measured points: python -m benchmarks.sizing.run POINTS.csv")
    return Path(given)


def _row(point: Point) -> Row:
    footprint = estimate_footprint(point.request)
    row: Row = {"id": point.id, "engine": point.engine, "model": point.model.name, "quant": point.quant}
    for name, measured in point.measured.items():
        estimated = _estimated_gib(point, footprint, name)
        row[f"{name}_error_percent"] = round(100 * (estimated - measured) / measured, 2)
    return row


def _estimated_gib(point: Point, footprint: Footprint, name: str) -> float:
    if name == "total":
        names = _ALLOCATOR_TERMS if point.engine == "transformers" else tuple(_TERM_OF.values())
        return point.gpus * _sum(footprint, names) / GIB
    return _sum(footprint, (_TERM_OF[name],)) / GIB


def _sum(footprint: Footprint, names: Iterable[str]) -> int:
    return sum(term.memory_bytes for term in footprint.terms if term.name in names)


def _errors(points: list[Point], name: str) -> list[float]:
    """Signed, as parts of what was measured."""
    usable = [point for point in points if name in point.measured]
    return [_estimated_gib(p, estimate_footprint(p.request), name) / p.measured[name] - 1 for p in usable]


def _figures(points: list[Point]) -> dict[str, float]:
    figures: dict[str, float] = {}
    transformers = [point for point in points if point.engine == "transformers"]
    if transformers:
        errors = _errors(transformers, "total")
        figures |= _summary("transformers", errors)
        for peer, formula in PEERS.items():
            figures |= _summary(f"peer.{peer}", [formula(p) / GIB / p.measured["total"] - 1 for p in transformers])
    vllm = [point for point in points if point.engine == "vllm" and not _sees(point)]
    if vllm:
        non_kv = [_non_kv_error(point) for point in vllm if {"weights", "activation"} <= point.measured.keys()]
        figures["vllm_worst"] = _percent(max(map(abs, non_kv)))
        figures["vllm_activation_worst"] = _percent(max(map(abs, _errors(vllm, "activation"))))
        figures["vllm_kv_per_token_worst"] = _percent(max(abs(_kv_per_token_error(p)) for p in vllm if p.kv_bytes_per_token))
        figures["vllm_weights_worst"] = _percent(max(map(abs, _errors(vllm, "weights"))))
    llamacpp = [point for point in points if point.engine in ("llamacpp", "ollama")]
    if llamacpp:
        figures["llamacpp_given_worst_mib"] = max(map(_buffers_off_mib, llamacpp))
    return figures


def _summary(name: str, errors: list[float]) -> dict[str, float]:
    return {
        f"{name}_mape": _percent(statistics.fmean(map(abs, errors))),
        f"{name}_worst_under": _percent(-min(*errors, 0)),
        f"{name}_worst_over": _percent(max(*errors, 0)),
    }


def _percent(part: float) -> float:
    return round(100 * part, 2)


def _sees(point: Point) -> bool:
    return point.model.architecture is not None and point.model.architecture.encoder_parameters > 0


def _non_kv_error(point: Point) -> float:
    estimated = _sum(estimate_footprint(point.request), ("weights", "activations")) / GIB
    return estimated / (point.measured["weights"] + point.measured["activation"]) - 1


def _kv_per_token_error(point: Point) -> float:
    """The cache of two contexts apart by many blocks gives the bytes of one token."""
    many = 1 << 20
    short, long = (
        replace(point.request, context_tokens=tokens, concurrency=1, batched_tokens=16) for tokens in (16, 16 + many)
    )
    grown = _sum(estimate_footprint(long), ("kv_cache",)) - _sum(estimate_footprint(short), ("kv_cache",))
    return grown / many / (point.kv_bytes_per_token or 1) - 1


def _buffers_off_mib(point: Point) -> float:
    """Model, cache and compute buffers together, those that the log told."""
    footprint = estimate_footprint(point.request)
    names = [name for name in point.measured if name != "total"] or ["total"]
    off = sum(_estimated_gib(point, footprint, name) - point.measured[name] for name in names)
    return round(abs(off) * 1024, 1)


def _held_out(points: list[Point]) -> dict[str, float]:
    """Leave a model, a family or a precision out: refit what was not read off a config on the others, and predict it."""
    transformers = [point for point in points if point.engine == "transformers"]
    figures: dict[str, float] = {}
    for name, key in _GROUPS.items():
        figures |= _left_out(name, transformers, key)
    return figures | _sampler_left_out([point for point in points if point.engine == "vllm" and not _sees(point)])


def _left_out(name: str, points: list[Point], key: Callable[[Point], str]) -> dict[str, float]:
    errors: list[float] = []
    fitted: list[float] = []
    for group in sorted({key(point) for point in points}):
        others = [point for point in points if key(point) != group]
        if not others:
            return {}
        copies = min((tenth / 10 for tenth in range(20, 61)), key=lambda copies: _mape(others, copies))
        fitted.append(copies)
        errors += [_error_with(point, copies) for point in points if key(point) == group]
    if not errors:
        return {}
    return _summary(f"transformers_{name}", errors) | {f"{name}_copies_least": min(fitted), f"{name}_copies_most": max(fitted)}


def _sampler_left_out(points: list[Point]) -> dict[str, float]:
    """Copies of the logits in vLLM, from all logs but one, and the activations of that one by them."""
    copies = [one for one in map(_sampler_copies, points) if one is not None]
    if len(copies) < _LEAST_LOGS:
        return {}
    errors = []
    for index, own in enumerate(copies):
        others = statistics.median(copies[:index] + copies[index + 1 :])
        errors.append(others / own - 1)
    return {
        "vllm_sampler_logs": len(copies),
        "vllm_sampler_left_out_worst": _percent(max(map(abs, errors))),
        "vllm_sampler_copies_least": round(min(copies), 2),
        "vllm_sampler_copies_most": round(max(copies), 2),
    }


def _sampler_copies(point: Point) -> float | None:
    """How many fp32 copies of the logits the measured activations are, where the sampler is the widest moment."""
    term = next(term for term in estimate_footprint(point.request).terms if term.name == "activations")
    shape = point.model.architecture
    is_widest = term.memory_bytes == term.inputs["sampler_bytes"]
    if shape is None or "activation" not in point.measured or not is_widest:
        return None
    return point.measured["activation"] * GIB / (point.request.concurrency * shape.vocab_size * 4)


def _mape(points: list[Point], copies: float) -> float:
    return statistics.fmean(abs(_error_with(point, copies)) for point in points)


def _error_with(point: Point, copies: float) -> float:
    shape, request = point.model.architecture, point.request
    hidden = shape.hidden_size if shape else 0
    prompt = request.prompt_tokens or request.context
    shift = (copies - _HIDDEN_COPIES) * prompt * hidden * 2 * point.gpus / GIB
    return (_estimated_gib(point, estimate_footprint(request), "total") + shift) / point.measured["total"] - 1


def _sizings_per_second() -> float:
    rows = built_in().rows
    start = time.perf_counter()
    for index in range(_SIZINGS):
        model = rows[index % len(rows)].facts
        estimate_footprint(SizingRequest(model=model, context_tokens=1024 + index, concurrency=1 + index % 8, precision="int4"))
    return round(_SIZINGS / (time.perf_counter() - start))


def _print(rows: list[Row], skipped: list[Row], figures: dict[str, float]) -> None:
    for row in rows:
        errors = {key.removesuffix("_error_percent"): value for key, value in row.items() if key.endswith("_error_percent")}
        print(f"{row['id']:6} {row['engine']:12} {row['model']!s:44} {row['quant']!s:6} {row.get('off_mib', errors)}")
    for row in skipped:
        print(f"{row['id']:6} skipped: {row['skipped']}")
    for name, value in figures.items():
        print(f"{name:34} {value:10}")


if __name__ == "__main__":
    sys.exit(main())
