"""The section `sharing`: a chat model beside a batch model under the strict gate, by promise, and under plain time-slicing.

With `--mps` two more models of the same shapes run as clients of an MPS server, where the GPU executes kernels of both at once
instead of in turns; the gate is beside it as before. Both pairs start together and are idle while the other is measured.
"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aimgpu.errors import AimGpuError
from aimgpu.isolation.interposer import regions_directory
from aimgpu.isolation.region import Region
from benchmarks.engines_h200.load import percentile
from benchmarks.isolation_h200.bench import mps

if TYPE_CHECKING:
    from benchmarks.engines_h200.run import Run

CHAT_TOKENS, BATCH_TOKENS = 96, 256
_TAIL = 3.0  # seconds that chat goes on, see `_side_by_side`
Model = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One set-up; `factor` times the time per token of chat alone is promised."""

    sharing: str
    factor: float | None
    seconds: float
    settle: float

    @property
    def label(self) -> str:
        return self.sharing if self.factor is None else f"{self.sharing} {self.factor}"

    @property
    def needed(self) -> float:
        return self.seconds + self.settle + _TAIL + 5


@dataclass(frozen=True, slots=True)
class Alone:
    """What everything is compared with."""

    chat: dict[str, Any]
    batch: dict[str, Any]  # beside an idle chat whose gate is strict
    ungated: dict[str, Any]  # without a gate


@dataclass(frozen=True, slots=True)
class Pair:
    """Names of the two models."""

    chat: str
    batch: str
    chat_model: Model
    prefix: str = ""  # of its rows


def run_sharing(run: "Run", chat: Model, batch: Model, sleeper: Model | None) -> dict[str, Any]:
    """The stack changes while the models run."""
    result: dict[str, Any] = {"rows": []}
    run.results["sections"]["sharing"] = result  # what was measured is saved also if the rest is not
    pair, second = Pair("chat", "batch", chat), Pair("chat-mps", "batch-mps", {**chat, "env": run.mps}, "MPS, ")
    models = {"chat": chat, "batch": batch, **({"sleeper": sleeper} if sleeper else {})}
    clients = {second.chat: second.chat_model, second.batch: {**batch, "env": low_priority(run.mps)}} if run.mps else {}
    done = run.apply({**models, **clients}, replace=True)
    run.say(f"sharing: models ready after {done['ready_seconds']} {done['error'] or ''} {done['stages']}")
    result["ready_seconds"] = done["ready_seconds"]
    if any(done["instances"].get(name, {}).get("state") != "ready" for name in clients):
        run.say("the models under MPS did not start")
        run.daemon.keep_logs(list(clients))
        run.apply(models, replace=True)  # else each change of the stack would try again
        clients = {}
    if clients:  # an idle strict model would gate the batch model of the other pair
        run.apply({second.chat: {**second.chat_model, "sharing": "fair"}})
    alone = _measure_alone(run, pair, result)
    _measure_rows(run, pair, alone, _rows(run.given.seconds), result["rows"])
    if clients:
        run.apply({pair.chat: {**chat, "sharing": "fair"}})
        _measure_mps(run, second, alone, result)
        run.apply(models, replace=True)
    return result


def run_pair(run: "Run", chat: Model, batch: Model) -> dict[str, Any]:
    """Promises of 1.15 and 1.6 times alone with one neighbour at work; with --mps all under MPS.

    With `--compute` the tighter promise is beside neighbours of the same shape in turn, each with that part of the GPU.
    """
    result: dict[str, Any] = {"rows": []}
    run.results["sections"]["pair"] = result
    chat, batch = ({**chat, "env": run.mps}, {**batch, "env": low_priority(run.mps)}) if run.mps else (chat, batch)
    prefix = "MPS, " if run.mps or run.given.daemon_mps else ""
    parts = {f"limited{part.rstrip('%')}": part for part in run.given.compute.split(",")} if run.given.compute else {}
    limited = {name: {**batch, "compute": part} for name, part in parts.items()}
    result["ready_seconds"] = _start_both(run, {"chat": {**chat, "sharing": "fair"}, "batch": batch, **limited})
    light = run.read_load(run.load("chat", "chat", seconds=9, after=2, tokens=CHAT_TOKENS), "chat")
    heavy = run.read_load(run.load("batch", "batch", seconds=6, after=2, tokens=BATCH_TOKENS), "batch")
    result["alone"] = times(light) | {"batch_ungated_tokens_per_second": heavy["tokens_per_second"]}
    run.say(f"pair: alone {result['alone']}")
    run.save()
    alone, tight = Alone(light, heavy, heavy), Row("promise", 1.15, 45, 10)
    for name, row in (*((name, tight) for name in limited or ("batch",)), ("batch", Row("promise", 1.6, 20, 8))):
        label = f"{prefix}batch at {parts[name]} of the compute, " if name in parts else prefix
        _measure_rows(run, Pair("chat", name, chat, label), alone, (row,), result["rows"])
    return result


def run_threads(run: "Run", chat: Model, batch: Model) -> dict[str, Any]:
    """Under MPS with `--mps`: the same neighbour held to parts of the GPU's threads, first without a gate, then by promise."""
    result: dict[str, Any] = {"rows": []}
    run.results["sections"]["threads"] = result
    neighbours = {f"batch{percent}": percent for percent in (100, 50, 30, 15)}
    percentage = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    environments = {name: low_priority(run.mps) | {percentage: str(percent)} for name, percent in neighbours.items()}
    chat = {**chat, "env": run.mps}
    models = {name: {**batch, "env": environment} for name, environment in environments.items()}
    result["ready_seconds"] = _start_both(run, {"chat": {**chat, "sharing": "fair"}, **models})
    light = run.read_load(run.load("chat", "chat", seconds=8, after=2, tokens=CHAT_TOKENS), "chat")
    heavy = {
        name: run.read_load(run.load("batch", name, seconds=5, after=2, tokens=BATCH_TOKENS), name)
        for name in ("batch100", "batch30")
    }
    rates = {f"{name}_tokens_per_second": found["tokens_per_second"] for name, found in heavy.items()}
    result["alone"] = times(light) | rates
    run.say(f"threads: alone {result['alone']}")
    run.save()
    alone = Alone(light, heavy["batch100"], heavy["batch100"])
    fair, promise = (Row("fair", None, 8, 2),), (Row("promise", 1.15, 20, 10),)
    order = ((name, fair) for name in ("batch30", "batch50", "batch100", "batch15"))
    for name, rows in (*order, ("batch50", promise), ("batch30", promise)):
        _measure_rows(run, Pair("chat", name, chat, f"{neighbours[name]} % of the threads, "), alone, rows, result["rows"])
    return result


def _start_both(run: "Run", models: dict[str, Model]) -> dict[str, float]:
    """Seconds until each was ready. One that was stopped while it started is asked for again."""
    for _ in range(2):
        done = run.apply(models, replace=True)
        run.say(f"pair: ready after {done['ready_seconds']} {done['error'] or ''} {done['stages']}")
        states = {name: done["instances"].get(name, {}).get("state") for name in models}
        if all(state == "ready" for state in states.values()):
            return dict(done["ready_seconds"])
        run.daemon.keep_logs(list(models))
    raise RuntimeError(f"not ready: {states}")


def low_priority(environment: dict[str, str]) -> dict[str, str]:
    """Of an MPS client whose kernels give way to those of others."""
    return {**environment, "CUDA_MPS_CLIENT_PRIORITY": "1"}


@contextlib.contextmanager
def mps_server(run: "Run") -> Iterator[dict[str, str]]:
    """What a client's environment must have; empty: not asked for, or there is none."""
    if not run.given.mps:
        yield {}
        return
    stack = contextlib.ExitStack()
    try:
        environment = stack.enter_context(mps(Path(tempfile.mkdtemp(prefix="mps", dir=run.given.folder))))
    except (OSError, subprocess.SubprocessError) as error:
        run.say(f"no MPS: {error}")
        environment = {}
    try:
        yield environment
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            stack.close()


def _measure_alone(run: "Run", pair: Pair, result: dict[str, Any]) -> Alone:
    seconds = run.given.seconds
    chat = run.read_load(run.load("chat", pair.chat, seconds=seconds, after=3, tokens=CHAT_TOKENS), pair.chat)
    batch = run.read_load(run.load("batch", pair.batch, seconds=10, after=3, tokens=BATCH_TOKENS), pair.batch)
    run.apply({pair.chat: {**pair.chat_model, "sharing": "fair"}})
    ungated = run.read_load(run.load("batch", pair.batch, seconds=6, after=2, tokens=BATCH_TOKENS), pair.batch)
    rates = {"batch": batch["tokens_per_second"], "batch_ungated": ungated["tokens_per_second"]}
    result["alone"] = times(chat) | {f"{name}_tokens_per_second": rate for name, rate in rates.items()}
    run.say(f"alone: {result['alone']}")
    return Alone(chat, batch, ungated)


def _rows(seconds: float) -> tuple[Row, ...]:
    return (
        Row("strict", None, seconds, 3),
        Row("promise", 1.15, seconds + 4, 8),
        Row("promise", 1.6, seconds, 8),
        Row("fair", None, min(seconds, 8), 2),
    )


def _measure_mps(run: "Run", pair: Pair, alone: Alone, result: dict[str, Any]) -> None:
    """Against the same models alone without MPS."""
    result["mps"] = found = dict[str, Any]()
    if run.left < 40:  # noqa: PLR2004
        found["left_out"] = True
        return
    chat = run.read_load(run.load("chat", pair.chat, seconds=8, after=2, tokens=CHAT_TOKENS), pair.chat)
    batch = run.read_load(run.load("batch", pair.batch, seconds=6, after=3, tokens=BATCH_TOKENS), pair.batch)
    found["alone"] = times(chat) | {"batch_tokens_per_second": batch["tokens_per_second"]}
    run.say(f"MPS alone: {found['alone']}")
    rows = (Row("promise", 1.15, 16, 8), Row("fair", None, 8, 2), Row("promise", 1.6, 12, 7), Row("strict", None, 10, 3))
    _measure_rows(run, pair, alone, rows, result["rows"])


def _measure_rows(run: "Run", pair: Pair, alone: Alone, rows: tuple[Row, ...], found: list[dict[str, Any]]) -> None:
    for row in rows:
        if row.label not in run.given.rows.split(","):
            continue
        if run.left < row.needed:
            found.append({"set_up": pair.prefix + row.label, "left_out": True})
            continue
        promise_ms = round(percentile(alone.chat["tpot"], 0.95) * row.factor * 1000, 3) if row.factor else None
        promise = {"slo": {"tpot_p95": f"{promise_ms}ms"}} if promise_ms else {}
        run.apply({pair.chat: {**pair.chat_model, "sharing": row.sharing, **promise}})
        found.append(_compare(_side_by_side(run, pair, row), promise_ms, alone) | {"set_up": pair.prefix + row.label})
        run.say(str({key: value for key, value in found[-1].items() if key not in ("requests_seen", "batch_ends")}))
        run.save()


def _side_by_side(run: "Run", pair: Pair, row: Row) -> dict[str, Any]:
    heavy = run.load("batch", pair.batch, seconds=row.seconds, after=row.settle, tokens=BATCH_TOKENS)
    # It goes on while the neighbour's last answers end, which would be faster without it and are counted by their average pace.
    light = run.load("chat", pair.chat, seconds=row.seconds, after=row.settle, tokens=CHAT_TOKENS, tail=_TAIL)
    shares, before = [], _admitted(run)
    while light.poll() is None:
        shares.append(run.daemon.client().read_status()["sharing"].get(pair.chat, {}))
        time.sleep(0.5)
    admitted = {kind: count - before[kind] for kind, count in _admitted(run).items()}
    return {
        "set_up": row.label,
        "chat": run.read_load(light, pair.chat),
        "batch": run.read_load(heavy, pair.batch),
        "shares": [(round(one.get("share") or 0, 3), one.get("promise_used")) for one in shares],
        "admitted": admitted,
    }


def _admitted(run: "Run") -> dict[str, int]:
    """Launches that the gate let pass beside a working tenant, by kind, since the region was made; empty without a region."""
    counts = dict.fromkeys(("in_pause", "not_in_pause", "light", "filling"), 0)
    for path in regions_directory(run.daemon.home.path).rglob("*.region"):
        with contextlib.suppress(OSError, AimGpuError), contextlib.closing(Region.open(path)) as region:
            counts = {kind: counts[kind] + int(found) for kind, found in zip(counts, region.header.admitted, strict=True)}
    return counts


def _compare(row: dict[str, Any], promise_ms: float | None, alone: Alone) -> dict[str, Any]:
    chat, rate = row["chat"], row["batch"]["tokens_per_second"]
    slowdown = percentile(chat["tpot"], 0.5) / percentile(alone.chat["tpot"], 0.5)
    share, of_ungated = (rate / one["tokens_per_second"] for one in (alone.batch, alone.ungated))
    found = {
        "set_up": row["set_up"],
        "promise_ms": promise_ms,
        "tpot_p50_x": round(slowdown, 3),
        "tpot_p95_x": round(percentile(chat["tpot"], 0.95) / percentile(alone.chat["tpot"], 0.95), 3),
        "request_p95_x": round(percentile(chat["request"], 0.95) / percentile(alone.chat["request"], 0.95), 3),
        "ttft_p50_ms": round(percentile(chat["ttft"], 0.5) * 1000, 2),
        "batch_tokens_per_second": round(rate),
        "batch_share": round(share, 3),
        "speed_plus_share": round(1 / slowdown + share, 3),
        "batch_share_of_ungated": round(of_ungated, 3),
        "requests": chat["requests"],
        "failed": chat["failed"],
        "shares": row["shares"],
        "admitted": row.get("admitted"),
        "requests_seen": chat["seen"],
        "batch_ends": row["batch"]["ends"],
    }
    if promise_ms:
        bound = promise_ms / 1000
        found["requests_kept"] = round(sum(one <= bound for one in chat["tpot"]) / max(len(chat["tpot"]), 1), 3)
        found["windows_kept"] = round(sum(one <= bound for one in chat["windows"]) / max(len(chat["windows"]), 1), 3)
    return found


def times(found: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds."""
    names = (("tpot_p50", "tpot", 0.5), ("tpot_p95", "tpot", 0.95), ("ttft_p50", "ttft", 0.5), ("request_p95", "request", 0.95))
    return {f"{name}_ms": round(percentile(found[key], part) * 1000, 3) for name, key, part in names} | {
        "requests": found["requests"],
        "failed": found["failed"],
        "errors": found["errors"],
    }
