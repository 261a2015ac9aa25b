"""How well and how fast the engine places: openb traces, departures, ParvaGPU scenarios, decisions a second.

Data and scorer are not part of the project; name them:
    python -m benchmarks.placement.run --scorer openb_eval.py --openb DIR --parva DIR
or by AIMGPU_OPENB_SCORER, OPENB_DATA and AIMGPU_PARVA_DATA. With some of them missing, what can be measured is printed and
nothing is written. Times are CPU seconds of one core.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aimgpu.placement.scoring.weights import FILLING_UP
from aimgpu.placement.session import PlacementSession
from benchmarks.placement import departures, parva
from benchmarks.placement.openb import MIB, Engine, ask_of, mix_of, snapshot_of
from benchmarks.placement.small import small_figures
from benchmarks.recording import write_result

TRACES = (
    *("default", "cpu050", "cpu100", "cpu200", "cpu250", "gpushare40", "gpushare60", "gpushare80", "gpushare100"),
    *("gpuspec10", "gpuspec20", "gpuspec25", "gpuspec33", "multigpu20", "multigpu30", "multigpu40", "multigpu50"),
)
SEEDS = range(42, 52)
DEPARTURE_SEEDS = (300, 301, 302)
LARGE_CLUSTER = 12_000

Figures = dict[str, float]
Rows = list[dict[str, Any]]


def main() -> None:
    args = _arguments()
    figures: Figures = {}
    rows: Rows = []
    small_figures(figures)
    if args.scorer and args.openb:
        scorer = load_scorer(args.scorer, args.openb)
        _openb(scorer, args.traces.split(","), figures, rows)
        _departures(scorer, figures, rows)
        _speed(scorer, figures, rows)
    if args.parva:
        for row in parva.run(args.parva):
            rows.append({"part": "parva", **row})
            figures[f"parva.s{row['scenario']}"] = row["devices"]
            figures[f"parva.s{row['scenario']}.bound"] = row["bound"]
    for name, value in figures.items():
        print(f"{name:42} {value:12.2f}")
    if not (args.scorer and args.openb and args.parva):
        print("nothing written: name the scorer and both data folders to measure everything")
        return
    command = "python -m benchmarks.placement.run --scorer openb_eval.py --openb DIR --parva DIR"
    print("wrote", write_result("placement", figures, rows, packages=("numpy",), command=command))


def load_scorer(path: Path, data: Path) -> Any:  # noqa: ANN401 - a script that is not ours
    os.environ["OPENB_DATA"] = str(data)
    spec = importlib.util.spec_from_file_location("openb_eval", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _openb(scorer: Any, traces: list[str], figures: Figures, rows: Rows) -> None:  # noqa: ANN401
    """The published protocol, scored by the scorer: every placement is checked, refusals of what fits are counted."""
    cluster = scorer.Cluster()
    for name in traces:
        trace, published = scorer.Trace(name, cluster.models), scorer.published(name)
        found = []
        for seed in SEEDS:
            order, nodes = trace.arrivals(seed, cluster)
            cluster.reset(nodes)
            run = scorer.replay(cluster, trace, order, Engine(cluster, trace, None))
            curve = scorer.curve(run, cluster.total)
            found.append((curve[100], curve[130], run["refused"]))
            fgd = published["fgd", seed]
            rows.append(
                {
                    "part": "openb",
                    "trace": name,
                    "seed": seed,
                    "alloc100": float(curve[100]),
                    "alloc130": float(curve[130]),
                    "refused_that_fitted": run["refused"],
                    "fgd100": fgd[0],
                    "fgd130": fgd[1],
                }
            )
        mean = np.mean(found, axis=0)
        fgd_mean = np.mean([published["fgd", seed] for seed in SEEDS], axis=0)
        figures[f"openb.{name}.alloc100"], figures[f"openb.{name}.alloc130"] = round(mean[0], 3), round(mean[1], 3)
        figures[f"openb.{name}.fgd100"], figures[f"openb.{name}.fgd130"] = round(fgd_mean[0], 3), round(fgd_mean[1], 3)
        figures[f"openb.{name}.refused_that_fitted"] = float(mean[2])


def _departures(scorer: Any, figures: Figures, rows: Rows) -> None:  # noqa: ANN401
    cluster = scorer.Cluster()
    trace = scorer.Trace("default", cluster.models)
    for policy, run in (("engine", departures.run_engine), ("fgd", departures.run_fgd)):
        found = [run(scorer, cluster, trace, seed) for seed in DEPARTURE_SEEDS]
        rows += [
            {"part": "departures", "policy": policy, "seed": seed, **{key: round(value, 3) for key, value in each.items()}}
            for seed, each in zip(DEPARTURE_SEEDS, found, strict=True)
        ]
        prefix = "departures" if policy == "engine" else "departures.fgd"
        for key in departures.COUNTED:
            figures[f"{prefix}.{key}"] = round(statistics.mean(each[key] for each in found), 3)


def _speed(scorer: Any, figures: Figures, rows: Rows) -> None:  # noqa: ANN401
    """Decide and charge, pod after pod, until the cluster has been asked for 130 %; the best of three runs, and all of them.

    Ask objects in, Placement and Refusal objects out, refusals included but their reasons not looked at; beside it the chooser
    alone, with its kinds ready, which also takes the pods that want no GPU.
    """
    cluster = scorer.Cluster()
    trace = scorer.Trace("default", cluster.models)
    order, _ = trace.arrivals(SEEDS[0], cluster)
    original = cluster.rows
    for count in (len(original), LARGE_CLUSTER):
        cluster.rows = (original * (count // len(original) + 1))[:count]
        pods = np.tile(order, count // len(original) + 1)[: len(order) * count // len(original)]
        for what, measure in (("decisions", _rate), ("chooser_decisions", _chooser_rate)):
            rates = [measure(cluster, trace, pods) for _ in range(3)]
            figures[f"{what}_per_second.{count}"] = round(max(rates))
            rows.append({"part": "speed", "what": what, "nodes": count, "rates": [round(rate) for rate in rates]})
    cluster.rows = original


def _rate(cluster: Any, trace: Any, pods: Any) -> float:  # noqa: ANN401
    cluster.reset()
    kinds = [ask_of(kind, number) for number, kind in enumerate(trace.kinds)]
    mix = mix_of(trace, kinds)
    wanted = [(kinds[kind], mib) for kind, mib in zip(trace.kind[pods].tolist(), trace.mem[pods].tolist(), strict=True)]
    asks = [
        replace(ask, name=f"pod{number}", host_memory_bytes=mib * MIB)
        for number, (ask, mib) in enumerate(wanted)
        if ask.devices
    ]
    engine = PlacementSession(snapshot_of(cluster), mix=mix, weights=FILLING_UP)
    start = time.process_time()
    decisions = [engine.place(ask) for ask in asks]
    return len(decisions) / (time.process_time() - start)


def _chooser_rate(cluster: Any, trace: Any, pods: Any) -> float:  # noqa: ANN401
    cluster.reset()
    engine = Engine(cluster, trace, None)
    kinds, memory = trace.kind[pods].tolist(), trace.mem[pods].tolist()
    start = time.process_time()
    for kind, mib in zip(kinds, memory, strict=True):
        engine.decide(kind, mib)
    return len(kinds) / (time.process_time() - start)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", type=Path, default=_path("AIMGPU_OPENB_SCORER"), help="openb_eval.py")
    parser.add_argument("--openb", type=Path, default=_path("OPENB_DATA"), help="folder with the openb CSV files")
    parser.add_argument("--parva", type=Path, default=_path("AIMGPU_PARVA_DATA"), help="folder with the ParvaGPU CSV files")
    parser.add_argument("--traces", default=",".join(TRACES))
    return parser.parse_args()


def _path(variable: str) -> Path | None:
    return Path(os.environ[variable]) if variable in os.environ else None


if __name__ == "__main__":
    main()
