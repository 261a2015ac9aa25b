"""The main rows of the isolation benchmark, in windows of a few seconds that take turns.

What is compared was fixed before the first run. A server beside hogs is compared with the same process alone in the same round
(the library loaded in both); quantiles are of the requests of all rounds together, and every round's own ratio is given as
least, median and most. What the library costs is a comparison of its own: processes without it and with it in turns, and
calls.py within one process.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from aimgpu.domain import Priority
from aimgpu.units import GIB
from benchmarks.isolation_h200.bench import Bench, Member
from benchmarks.isolation_h200.stage import Stage, Turn, Window

COST_ROUNDS, COST_SECONDS, COST_COPIES = 3, 1.0, 4
GEMM_ROUNDS, GEMM_SECONDS = 6, 0.8
GATE_ROUNDS, GATE_SECONDS, GATE_COPIES = 6, 2.3, 2
LONG_ROUNDS, LONG_SECONDS, LONG_ALONE_SECONDS = 2, 6.0, 2.0
CALLS_SECONDS = 4.0
USUAL_TFLOPS = 660.0  # of the hog alone, where that was not measured
LONG_SIZES = (19000, 30000, 40000)
CAP = 20 * GIB

SERVER = Member(name="server", kind="decode", cap_bytes=2 * CAP)
HOG = Member(name="hog", kind="gemm", priority=Priority.LOW, cap_bytes=CAP)
BARE = [replace(SERVER, name=f"bare{i}") for i in range(COST_COPIES)]
SIGNAL = [
    replace(SERVER, name=f"signal{i}", process_of="signal", priority=Priority.HIGH, signal=True) for i in range(GATE_COPIES)
]
SILENT = [replace(SERVER, name=f"silent{i}", process_of="silent", priority=Priority.HIGH) for i in range(GATE_COPIES)]
HOGS = [replace(HOG, name=f"hog{i}", seed=10 + i) for i in range(2)]
LONG_HOGS = {size: replace(HOG, name=f"long{size}", size=size) for size in LONG_SIZES}
SOLO_HOGS = {False: replace(HOG, name="gemm-bare", priority=None), True: replace(HOG, name="gemm-library")}


def measure_cost(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    """What the library costs a server and a hog that are alone."""
    stage.start({"main": [*BARE, *SIGNAL, *SILENT, *HOGS], "solo": list(SOLO_HOGS.values())})
    loaded = [*SIGNAL, *SILENT]
    windows: list[Window] = []
    for number in range(COST_ROUNDS):
        pairs = [member for pair in zip(BARE, loaded, strict=True) for member in pair]
        for member in pairs if number % 2 == 0 else reversed(pairs):
            setup = "bare" if member.priority is None else "library"
            turn = Turn(setup=setup, round=number, server=member.name, seconds=COST_SECONDS, signal=False)
            windows.append(serve(bench, stage, turn))
    figures["cost"] = compare_cost(windows)
    figures["overhead_step_x"] = figures["cost"]["step_x"]
    figures["calls"] = {
        name: stage.order(name, f"CALLS {CALLS_SECONDS}", CALLS_SECONDS) for name in (SILENT[0].name, BARE[0].name)
    }
    if "step_ms" in (calls := figures["calls"][SILENT[0].name]):
        figures["overhead_calls_x"] = round(calls["step_ms"]["hooked"] / calls["step_ms"]["real"], 5)
    measure_hog_cost(bench, stage, figures)


def measure_hog_cost(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(GEMM_ROUNDS):
        for loaded in (False, True) if turn % 2 == 0 else (True, False):
            rates[loaded].append(stage.work(SOLO_HOGS[loaded].name, GEMM_SECONDS))
    bench.rows.append(
        {"row": "hog alone, TFLOP/s", **{str(loaded): [round(x / 1e12, 1) for x in got] for loaded, got in rates.items()}}
    )
    figures["solo_tflops"] = round(statistics.median(rates[False]) / 1e12, 1)
    figures["overhead_gemm_x"] = round(statistics.median(rates[False]) / statistics.median(rates[True]), 4)
    figures["overhead_gemm_rounds"] = spread(bare / loaded for bare, loaded in zip(rates[False], rates[True], strict=True))


def measure_gate(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    """One and two hogs beside a server, with signals and without."""
    stage.start({"main": [*SIGNAL, *SILENT, *HOGS]})
    windows: list[Window] = []
    for number in range(GATE_ROUNDS):
        for servers in (SIGNAL, SILENT):
            member, counts = servers[number % GATE_COPIES], (0, 1, 2) if number % 2 == 0 else (2, 1, 0)
            for count in counts:
                hogs = tuple(hog.name for hog in HOGS[:count])
                setup = f"{member.tenant} {count}"
                turn = Turn(setup=setup, round=number, server=member.name, seconds=GATE_SECONDS, hogs=hogs)
                windows.append(serve(bench, stage, turn))
    for tenant, name in (("signal", "signal"), ("silent", "adaptive")):
        for count in (1, 2):
            beside, alone = (pick(windows, f"{tenant} {n}") for n in (count, 0))
            figures[f"gate_{name}_{count}"] = compare_latency(beside, alone) | compare_hogs(beside, figures)
    figures["lc_p50_x"] = figures["gate_signal_1"]["p50_x"]
    figures["lc_p95_x"] = figures["gate_signal_1"]["p95_x"]
    figures["lc_p95_x_two_hogs"] = figures["gate_signal_2"]["p95_x"]
    figures["be_share_of_idle"] = figures["gate_signal_1"].get("hog_share_of_idle")


def measure_long(bench: Bench, stage: Stage, figures: dict[str, Any]) -> None:
    """Best-effort launches of some 20, 80 and 190 ms beside the server, in a region without other servers.

    Windows alone are not announced: requests without a hog would earn allowance for the next window with one. A hog makes three
    launches when it starts, before the first request, from which their length is first learned.
    """
    stage.close()
    stage.start({"long": [SIGNAL[0], *LONG_HOGS.values()]})
    for size, hog in LONG_HOGS.items():
        beside = Turn(setup=str(size), round=0, server=SIGNAL[0].name, seconds=LONG_SECONDS, hogs=(hog.name,))
        alone = replace(beside, setup=f"{size} alone", seconds=LONG_ALONE_SECONDS, hogs=(), signal=False)
        turns = [replace(turn, round=number) for number in range(LONG_ROUNDS) for turn in (alone, beside)]
        windows = [serve(bench, stage, turn) for turn in (*turns, replace(alone, round=LONG_ROUNDS))]
        figures[f"long_{size}"] = describe_long(pick(windows, str(size)), pick(windows, alone.setup), figures, size) | {
            "learned_ms": stage.longest_launch_ms(hog.tenant)
        }


def describe_long(beside: Sequence[Window], alone: Sequence[Window], figures: dict[str, Any], size: int) -> dict[str, Any]:
    launch_ms = round(2 * size**3 / figures.get("solo_tflops", USUAL_TFLOPS) / 1e9, 1)  # as long as it takes alone
    return {
        **compare_latency(beside, alone),
        **compare_tail(beside, alone, launch_ms),
        **compare_hogs(beside, figures),
        "launch_ms": launch_ms,
        **{name: round(sum(window.counted[name] for window in beside), 3) for name in ("touched", "held_seconds", "overruns")},
    }


def serve(bench: Bench, stage: Stage, turn: Turn) -> Window:
    """One window, recorded with every request, so that other statistics can be computed from the file."""
    window = stage.serve(turn)
    bench.rows.append(
        {
            "row": f"{window.setup}, round {window.round}",
            "server": window.server,
            "seconds": round(window.seconds, 3),
            "request_ms": " ".join(f"{1000 * request:.3f}" for request in window.requests),
            "step_p50_ms": round(1000 * quantile(window.steps, 0.5), 4),
            "hog_tflops": round(window.hog_units / 1e12, 1),
            **window.counted,
        }
    )
    print(f"{window.setup}, round {window.round}: p50 {1000 * quantile(window.requests, 0.5):.2f} ms", flush=True)
    return window


def pick(windows: Iterable[Window], setup: str) -> list[Window]:
    return [window for window in windows if window.setup == setup]


def compare_latency(beside: Sequence[Window], alone: Sequence[Window]) -> dict[str, Any]:
    """Pooled quantiles, and the ratio of each round where both were measured."""
    pooled = {at: quantile(pool(beside), at) / quantile(pool(alone), at) for at in (0.5, 0.9, 0.95)}
    return {
        **{f"p{round(100 * at)}_x": round(ratio, 4) for at, ratio in pooled.items()},
        **{f"p{round(100 * at)}_x_rounds": spread(round_ratios(beside, alone, at)) for at in (0.5, 0.95)},
        "p50_ms": round(1000 * quantile(pool(beside), 0.5), 3),
        "alone_p50_ms": round(1000 * quantile(pool(alone), 0.5), 3),
        "requests": len(pool(beside)),
        "alone_requests": len(pool(alone)),
    }


def round_ratios(beside: Sequence[Window], alone: Sequence[Window], at: float) -> list[float]:
    by_round = {window.round: quantile(window.requests, at) for window in alone}
    return [quantile(window.requests, at) / by_round[window.round] for window in beside if window.round in by_round]


def compare_tail(beside: Sequence[Window], alone: Sequence[Window], launch_ms: float) -> dict[str, float]:
    """How much later the last requests are, in launches of the hog."""
    later = {
        name: 1000 * (quantile(pool(beside), at) - quantile(pool(alone), at)) for name, at in (("p99", 0.99), ("worst", 1.0))
    }
    return {f"{name}_later_in_launches": round(ms / launch_ms, 2) for name, ms in later.items()}


def compare_hogs(beside: Sequence[Window], figures: dict[str, Any]) -> dict[str, Any]:
    idle, seconds = (sum(getattr(window, name) for window in beside) for name in ("idle_seconds", "seconds"))
    units = sum(window.hog_units * window.seconds for window in beside) / seconds
    result: dict[str, Any] = {
        "hog_tflops": round(units / 1e12, 1),
        "hog_time_of_idle": round(sum(window.hog_seconds for window in beside) / idle, 4),
        "hog_time_rounds": spread(window.hog_seconds / window.idle_seconds for window in beside),
        "hog_time_of_idle_whole": whole_share(beside),
    }
    if "solo_tflops" in figures:
        result["hog_share_of_idle"] = round(units / 1e12 / figures["solo_tflops"] / (idle / seconds), 3)
    return result


def whole_share(beside: Sequence[Window]) -> float:
    """From the hogs' first launch to their last, some moments more than the window."""
    spent, idle = (
        sum(window.counted.get(name, 0.0) for window in beside) for name in ("whole_hog_seconds", "whole_idle_seconds")
    )
    return round(spent / idle, 4) if idle else 0.0


def compare_cost(windows: Sequence[Window]) -> dict[str, Any]:
    """Steps of all processes with the library over those without it; and each process's median, which shows how they differ."""
    steps = {setup: [step for window in pick(windows, setup) for step in window.steps] for setup in ("bare", "library")}
    servers = sorted({window.server for window in windows})
    of_round = {
        (setup, window.round): [step for other in pick(windows, setup) if other.round == window.round for step in other.steps]
        for setup in steps
        for window in windows
    }
    rounds = sorted({window.round for window in windows})
    return {
        "step_x": round(quantile(steps["library"], 0.5) / quantile(steps["bare"], 0.5), 4),
        "step_x_rounds": spread(
            quantile(of_round["library", turn], 0.5) / quantile(of_round["bare", turn], 0.5) for turn in rounds
        ),
        "request_p95_x": round(quantile(pool(pick(windows, "library")), 0.95) / quantile(pool(pick(windows, "bare")), 0.95), 4),
        "step_ms": {
            server: round(1000 * quantile([s for w in windows if w.server == server for s in w.steps], 0.5), 4)
            for server in servers
        },
    }


def pool(windows: Iterable[Window]) -> list[float]:
    return [request for window in windows for request in window.requests]


def quantile(values: Sequence[float], at: float) -> float:
    """The median as usual; otherwise the smallest value that at least this part does not exceed, or the next."""
    ordered = sorted(values)
    return statistics.median(ordered) if at == 0.5 else ordered[min(len(ordered) - 1, int(at * len(ordered)))]  # noqa: PLR2004


def spread(ratios: Iterable[float]) -> list[float]:
    """Least, median and most."""
    ordered = sorted(ratios)
    return [round(value, 4) for value in (ordered[0], statistics.median(ordered), ordered[-1])] if ordered else []
