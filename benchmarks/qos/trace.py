"""Requests to replay: the Azure LLM 2023 traces and the arXiv summarisation lengths where their folder is given, or made up.

The folder holds AzureLLMInferenceTrace_code_2023.csv and AzureLLMInferenceTrace_conv_2023.csv (Azure/AzurePublicDataset on
GitHub, CC-BY 4.0) and vidur_arxiv_summarization_lengths.csv (microsoft/vidur on GitHub, MIT).
"""

import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from aimgpu.domain import Priority

LONGEST_PROMPT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    seconds: float
    model: str
    priority: Priority
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """One class's requests in order: seconds since the first (None: lengths alone), prompt tokens, output tokens."""

    rows: tuple[tuple[float | None, int, int], ...]


def read_lengths(folder: Path) -> dict[Priority, Lengths]:
    return {
        Priority.HIGH: Lengths(rows=tuple(_read_azure(folder / "AzureLLMInferenceTrace_code_2023.csv"))),
        Priority.MEDIUM: Lengths(rows=tuple(_read_azure(folder / "AzureLLMInferenceTrace_conv_2023.csv"))),
        Priority.LOW: Lengths(rows=tuple(_read_arxiv(folder / "vidur_arxiv_summarization_lengths.csv"))),
    }


def generate_lengths(seed: int) -> dict[Priority, Lengths]:
    """For users without the traces: log-normal lengths with the traces' medians and Poisson arrivals."""
    source = random.Random(seed)  # noqa: S311  # a workload, not a secret
    return {
        Priority.HIGH: _generate(source, 9000, prompt=1500, output=13),
        Priority.MEDIUM: _generate(source, 9000, prompt=1020, output=129),
        Priority.LOW: _generate(source, 9000, prompt=2730, output=165),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """`load` is the offered work of each class, as a part of what the GPU can do; they add up to the overload."""

    load: dict[Priority, float]
    models: int
    popularity: float  # exponent of the power law
    seconds: float
    seed: int


def make_arrivals(lengths: dict[Priority, Lengths], mix: Mix, work_of: Callable[[int, int], float]) -> list[Arrival]:
    """Each class begins at a random moment of its trace and is thinned until it offers the load that the mix names.

    Thinned, not stretched: a burst keeps its length and its height over the mean. Where a class is to offer more than its trace
    holds, the trace is laid over itself, shifted.
    """
    source = random.Random(mix.seed)  # noqa: S311  # a workload, not a secret
    weights = [1 / (rank + 1) ** mix.popularity for rank in range(mix.models)]
    arrivals = []
    for priority, load in mix.load.items():
        rows = lengths[priority].rows
        mean_work = sum(work_of(prompt, output) for _, prompt, output in rows) / len(rows)
        for moment, prompt, output in _draw(rows, load / mean_work, mix.seconds, source):
            [index] = source.choices(range(mix.models), weights)
            arrivals.append(
                Arrival(seconds=moment, model=f"m{index}", priority=priority, prompt_tokens=prompt, output_tokens=output)
            )
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


Rows = tuple[tuple[float | None, int, int], ...]


def _draw(rows: Rows, rate: float, seconds: float, source: random.Random) -> Iterator[tuple[float, int, int]]:
    """Moments and lengths at a mean rate; Poisson where no moments were recorded."""
    if rate <= 0:
        return
    recorded = rows[-1][0]
    if recorded is None:
        moment, index = 0.0, source.randrange(len(rows))
        while (moment := moment + source.expovariate(rate)) < seconds:
            yield moment, *rows[index % len(rows)][1:]
            index += 1
        return
    copies = math.ceil(rate * recorded / len(rows))
    part = rate * recorded / len(rows) / copies
    for _ in range(copies):
        for moment, prompt, output in _play(rows, source.uniform(0, recorded), seconds):
            if source.random() < part:
                yield moment, prompt, output


def _play(rows: Rows, begin: float, seconds: float) -> Iterator[tuple[float, int, int]]:
    """The recorded requests from a moment on, over again from the start where the recording ends."""
    base = -begin
    while base < seconds:
        for at, prompt, output in rows:
            moment = base + (at or 0.0)
            if 0 <= moment < seconds:
                yield moment, prompt, output
        base += rows[-1][0] or seconds


def _read_azure(path: Path) -> Iterator[tuple[float | None, int, int]]:
    first: datetime | None = None
    with path.open() as file:
        for row in csv.DictReader(file):
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or moment
            tokens = min(int(row["ContextTokens"]), LONGEST_PROMPT), max(int(row["GeneratedTokens"]), 1)
            yield (moment - first).total_seconds(), *tokens


def _read_arxiv(path: Path) -> Iterator[tuple[float | None, int, int]]:
    with path.open() as file:
        for row in csv.DictReader(file):
            yield None, min(int(row["num_prefill_tokens"]), LONGEST_PROMPT), max(int(row["num_decode_tokens"]), 1)


def _generate(source: random.Random, count: int, *, prompt: int, output: int) -> Lengths:
    def length(median: int) -> int:
        return max(1, min(LONGEST_PROMPT, round(source.lognormvariate(0, 0.8) * median)))

    moment = 0.0
    rows = []
    for _ in range(count):
        moment += source.expovariate(1.0)
        rows.append((moment, length(prompt), length(output)))
    return Lengths(rows=tuple(rows))
