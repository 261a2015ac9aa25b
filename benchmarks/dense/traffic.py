"""Arrivals for thirty models: public traces dealt to them by a seeded Zipf rule, a bursty mix, a week with days and nights.

Dealing: the models are shuffled with the seed; each request goes to the k-th of them with a probability in proportion to 1/k,
drawn with the same seed, one after the other.

The traces: AzureLLMInferenceTrace_{code,conv}_2023.csv of github.com/Azure/AzurePublicDataset (data/, CC-BY 4.0), and
mooncake_{conversation,synthetic}_trace.jsonl of github.com/kvcache-ai/Mooncake (FAST25-release/traces/ as
conversation_trace.jsonl and synthetic_trace.jsonl, Apache-2.0).
"""

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from aimgpu.placement.residency_replay import Request

FILES = {
    "azure-code": "AzureLLMInferenceTrace_code_2023.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "mooncake-conv": "mooncake_conversation_trace.jsonl",
    "mooncake-synthetic": "mooncake_synthetic_trace.jsonl",
}
LONGEST_PROMPT = 8192  # what the models take
ZIPF = 1.0
_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one model, alone on the GPU."""

    prefill_tokens_per_second: float
    seconds_per_token: float

    def request(self, at: float, model: str, prompt: int, output: int) -> Request:
        return Request(
            at=at,
            model=model,
            prefill_seconds=min(prompt, LONGEST_PROMPT) / self.prefill_tokens_per_second,
            decode_seconds=output * self.seconds_per_token,
        )


def hash_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def make_traffic(name: str, seed: int, speeds: dict[str, Speed], folder: Path | None) -> list[Request]:
    """By the name of a trace in FILES, `bursty` or `week`."""
    source = random.Random(seed)  # noqa: S311 - a workload, not a secret
    if name in FILES:
        if folder is None:
            message = f"{name} needs --traces FOLDER"
            raise ValueError(message)
        return _deal(read_trace(folder / FILES[name]), speeds, source)
    return sorted({"bursty": _bursty, "week": _week}[name](speeds, source), key=lambda request: request.at)


def read_trace(path: Path) -> list[tuple[float, int, int]]:
    """Seconds since the first request, prompt tokens, output tokens."""
    rows = list(_read_azure(path) if path.suffix == ".csv" else _read_mooncake(path))
    return sorted((at - rows[0][0], prompt, output) for at, prompt, output in rows)


def _read_azure(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1)


def _read_mooncake(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            yield row["timestamp"] / 1000, row["input_length"], max(row["output_length"], 1)


def _deal(rows: Sequence[tuple[float, int, int]], speeds: dict[str, Speed], source: random.Random) -> list[Request]:
    names, weights = _shuffled(speeds, source)
    dealt = source.choices(names, weights, k=len(rows))
    return [speeds[name].request(at, name, prompt, output) for name, (at, prompt, output) in zip(dealt, rows, strict=True)]


def _shuffled(speeds: dict[str, Speed], source: random.Random) -> tuple[list[str], list[float]]:
    names = sorted(speeds)
    source.shuffle(names)
    return names, [1 / rank**ZIPF for rank in range(1, len(names) + 1)]


def _bursty(speeds: dict[str, Speed], source: random.Random) -> Iterator[Request]:
    """Four hours: bursts of 5 to 60 requests a second or three apart, then a pause; how often follows the same Zipf rule."""
    names, weights = _shuffled(speeds, source)
    for name, weight in zip(names, weights, strict=True):
        at = source.expovariate(weight / 90)
        while at < 4 * 3600:
            for _ in range(source.randint(5, 60)):
                yield speeds[name].request(at, name, *_lengths(source))
                at += source.lognormvariate(0.3, 0.8)
            at += source.expovariate(weight / 90)


def _week(speeds: dict[str, Speed], source: random.Random) -> Iterator[Request]:
    """Seven days: each model has an hour at which its day begins, nine hours of work in sessions, and little else."""
    names, weights = _shuffled(speeds, source)
    for name, weight in zip(names, weights, strict=True):
        begins = source.choice((0, 3, 7, 8, 8, 9, 9, 12, 15, 18, 22)) * 3600 + source.uniform(0, 900)
        at = 0.0
        while at < 7 * _DAY:
            works = (at - begins) % _DAY < 9 * 3600
            per_second = (0.002 + 0.01 * weight) * (1.0 if works else 0.02)
            step = source.expovariate(per_second)
            changes = (begins - at) % _DAY or _DAY if not works else (begins + 9 * 3600 - at) % _DAY or _DAY
            if step > changes:  # the rate is another from then on
                at += changes + 1e-6
                continue
            at += step
            for _ in range(1 + int(source.expovariate(0.5))):  # a session of a few turns
                if at < 7 * _DAY:
                    yield speeds[name].request(at, name, *_lengths(source))
                at += source.lognormvariate(2.0, 0.8)


def _lengths(source: random.Random) -> tuple[int, int]:
    return round(math.exp(source.gauss(6.9, 0.9))), max(1, round(math.exp(source.gauss(4.8, 0.8))))
