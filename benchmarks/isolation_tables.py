"""Writes the H200's figures into docs/explanation/isolation.md, and the plot: `python -m benchmarks.isolation_tables`.

Between `<!-- figures: NAME -->` and `<!-- end -->` the page holds what is rendered here from benchmarks/results/. Time-slicing
and MPS need no new run when the library changes: they are read from isolation-h200-others.json.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.isolation_plot import SETUPS, TARGET, draw
from benchmarks.recording import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "isolation.md"
BLOCK = re.compile(r"(?<=<!-- figures: )(\w+)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
OTHERS = ("time_slicing_1", "time_slicing_2", "mps_1", "mps_40")
KINDS = ("small", "large", "async", "mapped", "arrays", "streams", "every_kind")


def main() -> None:
    figures = read_figures()
    PAGE.write_text(render_page(PAGE.read_text()))
    TARGET.write_text(draw({label: figures[key]["p95_x"] for key, label in SETUPS.items()}))


def read_figures() -> dict[str, Any]:
    """Of the library, with the rows of the driver alone from their own run."""
    figures = read("isolation-h200")["figures"]
    others = read("isolation-h200-others")["figures"]
    return {**{name: others[name] for name in OTHERS}, **figures}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def render_page(page: str) -> str:
    figures = read_figures()
    rendered = {
        "run": render_run(),
        "gate": render_gate(figures),
        "costs": render_costs(figures),
        "random": render_random({**read("isolation-h200-random")["figures"], **figures}),
        "long": render_long(figures),
    }
    return BLOCK.sub(lambda found: found[1] + found[2] + rendered[found[1]], page)


def render_run() -> str:
    lines = []
    for name in ("isolation-h200", "isolation-h200-random", "isolation-h200-others"):
        result = read(name)
        command = re.sub(r" --out \S+", "", result["command"])
        driver, torch = result["figures"]["card"]["driver_version"], result["versions"]["torch"]
        lines.append(f"- `{name}.json`: {result['date'][:10]}, driver {driver}, PyTorch {torch}, `{command}`")
    return "\n".join(lines)


def render_gate(figures: Mapping[str, Any]) -> str:
    lines = [
        *header(
            "set-up",
            "request p50, x alone",
            "request p95, x alone",
            "hogs, TFLOP/s",
            "rate, of the idle time",
            "device time, of the idle time",
        ),
    ]
    for key, label in SETUPS.items():
        got = figures[key]
        gated = (got["hog_share_of_idle"], got["hog_time_of_idle"]) if "hog_time_of_idle" in got else ("", "")
        lines.append(row(label, got["p50_x"], got["p95_x"], got["hog_tflops"], *gated))
    return "\n".join(lines)


def render_costs(figures: Mapping[str, Any]) -> str:
    step, rate = figures["overhead_step_x"], figures["overhead_gemm_x"]
    processes = "PyTorch, PyTorch with expandable segments, `cuMemAlloc` with odd sizes, `cuMemAllocAsync`"
    lines = (
        f"A hog alone: {figures['solo_tflops']} TFLOP/s.",
        f"The library alone costs {step} x of a decode step (p50) and {rate} x of the hog's rate.",
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
            "launch, as learned beside others",
            "p50, x alone",
            "p90, x alone",
            "p95, x alone",
            "p99",
            "requests touched",
            "hog, TFLOP/s",
        ),
    ]
    for size in (19000, 30000, 40000):
        got = figures[f"long_{size}"]
        touched = f"{got['touched']} of {got['requests']}"
        later = f"{got['p99_later_in_launches']} launches later"
        numbers = (f"{got['launch_ms']} ms", got["p50_x"], got["p90_x"], got["p95_x"], later, touched, got["hog_tflops"])
        lines.append(row(str(size), *numbers))
    return "\n".join(lines)


def header(*cells: str) -> tuple[str, str]:
    return row(*cells), row(*("---" for _ in cells))


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
