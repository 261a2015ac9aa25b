"""The page of measurements: figures of benchmarks/results put into the text of tools/measurements.md.

A figure cannot be typed by hand there. A place in double braces stands for one of these:

- `{{FILE:key/key|FORMAT}}`: a figure (of "figures", else of the file itself), in a Python format where one is given;
- `{{rows FILE: KEY=TITLE; ...}}`: a table of the file's rows that have the first two keys;
- `{{table NAME}}`: a table that one of the functions in TABLES makes;
- `{{runs}}`: command, commit, date and machine of each file.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.gateway import tables as gateway_tables  # noqa: E402 the path is set above
from benchmarks.interposer.run import table  # noqa: E402
from benchmarks.isolation_h200 import tables as isolation_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"\{\{(.+?)\}\}")
_PEERS = ("weights only", "weights x 1.2", "GPUStack", "Ollama", "hf-mem", "accelerate")


def page() -> str:
    text = (ROOT / "tools" / "measurements.md").read_text(encoding="utf-8")
    return PLACE.sub(lambda found: _fill(found[1]), text)


def _fill(place: str) -> str:
    kind, _, rest = place.partition(" ")
    if place == "runs":
        return "\n".join(_runs())
    if kind == "table":
        return TABLES[rest]()
    if kind == "rows":
        name, columns = rest.split(": ", 1)
        return "\n".join(_rows(name, dict(one.split("=") for one in columns.split("; "))))
    path, _, form = place.partition("|")
    name, keys = path.split(":", 1)
    value = _find(read(name), keys)
    return format(value, form or ("," if isinstance(value, int) else ""))


@cache
def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _find(content: Mapping[str, Any], keys: str) -> object:
    first, *more = keys.split("/")
    figures = content.get("figures", {})
    value: Any = figures[first] if first in figures else content[first]
    for key in more:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def _rows(name: str, columns: Mapping[str, str]) -> Iterable[str]:
    yield from isolation_tables.header(*columns.values())
    first = list(columns)[:2]
    for row in read(name)["rows"]:
        if all(row.get(key) is not None for key in first):
            yield isolation_tables.row(*("" if row.get(key) is None else row[key] for key in columns))


def _runs() -> Iterable[str]:
    yield from isolation_tables.header("file", "command", "commit", "date", "machine")
    for path in sorted(RESULTS.glob("*.json")):
        result = read(path.stem)
        command = "`" + re.sub(r" --out \S+", "", result["command"]).replace("|", "\\|") + "`"
        link = f"[{path.stem}](../../benchmarks/results/{path.name})"
        came_with = f"in {result['recorded_in'][:8]}" if "recorded_in" in result else ""
        commit = str(result.get("commit") or "").partition(",")[0][:8] or came_with
        if not commit or not result.get("date"):
            raise ValueError(f"{path.name} does not record its commit and its date: write it with benchmarks.recording")
        yield isolation_tables.row(link, command, commit, str(result.get("date") or "")[:10], _machine(result))


def _machine(result: Mapping[str, Any]) -> str:
    machine: Any = result.get("machine") or ""
    card = result.get("figures", {}).get("card", {}).get("name", "")
    if not isinstance(machine, Mapping):
        return str(machine)
    gpu = card or ("NVIDIA H200" if machine["system"].endswith("-gpu") else "")
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    parts = (gpu, machine["processor"], f"{machine['cores']} cores", memory, f"load {machine['load_average'][0]}")
    return ", ".join(part for part in parts if part)


def _sizing() -> str:
    figures = read("sizing")["figures"]
    left = ("model", "precision", "family")
    lines = [
        *isolation_tables.header("formula", "mean error", "worst under", "worst over"),
        _error_line("**this sizing**", figures, "transformers"),
        _error_line("each model left out in turn", figures, "transformers_left_out"),
        *(_error_line(f"each {one} left out in turn", figures, f"transformers_{one}_left_out") for one in left[1:]),
        *(_error_line(peer, figures, f"peer.{peer}") for peer in _PEERS),
    ]
    return "\n".join(lines)


def _error_line(name: str, figures: Mapping[str, Any], key: str) -> str:
    return isolation_tables.row(name, *(f"{figures[f'{key}_{what}']} %" for what in ("mape", "worst_under", "worst_over")))


def _buffers() -> str:
    now, before = read("sizing")["figures"], read("sizing_llamacpp_before")["figures"]
    lines = [*isolation_tables.header("llama.cpp, published logs", "loads", "mean error, MiB", "worst, MiB")]
    kinds = (("all", "llamacpp"), ("held out", "llamacpp_heldout"))
    for title, figures in (("before the formulas were corrected", before), ("now", now)):
        for half, key in kinds:
            numbers = (figures[f"{key}_{what}"] for what in ("points", "mean_mib", "worst_mib"))
            lines.append(isolation_tables.row(f"{half}, {title}", *numbers))
    return "\n".join(lines)


def _shims() -> str:
    rows = read("interposer")["rows"]
    return table(rows, list(rows[0]["figures"]))


def _openb() -> str:
    figures = read("placement")["figures"]
    lines = [*isolation_tables.header("trace", "at 100 % asked", "FGD", "at 130 % asked", "FGD")]
    for trace in sorted({key.split(".")[1] for key in figures if key.startswith("openb.")}):
        numbers = (f"{figures[f'openb.{trace}.{what}']:.2f}" for what in ("alloc100", "fgd100", "alloc130", "fgd130"))
        lines.append(isolation_tables.row(trace, *numbers))
    return "\n".join(lines)


def _dense() -> str:
    rows = read("dense")["rows"]
    lines = [*isolation_tables.header("traffic", "requests", *rows[0]["rules"])]
    for one in rows:
        late = (f"{rule['late']:.2%}" for rule in one["rules"].values())
        lines.append(isolation_tables.row(one["part"], f"{one['requests']:,}", *late))
    return "\n".join(lines)


def _policies(name: str) -> str:
    return "\n".join(gateway_tables.live(read(name)["figures"]))


TABLES: dict[str, Callable[[], str]] = {
    **isolation_tables.TABLES,
    "qos": lambda: "\n".join(gateway_tables.replay(read("qos")["figures"])),
    "qos sweep": lambda: "\n".join(gateway_tables.sweep(read("qos")["figures"])),
    "qos live": lambda: _policies("qos_live"),
    "qos live h200": lambda: _policies("qos_live_h200"),
    "qos live others": lambda: _policies("qos_live_others"),
    "gateway": lambda: "\n".join(gateway_tables.gateway(read("gateway")["figures"])),
    "gateway first byte": lambda: "\n".join(gateway_tables.first_byte(read("gateway")["figures"])),
    "sizing": _sizing,
    "sizing buffers": _buffers,
    "shims": _shims,
    "openb": _openb,
    "dense": _dense,
}
