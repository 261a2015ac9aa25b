"""Who gets what when a GPU is offered more than it can do: our policy beside FIFO, strict priority and deadline-first.

Tight work (class high) is Azure's code trace, interactive work (medium) its conversation trace, batch work (low) the arXiv
lengths; models are chosen by a power law. Batch work is not streamed, so it may be recalled until it ends. Settings were chosen
on seeds 1 to 3; the seeds reported are others. `alone` is high work with the whole GPU to itself: what no policy can beat.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority
from benchmarks.qos.engine import work_seconds
from benchmarks.qos.replay import BASELINES, BOUNDS, POLICIES, Policy, Replay, Tally
from benchmarks.qos.trace import Mix, generate_lengths, make_arrivals, read_lengths
from benchmarks.recording import write_result

ALONE = "alone"
SWEPT = ("fifo", "aimgpu", "aimgpu+gate", ALONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a mix, a seed and a policy by name."""

    policy: str
    seed: int
    high: float
    medium: float
    overload: float
    models: int
    slots: int
    seconds: float
    traces: Path | None


def run_case(case: Case) -> dict[str, Any]:
    lengths = read_lengths(case.traces) if case.traces else generate_lengths(case.seed)
    load = {Priority.HIGH: case.high, Priority.MEDIUM: case.medium, Priority.LOW: case.overload - case.high - case.medium}
    mix = Mix(load=load, models=case.models, popularity=1.0, seconds=case.seconds, seed=case.seed)
    arrivals = make_arrivals(lengths, mix, lambda prompt, output: work_seconds(prompt, output, case.slots))
    if case.policy == ALONE:
        arrivals = [arrival for arrival in arrivals if arrival.priority is Priority.HIGH]
    replay = Replay(_find_policy(case.policy), case.models, case.slots)
    replay.run(arrivals, case.seconds)
    return {"seed": case.seed, "high_share": case.high} | summarise(case.policy, replay.tallies)


def summarise(policy: str, tallies: dict[Priority, Tally]) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy}
    for priority, tally in tallies.items():
        ordered = sorted(tally.ttfts)
        row[priority.value] = {
            "offered": tally.offered,
            "completed": tally.completed,
            "refused": tally.refused,
            "expired": tally.expired,
            "recalled": tally.recalled,
            "lost_slot_seconds": round(tally.lost_seconds, 1),
            "attainment": round(tally.kept / tally.offered, 4) if tally.offered else None,
            "output_tokens": tally.output_tokens,
            "ttft_p95_seconds": round(ordered[int(0.95 * (len(ordered) - 1))], 3) if ordered else None,
            "longest_wait_seconds": round(max(tally.waits, default=0.0), 2),
        }
    return row


def make_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the worst attainment, goodput and wait, so that no lucky draw counts; and all requests taken together."""
    fifo = {row["seed"]: row for row in rows if row["policy"] == "fifo"}
    figures = {}
    for name in dict.fromkeys(row["policy"] for row in rows):
        found = [row for row in rows if row["policy"] == name]
        goodput = [row["low"]["output_tokens"] / fifo[row["seed"]]["low"]["output_tokens"] for row in found]
        offered = sum(row["high"]["offered"] for row in found)
        kept = sum(row["high"]["attainment"] * row["high"]["offered"] for row in found)
        figures[name] = {
            "high_attainment": min(row["high"]["attainment"] for row in found),
            "high_attainment_all_seeds": round(kept / offered, 4),
            "high_judged": offered,
            "medium_attainment": min(row["medium"]["attainment"] or 0.0 for row in found),
            "batch_goodput_x_fifo": round(min(goodput), 3),
            "longest_wait_seconds": max(row["low"]["longest_wait_seconds"] for row in found),
            "recalled": sum(row["low"]["recalled"] + row["medium"]["recalled"] for row in found),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("AIMGPU_TRACES"), help="folder; generated when missing")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of virtual time")
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--high", type=float, default=0.04, help="offered tight work, as a part of the GPU")
    parser.add_argument("--medium", type=float, default=0.1)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(101, 111)))
    parser.add_argument("--sweep", type=float, nargs="*", default=[0.02, 0.03, 0.05, 0.06, 0.08, 0.12, 0.2], help="high shares")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    traces = Path(given.traces) if given.traces else None

    def cases(high: float, policies: Sequence[str], seeds: Sequence[int]) -> list[Case]:
        fixed = {"medium": given.medium, "overload": given.overload, "models": given.models, "slots": given.slots}
        return [
            Case(policy=policy, seed=seed, high=high, seconds=given.seconds, traces=traces, **fixed)
            for seed in seeds
            for policy in policies
        ]

    wanted = cases(given.high, [*(policy.name for policy in POLICIES), ALONE], given.seeds)
    for high in given.sweep:
        wanted += cases(high, SWEPT, given.seeds)
    rows = []
    with ProcessPoolExecutor(given.processes) as pool:
        for row in pool.map(run_case, wanted):
            rows.append(row)
            print(row, flush=True)
    figures = make_figures([row for row in rows if row["high_share"] == given.high])
    figures["sweep"] = {
        str(high): make_figures([row for row in rows if row["high_share"] == high and row["policy"] in SWEPT])
        for high in sorted({row["high_share"] for row in rows})
    }
    figures["trace"] = "azure-2023 and arxiv" if given.traces else "generated"
    figures["low_wait_bound_seconds"] = BOUNDS[Priority.LOW]
    given_folder = ["DIR" if traces is not None and argument == str(traces) else argument for argument in sys.argv[1:]]
    command = " ".join(("python -m benchmarks.qos.run", *given_folder))
    write_result("qos", figures, [row if row["high_share"] == given.high else shorten(row) for row in rows], command=command)
    for name, figure in figures.items():
        print(name, figure)


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the sweep: what the figures are made of."""
    kept = {"attainment", "offered", "output_tokens", "longest_wait_seconds", "recalled"}
    classes = {each.value: {key: value for key, value in row[each.value].items() if key in kept} for each in Priority}
    return {key: row[key] for key in ("seed", "high_share", "policy")} | classes


def _find_policy(name: str) -> Policy:
    return next((policy for policy in POLICIES if policy.name == name), BASELINES[0])


if __name__ == "__main__":
    main()
