"""The gate's rows beside a server that is alone on the card, in turns: every row has processes of its own, as in production.

A card on which an idle second process is alive is not the same as an empty one (paired.py measures on the former), so
the clocks are read along in every row, and further rows measure a server beside a hog that does nothing. What is compared was
fixed before the first run: the requests of all rows of a kind together, over those of all rows alone (without the library).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.isolation_h200.bench import Bench, Member
from benchmarks.isolation_h200.clocks import ClockSampler
from benchmarks.isolation_h200.paired import BARE, HOGS, SIGNAL, SILENT, compare_hogs, compare_latency, pick, quantile
from benchmarks.isolation_h200.stage import Stage, Turn, Window

SECONDS = 4.0
SEED = 1
ALONE, IDLE = "alone", "beside an idle hog"
ROWS = (
    *((ALONE, 0, 0), ("signal", 1, 0)),
    *((ALONE, 0, 1), ("signal", 2, 1)),
    *((ALONE, 0, 2), ("signal", 2, 2)),
    *((ALONE, 0, 3), ("signal", 1, 3)),
    (ALONE, 0, 4),
)
MORE_ROWS = (
    *((ALONE, 0, 0), ("adaptive", 1, 0), ("adaptive", 2, 0)),
    *((ALONE, 0, 1), ("adaptive", 2, 1), ("adaptive", 1, 1)),
    *((ALONE, 0, 2), (IDLE, 0, 2), (IDLE, 0, 3)),
)
STEPS = 20  # of a request
PAUSED_CALLS_SECONDS = 6.0


def measure_alternating(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    """With signals, one and two hogs."""
    measure_rows(bench, stage, figures, ROWS)
    figures["lc_p50_x"] = figures["gate_signal_1"]["p50_x"]
    figures["lc_p95_x"] = figures["gate_signal_1"]["p95_x"]
    figures["lc_p95_x_two_hogs"] = figures["gate_signal_2"]["p95_x"]


def measure_more_alternating(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    """Without signals, and beside a hog that does nothing; and the library's calls with pauses between requests."""
    measure_rows(bench, stage, figures, MORE_ROWS)
    measure_paused_calls(stage, figures)


def measure_rows(bench: Bench, stage: Stage, figures: dict[str, Any], rows: Sequence[tuple[str, int, int]]) -> None:
    """Figures and file are written after every row: the machine may be taken away before the last."""
    windows: list[Window] = []
    for kind, count, group in rows:
        windows.append(measure_row(bench, stage, kind, count, group))
        for setup in {window.setup for window in windows} - {ALONE}:
            beside = pick(windows, setup)
            got = compare_latency(beside, pick(windows, ALONE))
            name = "beside_idle" if setup == IDLE else f"gate_{setup.replace(' ', '_')}"
            figures[name] = got if setup == IDLE else got | compare_hogs(beside, figures)
        bench.save()


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
