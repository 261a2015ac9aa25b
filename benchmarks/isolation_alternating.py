"""The gate's rows beside a server that is alone on the card, in turns: every row has processes of its own, as in production.

A card on which an idle second process is alive is not the same as an empty one (isolation_paired.py measures on the former), so
the clocks are read along in every row, and two rows measure a server beside a hog that does nothing. What is compared was fixed
before the first run: the requests of all rows of a kind together, over those of all rows alone (without the library).
"""

from dataclasses import replace
from typing import Any

from benchmarks.isolation_bench import Bench, Member
from benchmarks.isolation_clocks import ClockSampler
from benchmarks.isolation_paired import BARE, HOGS, SIGNAL, SILENT, compare_hogs, compare_latency, pick, quantile
from benchmarks.isolation_stage import Stage, Turn, Window

SECONDS = 4.5
SEED = 1
ALONE, IDLE = "alone", "beside an idle hog"
ROWS = (
    *((ALONE, 0, 0), ("signal", 1, 0), ("adaptive", 1, 0)),
    *((ALONE, 0, 1), ("signal", 2, 1), ("adaptive", 2, 1)),
    *((ALONE, 0, 2), ("signal", 2, 2), ("adaptive", 2, 2)),
    *((ALONE, 0, 3), ("signal", 1, 3), ("adaptive", 1, 3)),
    *((ALONE, 0, 4), (IDLE, 0, 4), (IDLE, 0, 5)),
)
STEPS = 20  # of a request
PAUSED_CALLS_SECONDS = 6.0


def measure_alternating(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    windows = [measure_row(bench, stage, *row) for row in ROWS]
    alone = pick(windows, ALONE)
    for kind in ("signal", "adaptive"):
        for count in (1, 2):
            beside = pick(windows, f"{kind} {count}")
            figures[f"gate_{kind}_{count}"] = compare_latency(beside, alone) | compare_hogs(beside, figures)
    figures["beside_idle"] = compare_latency(pick(windows, IDLE), alone)
    figures["lc_p50_x"] = figures["gate_signal_1"]["p50_x"]
    figures["lc_p95_x"] = figures["gate_signal_1"]["p95_x"]
    figures["lc_p95_x_two_hogs"] = figures["gate_signal_2"]["p95_x"]
    measure_paused_calls(stage, figures)


def measure_row(bench: Bench, stage: Stage, kind: str, count: int, group: int) -> Window:
    server: Member = {ALONE: BARE[0], "adaptive": SILENT[0]}.get(kind, SIGNAL[0])
    hogs = HOGS[: 1 if kind == IDLE else count]
    setup = f"{kind} {count}" if count else kind
    turn = Turn(
        setup=setup, round=group, server=server.name, seconds=SECONDS, hogs=tuple(hog.name for hog in hogs[:count]), seed=SEED
    )
    stage.start({f"row{len(bench.rows)}": [server, *hogs]})
    try:
        with ClockSampler() as sampler:
            window = stage.serve(turn)
    finally:
        stage.close()
    row: dict[str, Any] = {
        "row": f"{setup}, group {group}",
        "seconds": round(window.seconds, 3),
        "request_ms": " ".join(f"{1000 * request:.3f}" for request in window.requests),
        "step_ms_by_index": " ".join(f"{1000 * quantile(window.steps[at::STEPS], 0.5):.3f}" for at in range(STEPS)),
        "hog_tflops": round(window.hog_units / 1e12, 1),
        **window.counted,
        "clocks": sampler.describe(window.busy),
    }
    bench.rows.append(row)
    print(f"{row['row']}: p50 {1000 * quantile(window.requests, 0.5):.2f} ms, {row['clocks']['in_requests']}", flush=True)
    return window


def measure_paused_calls(stage: Stage, figures: dict[str, Any]) -> None:
    """Requests with pauses, each by the library's functions or the driver's own, within one process."""
    server = replace(SIGNAL[0], signal=False)
    stage.start({"calls": [server]})
    try:
        figures["paused_calls"] = got = stage.order(server.name, f"CALLS {PAUSED_CALLS_SECONDS} paused", PAUSED_CALLS_SECONDS)
    finally:
        stage.close()
    if "step_ms" in got:
        figures["overhead_paused_calls_x"] = round(got["step_ms"]["hooked"] / got["step_ms"]["real"], 5)
