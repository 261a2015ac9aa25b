"""Callers of the gateway, in processes of their own: `python3 -m benchmarks.engines_h200.load chat|batch|trace ...`.

`chat` streams one answer after the other with a pause between, `batch` keeps many whole answers in flight, `trace` starts
streams at given times. Each writes what it measured as JSON.
"""

import argparse
import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

WINDOW = 32  # tokens: what a promise of a time per token is judged over, beside whole requests
_PROMPT = "Explain in your own words why the sky is blue, and why it is red in the evening. " * 2


def main() -> None:
    """Runs one kind of load for so long, then writes its file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("chat", "batch", "trace"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--after", type=float, default=0.0, help="seconds that are not counted")
    parser.add_argument("--tail", type=float, default=0.0, help="chat: seconds at the end that are not counted")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--rate", type=float, default=2.0, help="trace: requests per second on average")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    load = {"chat": run_chat, "batch": run_batch, "trace": run_trace}[given.kind]
    given.out.write_text(json.dumps(load(given)))


def run_chat(given: argparse.Namespace) -> dict[str, Any]:
    """One caller."""
    began = time.monotonic()
    answers = []
    while time.monotonic() - began < given.after + given.seconds + given.tail:
        answer = stream_answer(given.url, given.model, given.tokens)
        if 0 <= answer["began"] - began - given.after < given.seconds:
            answers.append(answer)
        time.sleep(given.pause)
    return summarise(answers)


def run_trace(given: argparse.Namespace) -> dict[str, Any]:
    """Arrivals with exponential gaps, answers of varying length, all at once where they overlap."""
    source = random.Random(given.model)  # noqa: S311 - the same arrivals in every run
    began, answers, threads = time.monotonic(), [], []

    def ask(tokens: int) -> None:
        answers.append(stream_answer(given.url, given.model, tokens))

    while (passed := time.monotonic() - began) < given.after + given.seconds:
        time.sleep(source.expovariate(given.rate))
        tokens = max(8, round(source.lognormvariate(4.0, 0.7)))
        thread = threading.Thread(target=ask, args=(min(tokens, 256),), daemon=True)
        thread.start()
        threads.append(thread)
        if passed > given.after + given.seconds:
            break
    for thread in threads:
        thread.join(30)
    return summarise([one for one in answers if one["began"] - began >= given.after])


def run_batch(given: argparse.Namespace) -> dict[str, Any]:
    """Whole answers, so many at once; tokens are counted in the time that is looked at, spread evenly over each answer."""
    began = time.monotonic()
    first, last = began + given.after, began + given.after + given.seconds
    counts: list[float] = []
    ends: list[float] = []

    def work() -> None:
        while (start := time.monotonic()) < last:
            tokens, _ = whole_answer(given.url, given.model, given.tokens)
            end = time.monotonic()
            ends.append(round(end, 3))
            overlap = max(0.0, min(end, last) - max(start, first))
            counts.append(tokens * overlap / max(end - start, 1e-9))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(given.streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(given.after + given.seconds + 60)
    return {"tokens_per_second": sum(counts) / given.seconds, "answers": len(counts), "ends": sorted(ends)}


def stream_answer(url: str, model: str, tokens: int) -> dict[str, Any]:
    """When it began, and when each token came, in seconds after that."""
    began = time.monotonic()
    arrivals: list[float] = []
    error: str | None = None
    try:
        for line in _post(url, _body(model, tokens, stream=True)):
            if line.startswith(b"data: {") and b'"text"' in line:
                arrivals.append(time.monotonic() - began)  # noqa: PERF401 - each at its own time
    except (OSError, http.client.HTTPException, ValueError) as failure:
        error = str(failure)[:200]
    return {"began": began, "arrivals": arrivals, "error": error}


def whole_answer(url: str, model: str, tokens: int) -> tuple[int, str]:
    """Its output tokens and its text."""
    try:
        answer = json.loads(b"".join(_post(url, _body(model, tokens, stream=False))))
        return int(answer["usage"]["completion_tokens"]), str(answer["choices"][0]["text"])
    except (OSError, http.client.HTTPException, ValueError, KeyError) as failure:
        time.sleep(0.2)
        return 0, str(failure)[:200]


def unload(url: str, model: str) -> None:
    """Asks for it by Ollama's API."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        b"".join(_post(url, {"model": model, "keep_alive": 0}, "/api/generate"))


def summarise(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times per token by request and by window, to the first token, and of whole requests; seconds."""
    good = [answer for answer in answers if len(answer["arrivals"]) > 1]
    per_token = [(one["arrivals"][-1] - one["arrivals"][0]) / (len(one["arrivals"]) - 1) for one in good]
    windows = [pace for one in good for pace in _windows(one["arrivals"])]
    return {
        "requests": len(good),
        "errors": [one["error"] for one in answers if one["error"]][:3],
        "failed": sum(one["error"] is not None for one in answers),
        "tpot": sorted(per_token),
        "windows": sorted(windows),
        "ttft": sorted(one["arrivals"][0] for one in good),
        "request": sorted(one["arrivals"][-1] for one in good),
        "seen": [_outline(one) for one in good],
    }


def _outline(answer: dict[str, Any]) -> list[float]:
    """When it began (seconds), its first token, its pace, and its longest wait for a token (milliseconds) and which one."""
    arrivals = answer["arrivals"]
    longest, at = max((later - sooner, number) for number, (sooner, later) in enumerate(pairwise(arrivals), 1))
    pace = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    return [round(answer["began"], 3), *(round(one * 1000, 3) for one in (arrivals[0], pace, longest)), at]


def percentile(values: Sequence[float], part: float) -> float:
    """Of sorted values; nan where there are none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def average(values: Sequence[float]) -> float:
    """Nan where there are none."""
    return mean(values) if values else float("nan")


def _windows(arrivals: Sequence[float]) -> Iterator[float]:
    for start in range(0, len(arrivals) - WINDOW, WINDOW):
        yield (arrivals[start + WINDOW] - arrivals[start]) / WINDOW


def _body(model: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": _PROMPT,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "stream": stream,
    }


def _post(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:  # noqa: PLR2004
            raise ValueError(f"{response.status}: {response.read(300)!r}")
        while line := response.readline():
            yield line
    finally:
        connection.close()


if __name__ == "__main__":
    main()
