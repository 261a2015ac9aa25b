"""The scores of several gateways as one: each saw some of the requests."""

from collections.abc import Mapping, Sequence
from typing import Any

_SUMMED = ("recalls", "in_flight", "slots")
_WEIGHTED = ("attainment", "budget_left", "fast_burn", "slow_burn")


def merge_scores(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts are added; attainment and burn are means weighted by the requests that each gateway saw in its longest window.

    Percentiles cannot be added: the worse of two is shown, which is never better than the truth.
    """
    names = dict.fromkeys(name for report in reports for name in report["models"])
    models = {name: _merge_model([report["models"][name] for report in reports if name in report["models"]]) for name in names}
    pressure: dict[str, Any] = {}
    for report in reports:
        for device, value in report["pressure"].items():
            if device not in pressure or value["low_share"] < pressure[device]["low_share"]:
                pressure[device] = value
    return {"models": models, "pressure": pressure, "queue": _merge_queue([report["queue"] for report in reports])}


def _merge_model(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(parts[0])
    for key in _SUMMED:
        merged[key] = sum(part[key] for part in parts)
    merged["waiting"] = {priority: sum(part["waiting"][priority] for part in parts) for priority in parts[0]["waiting"]}
    waits = [part["longest_wait_seconds"] for part in parts if part.get("longest_wait_seconds") is not None]
    merged["longest_wait_seconds"] = max(waits, default=None)
    merged |= _merge_report(parts)
    classes = dict.fromkeys(name for part in parts for name in part["classes"])
    merged["classes"] = {}
    for name in classes:
        found = [part["classes"][name] for part in parts if name in part["classes"]]
        merged["classes"][name] = {**found[0], **_merge_report(found)}
    return merged


def _merge_report(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    weights = [_requests(part) for part in parts]
    by_name = {target["name"]: target for part in parts for target in part["targets"]}
    targets = []
    for name, target in by_name.items():
        seen = [
            (each, weight)
            for part, weight in zip(parts, weights, strict=True)
            for each in part["targets"]
            if each["name"] == name
        ]
        means = {key: _mean([(each[key], weight) for each, weight in seen]) for key in _WEIGHTED}
        targets.append({**target, **means, "judged": sum(each["judged"] for each, _ in seen)})
    lengths = dict.fromkeys(window["seconds"] for part in parts for window in part["windows"])
    windows = [_merge_windows([w for part in parts for w in part["windows"] if w["seconds"] == length]) for length in lengths]
    return {"targets": targets, "windows": windows}


def _requests(part: Mapping[str, Any]) -> int:
    return max((int(window["requests"]) for window in part["windows"]), default=0)


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    if not known:
        return None
    return sum(value * weight for value, weight in known) / total if total else known[0][0]


def _merge_windows(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(windows[0])
    merged["covered_seconds"] = max(window["covered_seconds"] for window in windows)
    for key in ("requests", "failures"):
        merged[key] = sum(window[key] for window in windows)
    for key in ("requests_per_second", "output_tokens_per_second"):
        known = [window[key] for window in windows if window[key] is not None]
        merged[key] = sum(known) if known else None
    percentiles: dict[str, dict[str, Any]] = {}
    for window in windows:
        for measure, values in window["percentiles"].items():
            into = percentiles.setdefault(measure, {})
            for name, value in values.items():
                into[name] = value if into.get(name) is None else max(into[name], value if value is not None else into[name])
    merged["percentiles"] = percentiles
    return merged


def _merge_queue(queues: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    running: dict[str, int] = {}
    for queue in queues:
        for device, count in queue["running"].items():
            running[device] = running.get(device, 0) + count
    limits = [queue["per_gpu"] for queue in queues]
    most = {priority: sum(queue["most_queued"][priority] for queue in queues) for priority in queues[0]["most_queued"]}
    per_gpu = None if None in limits else sum(limits)
    return {**queues[0], "per_gpu": per_gpu, "most_queued": most, "running": running}
