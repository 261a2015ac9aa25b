"""The last hour in samples of a few seconds, for charts; what is older is forgotten."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from aimgpu.control.observation import Observation
from aimgpu.qos.slo.activity import RequestEntry

SAMPLE_SECONDS = 5.0
_MOST = 720
_TAIL = 0.95

Sample = dict[str, Any]


class History:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_MOST)
        self._last_number = 0
        self._waited: dict[str, float] = {}  # by instance: what its launches had waited at the gate

    @property
    def last_number(self) -> int:
        """Of the last request that was counted."""
        return self._last_number

    def add(
        self, at: float, seen: Observation, scores: Mapping[str, Any], requests: Sequence[RequestEntry], seconds: float
    ) -> Sample:
        """`requests`: that ended since the last sample, which was `seconds` ago."""
        if requests:
            self._last_number = requests[-1].number
        sample = {
            "at": at,
            "gpus": {device.id: _gpu(device.id, seen) for device in seen.devices},
            "models": _models(requests, max(seconds, 0.001)),
            "budget": _budgets(scores.get("models", {})),
            "gate": self._gate(seen, max(seconds, 0.001)),
        }
        self._samples.append(sample)
        return sample

    def samples(self) -> list[Sample]:
        return list(self._samples)

    def _gate(self, seen: Observation, seconds: float) -> dict[str, float]:
        """Instance -> share of the time that its launches waited for others; above 1 with several streams."""
        found = {}
        for name, use in seen.tenants.items():
            before = self._waited.get(name)
            if before is not None and use.waited_seconds > before:
                found[name] = (use.waited_seconds - before) / seconds
        self._waited = {name: use.waited_seconds for name, use in seen.tenants.items()}
        return found


def _gpu(device_id: str, seen: Observation) -> Mapping[str, Any]:
    usage = seen.usage.get(device_id)
    return {
        "granted": sum(grant.memory_bytes for one in seen.instances for grant in one.grants if grant.device_id == device_id),
        "measured": usage.used_bytes if usage else None,
        "busy": usage.utilization_percent if usage else None,
    }


def _budgets(models: Mapping[str, Any]) -> dict[str, float]:
    """What is left of each model's tightest promise."""
    found = {}
    for name, score in models.items():
        own = [target for one in score["classes"].values() if one["own"] for target in one["targets"]]
        left = [target["budget_left"] for target in (*score["targets"], *own) if target["budget_left"] is not None]
        if left:
            found[name] = min(left)
    return found


def _models(requests: Sequence[RequestEntry], seconds: float) -> dict[str, Mapping[str, Any]]:
    by_model: dict[str, list[RequestEntry]] = {}
    for entry in requests:
        by_model.setdefault(entry.record.model, []).append(entry)
    return {name: _rates(entries, seconds) for name, entries in by_model.items()}


def _rates(entries: Sequence[RequestEntry], seconds: float) -> Mapping[str, Any]:
    first = [one.record.first_byte_seconds for one in entries if one.record.streamed and one.record.first_byte_seconds]
    return {
        "rps": len(entries) / seconds,
        "tps": sum(one.record.output_tokens or 0 for one in entries) / seconds,
        "failed": sum(one.record.status >= 400 for one in entries),  # noqa: PLR2004 -- HTTP's own line
        "ttft": _tail(first),
        "latency": _tail([one.record.seconds for one in entries]),
    }


def _tail(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(len(values) * _TAIL))] if values else None
