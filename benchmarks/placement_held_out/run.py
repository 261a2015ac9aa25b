"""The engine on seeds that nothing was ever chosen by, with the scorer's own FGD beside it.

    python -m benchmarks.placement_held_out.run --scorer openb_eval.py --openb DIR

The settings for pods that come and go were tuned on seeds 1-40; here they are run as they are on seeds 220-239, FGD on 220-224.
The default trace, whose score was looked at on seeds 100-102, 1000-1005, 2000-2009, 7000-7009 and 9000-9019, is run on seeds
11000-11019, FGD on 11000-11004; the traces with a demand of their own on seeds 100-102. Nothing was published for any of them.
With --only, what is not measured again is kept from the last run; every row has its seed.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.placement import departures
from benchmarks.placement.openb import Engine
from benchmarks.placement.run import Figures, Rows, load_scorer
from benchmarks.recording import RESULTS, write_result

SEEDS = {"default": range(11000, 11020), "gpuspec33": range(100, 103), "cpu250": range(100, 103)}
MOST_OF_FGD = 5  # seeds: it takes several times as long
DEPARTURE_SEEDS = {"engine": range(220, 240), "fgd": range(220, 225)}
NAME = "placement-held-out"
_NOT_FIGURES = ("part", "policy", "seed", "trace", "refused_that_fitted")
PARTS = tuple(
    f"{part}.{policy}" for part in ("departures", *(f"openb.{trace}" for trace in SEEDS)) for policy in DEPARTURE_SEEDS
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scorer", type=Path, required=True, help="openb_eval.py")
    parser.add_argument("--openb", type=Path, required=True, help="folder with the openb CSV files")
    parser.add_argument("--only", choices=PARTS, nargs="*", help="measure these parts, keep the others from the last run")
    args = parser.parse_args()
    scorer = load_scorer(args.scorer, args.openb)
    measured = tuple(args.only or PARTS)
    rows = [row for row in _last_rows() if _part_of(row) not in measured]
    for part in measured:
        group, _, policy = part.rpartition(".")
        rows += _departures(scorer, policy) if group == "departures" else _filling(scorer, group.partition(".")[2], policy)
    figures = _means(rows)
    for name, value in figures.items():
        print(f"{name:42} {value:12.2f}")
    only = f" --only {' '.join(args.only)}" if args.only else ""
    command = f"python -m benchmarks.placement_held_out.run --scorer openb_eval.py --openb DIR{only}"
    print("wrote", write_result(NAME, figures, rows, packages=("numpy",), command=command))


def _last_rows() -> Rows:
    path = RESULTS / f"{NAME}.json"
    found: Rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def _part_of(row: dict[str, Any]) -> str:
    group = row["part"] if "trace" not in row else f"{row['part']}.{row['trace']}"
    return f"{group}.{row['policy']}"


def _means(rows: Rows) -> Figures:
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key not in _NOT_FIGURES:
                values.setdefault(f"{_part_of(row)}.{key}", []).append(value)
    return {name: round(statistics.mean(found), 3) for name, found in sorted(values.items())}


def _departures(scorer: Any, policy: str) -> Rows:  # noqa: ANN401 - a script that is not ours
    cluster = scorer.Cluster()
    trace = scorer.Trace("default", cluster.models)
    run = {"engine": departures.run_engine, "fgd": departures.run_fgd}[policy]
    rows: Rows = []
    for seed in DEPARTURE_SEEDS[policy]:
        found = run(scorer, cluster, trace, seed)
        counted = {key: round(found[key], 3) for key in departures.COUNTED}
        rows.append({"part": "departures", "policy": policy, "seed": seed, **counted})
    return rows


def _filling(scorer: Any, name: str, policy: str) -> Rows:  # noqa: ANN401
    cluster = scorer.Cluster()
    trace = scorer.Trace(name, cluster.models)
    kind = {"engine": Engine, "fgd": scorer.FGD}[policy]
    rows: Rows = []
    for seed in SEEDS[name] if policy == "engine" else SEEDS[name][:MOST_OF_FGD]:
        order, nodes = trace.arrivals(seed, cluster)
        cluster.reset(nodes)
        run = scorer.replay(cluster, trace, order, kind(cluster, trace, None))
        curve = scorer.curve(run, cluster.total)
        row = {"part": "openb", "trace": name, "policy": policy, "seed": seed, "refused_that_fitted": run["refused"]}
        rows.append({**row, "alloc100": float(curve[100]), "alloc130": float(curve[130])})
    return rows


if __name__ == "__main__":
    main()
