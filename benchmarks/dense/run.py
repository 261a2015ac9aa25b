"""Thirty models on one simulated H200: how many requests have their first token within 2 s, by rule.

    python -m benchmarks.dense.run --traces FOLDER        all of it, into benchmarks/results/dense.json
    python -m benchmarks.dense.run --set tuned            what the constants of the policy were chosen on
    python -m benchmarks.dense.run --only bursty          parts whose name contains this; nothing is written

FOLDER has the files named in `traffic`. Without it only the synthetic parts run. The models and what they take
are in times.json. `TUNED` lists what constants were chosen on, `HELD_OUT` what is reported.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from aimgpu.placement.residency import MemoryRoom
from aimgpu.placement.residency_replay import ModelShape, Ours, ReplayOutcome, Rule, replay
from aimgpu.units import GIB, MIB
from benchmarks.dense.bound import least_late
from benchmarks.dense.rules import Arrivals, Clairvoyant, Farthest, KeepAlive, LlamaSwap, Ollama, lfu, lru
from benchmarks.dense.traffic import FILES, ZIPF, Speed, hash_of, make_traffic
from benchmarks.recording import write_result

TUNED = [("azure-code", 1), ("azure-code", 2), ("bursty", 1), ("bursty", 2), ("week", 1)]
HELD_OUT = [
    ("azure-conv", 11),
    ("mooncake-conv", 11),
    *(("mooncake-synthetic", seed) for seed in (11, 12)),
    *(("bursty", seed) for seed in (11, 12, 13)),
    ("week", 11),
]
TIMES = Path(__file__).with_name("times.json")
RULES: dict[str, Callable[[Arrivals], Rule]] = {
    "lru": lambda _: lru(),
    "lfu": lambda _: lfu(),
    "llama-swap": lambda _: LlamaSwap(),
    "ollama": lambda _: Ollama(3),
    "ollama, as many as fit": lambda _: Ollama(None),
    "keep-alive of 5 minutes": lambda _: KeepAlive(),
    "ours": lambda _: Ours(),
    "clairvoyant: farthest next request": Farthest,
    "clairvoyant: ours, knowing": Clairvoyant,
}
PEERS = [name for name in RULES if name != "ours" and not name.startswith("clairvoyant")]
KNOWING = [name for name in RULES if name.startswith("clairvoyant")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--set", choices=("tuned", "held-out"), default="held-out")
    parser.add_argument("--only")
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--host-gib", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    parts = [
        part
        for part in (TUNED if options.set == "tuned" else HELD_OUT)
        if (options.traces or part[0] not in FILES) and (options.only is None or options.only in part[0])
    ]
    work = [(name, seed, options.traces, options.host_gib, options.rules) for name, seed in parts]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for row in pool.map(_run_part, work):
            rows.append(row)
            print(_line(row), flush=True)
    if options.only is None and options.set == "held-out" and options.rules == list(RULES):
        hashes = {FILES[name]: hash_of(options.traces / FILES[name]) for name in FILES} if options.traces else {}
        figures = {
            "zipf": ZIPF,
            "host_gib": options.host_gib,
            "tuned_on": [f"{name} {seed}" for name, seed in TUNED],
            "sha256": hashes,
            "way_to_greedy_clairvoyant": {row["part"]: row["way_to_greedy"] for row in rows},
            "way_to_best_clairvoyant": {row["part"]: row["way"] for row in rows},
            "parts_at_half_way_or_better": sum(row["way"] is not None and row["way"] >= 0.5 for row in rows),  # noqa: PLR2004
            "parts": len(rows),
        }
        command = "python -m benchmarks.dense.run --traces FOLDER" if options.traces else None
        print(write_result("dense", figures, rows, command=command))


def _run_part(work: tuple[str, int, Path | None, int, Sequence[str]]) -> dict[str, Any]:
    name, seed, folder, host_gib, rules = work
    shapes, speeds, room = read_times(host_gib)
    requests = make_traffic(name, seed, speeds, folder)
    arrivals: dict[str, list[float]] = {}
    for request in requests:
        arrivals.setdefault(request.model, []).append(request.at)
    row: dict[str, Any] = {"part": f"{name} {seed}", "requests": len(requests), "rules": {}}
    for rule in rules:
        began = time.monotonic()
        row["rules"][rule] = _figures(replay(shapes, requests, room, RULES[rule](arrivals)))
        row["rules"][rule]["run_seconds"] = round(time.monotonic() - began, 1)
    row["least_late"] = round(least_late(shapes, requests, room) / len(requests), 5)
    row["way"] = _way(row["rules"], KNOWING)
    row["way_to_greedy"] = _way(row["rules"], KNOWING[:1])
    return row


def _way(rules: dict[str, dict[str, float]], clairvoyant: Sequence[str]) -> float | None:
    """How far ours is on the way from the best of the rules to the best of the clairvoyant ones; None: that is no better."""
    best = min((rules[name]["late"] for name in PEERS if name in rules), default=None)
    knowing = min((rules[name]["late"] for name in clairvoyant if name in rules), default=None)
    if best is None or knowing is None or "ours" not in rules or best <= knowing:
        return None
    return round((best - rules["ours"]["late"]) / (best - knowing), 3)


def read_times(host_gib: int) -> tuple[list[ModelShape], dict[str, Speed], MemoryRoom]:
    """The models in the order in which a stack would list them: the small ones first."""
    times = json.loads(TIMES.read_text())
    shapes = list(_read_shapes(times))
    speeds = {
        f"{size}-{number}": Speed(
            prefill_tokens_per_second=one["prefill_tokens_per_second"], seconds_per_token=one["seconds_per_token"]
        )
        for size, one in times["shapes"].items()
        for number in range(one["models"])
    }
    return shapes, speeds, MemoryRoom(gpu_bytes=times["gpu_bytes"], host_bytes=host_gib * GIB)


def _read_shapes(times: dict[str, Any]) -> Iterator[ModelShape]:
    for size, one in times["shapes"].items():
        for number in range(one["models"]):
            yield ModelShape(
                name=f"{size}-{number}",
                awake_bytes=one["awake_mib"] * MIB,
                asleep_bytes=one["asleep_mib"] * MIB,
                host_bytes=one["weights_mib"] * MIB,
                wake_seconds=one["wake_seconds"],
                reload_seconds=one["reload_seconds"],
                start_seconds=one["start_seconds"],
                sleep_seconds=one["sleep_seconds"],
            )


def _figures(outcome: ReplayOutcome) -> dict[str, float]:
    waits = sorted(outcome.waits)
    return {
        "late": round(1 - outcome.attainment, 5),
        "p50_seconds": round(waits[len(waits) // 2], 3),
        "p99_seconds": round(waits[int(len(waits) * 0.99)], 3),
        "longest_seconds": round(waits[-1], 1),
        "wakes": outcome.wakes,
        "starts": outcome.starts,
        "copied_seconds": round(outcome.copied_seconds),
    }


def _line(row: dict[str, Any]) -> str:
    rules = "  ".join(f"{name} {100 * one['late']:.2f}" for name, one in row["rules"].items())
    return f"{row['part']} ({row['requests']}): late % {rules}  least {100 * row['least_late']:.2f}  way {row['way']}"


if __name__ == "__main__":
    main()
