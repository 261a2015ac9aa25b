"""The engine on seeds that nothing was ever chosen by, with the scorer's own FGD beside it.

    python -m benchmarks.placement_held_out --scorer openb_eval.py --openb DIR

The settings for pods that come and go were tuned on seeds 1-40; here they are run as they are on seeds 220-239. So are the
traces with a demand of their own on seeds 100-102, for which nothing was published.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks import placement_departures
from benchmarks.placement import Figures, Rows, load_scorer
from benchmarks.placement_openb import Engine
from benchmarks.recording import write_result

TRACES = ("default", "gpuspec33", "cpu250")
SEEDS = (100, 101, 102)
DEPARTURE_SEEDS = range(220, 240)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", type=Path, required=True, help="openb_eval.py")
    parser.add_argument("--openb", type=Path, required=True, help="folder with the openb CSV files")
    args = parser.parse_args()
    scorer = load_scorer(args.scorer, args.openb)
    figures: Figures = {}
    rows: Rows = []
    _departures(scorer, figures, rows)
    for trace in TRACES:
        _filling(scorer, trace, figures, rows)
    for name, value in figures.items():
        print(f"{name:42} {value:12.2f}")
    command = "python -m benchmarks.placement_held_out --scorer openb_eval.py --openb DIR"
    print("wrote", write_result("placement-held-out", figures, rows, packages=("numpy",), command=command))


def _departures(scorer: Any, figures: Figures, rows: Rows) -> None:  # noqa: ANN401 - a script that is not ours
    cluster = scorer.Cluster()
    trace = scorer.Trace("default", cluster.models)
    for policy, run in (("engine", placement_departures.run_engine), ("fgd", placement_departures.run_fgd)):
        found = [run(scorer, cluster, trace, seed) for seed in DEPARTURE_SEEDS]
        for seed, each in zip(DEPARTURE_SEEDS, found, strict=True):
            rows.append(
                {
                    "part": "departures",
                    "policy": policy,
                    "seed": seed,
                    **{key: round(each[key], 3) for key in placement_departures.COUNTED},
                }
            )
        for key in placement_departures.COUNTED:
            figures[f"departures.{policy}.{key}"] = round(statistics.mean(each[key] for each in found), 3)


def _filling(scorer: Any, name: str, figures: Figures, rows: Rows) -> None:  # noqa: ANN401
    cluster = scorer.Cluster()
    trace = scorer.Trace(name, cluster.models)
    for policy, kind in (("engine", Engine), ("fgd", scorer.FGD)):
        found = []
        for seed in SEEDS:
            order, nodes = trace.arrivals(seed, cluster)
            cluster.reset(nodes)
            run = scorer.replay(cluster, trace, order, kind(cluster, trace, None))
            curve = scorer.curve(run, cluster.total)
            found.append((float(curve[100]), float(curve[130])))
            row = {"part": "openb", "trace": name, "policy": policy, "seed": seed}
            rows.append({**row, "alloc100": found[-1][0], "alloc130": found[-1][1], "refused_that_fitted": run["refused"]})
        means = [statistics.mean(each) for each in zip(*found, strict=True)]
        figures[f"openb.{name}.{policy}.alloc100"], figures[f"openb.{name}.{policy}.alloc130"] = (round(x, 3) for x in means)


if __name__ == "__main__":
    main()
