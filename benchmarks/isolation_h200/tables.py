"""Tables of the H200's isolation figures for docs/reference/measurements.md; as a program, it draws the plot.

Time-slicing and MPS need no new run when the library changes: they are read from isolation-h200-others.json. The gate beside a
server that is alone on the card is read from all runs isolation-h200-alternating*.json together, the same beside idle tenants
from isolation-h200.json.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.isolation_h200.paired import quantile
from benchmarks.isolation_h200.plot import SETUPS, TARGET, draw
from benchmarks.recording import RESULTS

OTHERS = ("time_slicing_1", "time_slicing_2", "mps_1", "mps_40")
ALTERNATING = ("isolation-h200-alternating", *(f"isolation-h200-alternating-{number}" for number in (2, 3, 4)))
PAIRED = {
    "gate_signal_1": "signal, 1 hog",
    "gate_signal_2": "signal, 2 hogs",
    "gate_adaptive_1": "no signals, 1 hog",
    "gate_adaptive_2": "no signals, 2 hogs",
}
KINDS = ("small", "large", "async", "mapped", "arrays", "streams", "every_kind")


def main() -> None:
    figures = read_figures()
    TARGET.write_text(draw({label: figures[key]["p95_x"] for key, label in SETUPS.items()}))


def read_figures() -> dict[str, Any]:
    """Of the library, with the rows of the driver alone from their own run."""
    figures, others = (read(f"isolation-h200{name}")["figures"] for name in ("", "-others"))
    paired = {f"paired_{name}": figures[name] for name in PAIRED}
    main = {name: value for name, value in figures.items() if name not in PAIRED}
    return {**{name: others[name] for name in OTHERS}, **main, **paired, **pool_alternating(ALTERNATING)}


def pool_alternating(names: Sequence[str]) -> dict[str, Any]:
    """The gate's rows of these runs together: quantiles of all requests, means of what the hogs got."""
    runs = [read(name) for name in names]
    alone = pick_requests(runs, "alone,")
    pooled: dict[str, Any] = {}
    for count in (1, 2):
        got = [run["figures"][f"gate_signal_{count}"] for run in runs]
        served = pick_requests(runs, f"signal {count},")
        pooled[f"gate_signal_{count}"] = {
            "requests": len(served),
            "alone_requests": len(alone),
            **{f"p{at}_x": round(quantile(served, at / 100) / quantile(alone, at / 100), 4) for at in (50, 90, 95)},
            "p95_later_ms": round(quantile(served, 0.95) - quantile(alone, 0.95), 3),
            "hog_tflops": round(statistics.mean(one["hog_tflops"] for one in got), 1),
            **{
                name: round(statistics.mean(one[name] for one in got), 4)
                for name in ("hog_time_of_idle", "hog_time_of_idle_whole")
            },
        }
    return pooled


def pick_requests(runs: Sequence[Mapping[str, Any]], start: str) -> list[float]:
    """Milliseconds of the requests in all rows of a kind."""
    rows = [row for run in runs for row in run["rows"] if row["row"].startswith(start)]
    return [float(text) for row in rows for text in row["request_ms"].split()]


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def render_gate(figures: Mapping[str, Any]) -> str:
    lines = [
        *header(
            "set-up", "request p50, x alone", "request p95, x alone", "hogs, TFLOP/s", "hogs' device time, of the idle time"
        )
    ]
    for key, label in SETUPS.items():
        got = figures[key]
        lines.append(row(label, got["p50_x"], got["p95_x"], got["hog_tflops"], got.get("hog_time_of_idle", "")))
    return "\n".join(lines)


def render_alternating_runs() -> str:
    """Each run by itself: the cards of two machines differ."""
    lines = [*header("run", "power alone, W", "1 hog: p50 / p95, x alone", "2 hogs: p50 / p95, x alone")]
    for name in ALTERNATING:
        result = read(name)
        alone = [row["clocks"]["in_requests"]["watts"] for row in result["rows"] if row["row"].startswith("alone,")]
        by_count = [result["figures"][f"gate_signal_{count}"] for count in (1, 2)]
        lines.append(
            row(f"`{name}`", round(statistics.median(alone)), *(f"{got['p50_x']} / {got['p95_x']}" for got in by_count))
        )
    return "\n".join(lines)


def render_clocks(rows: Sequence[Mapping[str, Any]]) -> str:
    """By kind of row, within requests: the median of the rows' medians, and the least of all."""
    lines = [*header("", "rows", "SM clock, MHz", "least", "memory clock, MHz", "power, W", "limited by the power cap")]
    for title, start in (("alone", "alone,"), ("gate, 1 hog", "signal 1,"), ("gate, 2 hogs", "signal 2,")):
        got = [entry["clocks"]["in_requests"] for entry in rows if entry["row"].startswith(start)]
        numbers = [round(statistics.median(one[name] for one in got)) for name in ("sm_mhz", "memory_mhz", "watts")]
        capped = round(100 * statistics.mean(one["limited_by"]["power cap"] for one in got))
        least = min(one["sm_mhz_least"] for one in got)
        lines.append(row(title, len(got), numbers[0], least, numbers[1], numbers[2], f"{capped} % of samples"))
    return "\n".join(lines)


def render_paired(figures: Mapping[str, Any]) -> str:
    lines = [
        *header(
            "gate",
            "request p50, x alone",
            "by round",
            "request p95, x alone",
            "by round",
            "requests",
            "hogs, TFLOP/s",
            "rate, of the idle time",
            "device time, of the idle time",
        ),
    ]
    for name, label in PAIRED.items():
        got = figures[f"paired_{name}"]
        rounds = ["{0} to {2}".format(*got[f"{at}_x_rounds"]) for at in ("p50", "p95")]
        latency = (got["p50_x"], rounds[0], got["p95_x"], rounds[1], got["requests"])
        lines.append(row(label, *latency, got["hog_tflops"], got["hog_share_of_idle"], got["hog_time_of_idle"]))
    return "\n".join(lines)


def render_ahead(figures: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        *header("best effort", "requests", "none ahead", "one ahead", "at most", "first kernel later, p50 / most"),
    ]
    for title, got in figures.items():
        ahead, later = got["ahead"], got["first_kernel_later_ms"]
        counts = (ahead.get("0", 0), ahead.get("1", 0), got["ahead_most"])
        lines.append(row(title, got["requests"], *counts, f"{later['p50']} / {later['most']} ms"))
    return "\n".join(lines)


def render_costs(figures: Mapping[str, Any]) -> str:
    cost, calls, rounds = figures["cost"], figures["calls"]["silent0"], figures["overhead_gemm_rounds"]
    servers = {
        kind: [ms for name, ms in cost["step_ms"].items() if (name.startswith("bare")) == (kind == "bare")]
        for kind in ("bare", "library")
    }
    processes = "PyTorch, PyTorch with expandable segments, `cuMemAlloc` with odd sizes, `cuMemAllocAsync`"
    lines = (
        (
            f"The library costs {figures['overhead_calls_x']} x of a decode step: within one process, "
            f"{calls['step_ms']['hooked']} ms through it and {calls['step_ms']['real']} ms by the driver's own functions "
            f"(medians of {calls['steps']['hooked']} and {calls['steps']['real']} steps in random order)."
        ),
        (
            f"Between processes that cannot be resolved: the steps of four with the library took {cost['step_x']} x those of "
            f"four without it, in windows of a second in turns, but processes of one kind differ as much "
            f"({min(servers['bare'])} to {max(servers['bare'])} ms without, {min(servers['library'])} to "
            f"{max(servers['library'])} ms with it)."
        ),
        (
            f"A hog alone: {figures['solo_tflops']} TFLOP/s; with the library {figures['overhead_gemm_x']} x the time "
            f"({rounds[0]} to {rounds[2]} by round)."
        ),
        f"A hog with `compute: 30%` had {figures['compute_30_percent_of_time']} of the device's time.",
        (
            f"Four processes of one tenant with a cap of 10 GiB ({processes}) took all they could at once, and a fifth came "
            f"late: {figures['over_cap_bytes']} bytes over the cap by the driver's count, contexts included."
        ),
    )
    return "\n".join(f"- {line}" for line in lines)


def render_random(figures: Mapping[str, Any]) -> str:
    lines = [
        *header(
            "allocations",
            "granted",
            "refused",
            "counted at most, MiB",
            "driver at most, MiB",
            "over the cap, MiB",
            "processes that ended early",
        ),
    ]
    notes = []
    for kind in KINDS:
        got = figures[f"random_{kind}"]
        counted = got["most"]["counted"] or got["held"]["counted"]  # no peak: nothing was charged after the contexts
        ended = sum(status != 0 for status in got["statuses"])
        numbers = (f"{got['granted']:,}", f"{got['refused']:,}", counted, got["most"]["driver"], got["over_cap_mib"], ended)
        lines.append(row(kind.replace("_", " "), *numbers))
        if got["most"]["driver"] > counted:
            more = round(got["most"]["driver"] - counted)
            notes.append(f"{kind.replace('_', ' ').capitalize()}: the driver held {more} MiB more than was counted.")
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def render_long(figures: Mapping[str, Any]) -> str:
    lines = [
        *header(
            "size",
            "launch alone",
            "learned beside others",
            "p50, x alone",
            "p90, x alone",
            "p95, x alone",
            "p99",
            "worst",
            "requests touched",
            "hog, TFLOP/s",
        ),
    ]
    for size in (19000, 30000, 40000):
        got = figures[f"long_{size}"]
        touched = f"{round(got['touched'])} of {got['requests']}"
        later = [f"{got[f'{at}_later_in_launches']} launches later" for at in ("p99", "worst")]
        lengths = (f"{got['launch_ms']} ms", f"{got['learned_ms']} ms")
        lines.append(row(size, *lengths, got["p50_x"], got["p90_x"], got["p95_x"], *later, touched, got["hog_tflops"]))
    return "\n".join(lines)


def header(*cells: str) -> tuple[str, str]:
    return row(*cells), row(*("---" for _ in cells))


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


TABLES: dict[str, Callable[[], str]] = {
    "gate": lambda: render_gate(read_figures()),
    "gate runs": render_alternating_runs,
    "gate clocks": lambda: render_clocks([entry for name in ALTERNATING for entry in read(name)["rows"]]),
    "gate paired": lambda: render_paired(read_figures()),
    "gate ahead": lambda: render_ahead(read("isolation-h200-ahead")["figures"]["ahead"]),
    "gate costs": lambda: render_costs(read_figures()),
    "gate random": lambda: render_random({**read("isolation-h200-random")["figures"], **read_figures()}),
    "gate long": lambda: render_long(read_figures()),
}


if __name__ == "__main__":
    main()
