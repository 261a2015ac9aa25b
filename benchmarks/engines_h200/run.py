"""Unmodified vLLM under our grants and our gate on one real GPU.

    PYTHONPATH=src:. python3 -m benchmarks.engines_h200.run --out DIR

Sections (`--sections a,b`), each with its own models and a bound in seconds; what is late is left out and said so:
starts    ten shapes and settings of vLLM with `gpu: auto`: first attempt, grant against the driver's count; the largest alone
          against three side by side, nothing compiled before
sharing   chat beside batch: alone, strict, fair (plain time-slicing), promises of 1.15 and 1.6 times alone; --mps
sleep     twenty rounds of sleep and wake in place; the sleeper's memory given to another model and taken back
eight     eight 3 B models at once, all answering
pair      chat beside batch: promises of 1.15 and 1.6 times alone, the first for 45 s; --mps or --daemon-mps, --compute
threads   chat beside batch at 100, 50, 30 and 15 % of the GPU's threads, with --mps: without a gate, then by promise
trace     three models with promises and one batch, arrivals from a seeded process
llamacpp  ten shapes and settings of llama.cpp at once, then the replay of `make bench-qos-live` (llamacpp.py)
replay    that replay alone
sweep     settings of the gate beside a tenant that yields, with full and with piecewise graphs (sweep.py)

Needs vLLM on PATH (0.26 was used), a C compiler and an NVIDIA GPU. Weights are random numbers made on the GPU. Writes
OUT/engines_h200.json after every section and prints a table last.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines_h200.daemon import URL, BenchmarkDaemon, mib
from benchmarks.engines_h200.llamacpp import run_llamacpp, run_replay
from benchmarks.engines_h200.load import percentile, stream_answer, unload, whole_answer
from benchmarks.engines_h200.rows import start_row
from benchmarks.engines_h200.sharing import BATCH_TOKENS, low_priority, mps_server, run_pair, run_sharing, run_threads
from benchmarks.engines_h200.sweep import run_sweep
from benchmarks.recording import describe_machine, to_text

ROOT = Path(__file__).parents[2]
# Name -> what the stack file says of it.
STARTS: dict[str, dict[str, Any]] = {
    "half": {"shape": "0.5b", "context": 4096, "concurrency": 8},
    "tied": {"shape": "1.5b", "context": 8192},
    "wide": {"shape": "1b", "context": 2048, "concurrency": 256},
    "long": {"shape": "3b", "context": 32768, "concurrency": 2},
    "eight": {"shape": "8b", "context": 8192, "concurrency": 8},
    "fp8kv": {"shape": "3b", "context": 8192, "concurrency": 16, "args": {"kv-cache-dtype": "fp8"}},
    "eager": {"shape": "1b", "context": 4096, "concurrency": 16, "args": {"enforce-eager": True}},
    "plain": {"shape": "3b", "context": 4096, "concurrency": 8},
    "many": {"shape": "1.5b", "context": 4096, "concurrency": 128},
    "large": {"shape": "14b", "context": 8192, "concurrency": 4},
}
SLOWEST = "large"
THREE = (SLOWEST, "eight", "fp8kv")  # side by side
CHAT = {"shape": "3b", "context": 4096, "concurrency": 8, "priority": "high"}
BATCH = {"shape": "1b", "context": 4096, "concurrency": 64, "priority": "low"}
SLEEPER = {"shape": "3b", "context": 4096, "concurrency": 8, "gpu": {"memory": "60GiB"}, "keep": "1s", "priority": "medium"}
_ON_DEMAND = ("sweep", "pair", "threads", "llamacpp", "replay")
_LONG = ("stages", "shares", "requests_seen", "batch_ends", "seen")  # of a row, not for the table
Section = Callable[["Run"], dict[str, Any]]


class Run:
    """What the sections share: where things are, how long is left, what was measured so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.out: Path = given.out
        self.began = time.monotonic()
        mps = {"AIMGPU_MPS": "1"} if given.daemon_mps else {}
        self.daemon = BenchmarkDaemon(given.folder, given.out, simulate=given.simulate, tiny=given.tiny, settings=mps)
        self.results: dict[str, Any] = {"machine": describe_machine(), "sections": {}}
        self.stack: dict[str, dict[str, Any]] = {}  # what runs
        self.mps: dict[str, str] = {}  # environment of an MPS client; empty: no MPS

    @property
    def left(self) -> float:
        return float(self.given.limit) - (time.monotonic() - self.began)

    def apply(self, models: dict[str, dict[str, Any]], *, replace: bool = False) -> dict[str, Any]:
        """These beside what runs, or in its place; what does not change is left alone."""
        self.stack = models if replace else {**self.stack, **models}
        return self.daemon.apply(self.stack)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def load(self, kind: str, model: str, **options: float) -> "subprocess.Popen[bytes]":
        """A caller in a process of its own; `read_load` waits for it."""
        argv = [sys.executable, "-m", "benchmarks.engines_h200.load", kind, "--url", URL, "--model", model]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        path = self.out / f"load-{model}.json"
        path.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        return subprocess.Popen([*argv, "--out", str(path)], cwd=ROOT, env=environment)

    def read_load(self, process: "subprocess.Popen[bytes]", model: str) -> dict[str, Any]:
        process.wait(180)
        path = self.out / f"load-{model}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return found

    def wants(self, section: str) -> bool:
        return section in self.given.sections.split(",")

    def save(self) -> None:
        self.results["seconds"] = round(time.monotonic() - self.began)
        (self.out / "engines_h200.json").write_text(to_text(self.results))


def main() -> int:
    """The sections in the given order; one that fails does not stop the next."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/engines_h200"))  # noqa: S108 - a bare machine
    parser.add_argument("--sections", default=",".join(name for name in SECTIONS if name not in _ON_DEMAND))
    parser.add_argument("--seconds", type=float, default=12.0, help="of one measurement")
    parser.add_argument("--simulate", help="a GPU of this name instead of a real one, to try the script with vLLM for the CPU")
    parser.add_argument("--tiny", action="store_true", help="one small shape for all models")
    parser.add_argument("--rows", default="strict,promise 1.15,promise 1.6,fair", help="of the section sharing")
    parser.add_argument(
        "--mps",
        action="store_true",
        help="under MPS, beside the gate: sharing, two more models; trace and pair, all",
    )
    parser.add_argument("--daemon-mps", action="store_true", help="the daemon runs MPS itself (AIMGPU_MPS=1)")
    parser.add_argument("--compute", help="pair: of the neighbours beside the tighter promise, such as 15%%,12%%")
    parser.add_argument("--tokenizer", type=Path, help="llamacpp: a GGUF file whose tokenizer its models get")
    parser.add_argument("--sweep-leaves", type=float, default=10.0, help="seconds that the sweep leaves to later sections")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds in all")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    run = Run(given)
    run.daemon.start()
    run.say("daemon started")
    with mps_server(run) as run.mps:
        try:
            for name in given.sections.split(","):
                _run_section(run, name)
        finally:
            run.daemon.stop()
            run.save()
            print_table(run.results)
    return 0


def _run_section(run: Run, name: str) -> None:
    section, needed = SECTIONS[name]
    if run.left < needed:
        run.results["sections"][name] = {"left_out": f"{run.left:.0f} s were left, about {needed} are needed"}
        run.say(f"{name}: left out, {run.left:.0f} s left")
        return
    run.say(f"{name}: begins")
    try:
        run.results["sections"][name] = section(run)
    except Exception as error:  # noqa: BLE001 - the other sections shall run
        traceback.print_exc()
        measured = run.results["sections"].get(name, {})
        run.results["sections"][name] = measured | {"failed": f"{type(error).__name__}: {error}"[:500]}
    run.save()


def run_starts(run: Run) -> dict[str, Any]:
    """Seven at once, then the largest alone, then three side by side with nothing compiled before."""
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows}
    run.results["sections"]["starts"] = found
    _start_group(run, [name for name in STARTS if name not in THREE], rows)
    alone = _start_group(run, [SLOWEST], rows)
    together = _start_group(run, list(THREE), rows)
    if alone and together:
        ready = {"alone_seconds": alone["ready_seconds"], "together_seconds": together["ready_seconds"]}
        found["parallel"] = ready | {
            "ratio": round(max(together["ready_seconds"].values()) / alone["ready_seconds"][SLOWEST], 2)
        }
        run.say(f"starts: side by side {found['parallel']}")
    return found


def _start_group(run: Run, group: list[str], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """These alone on the GPU; a shape that was started before gets no second row."""
    if run.left < 90:  # noqa: PLR2004
        rows.append({"left_out": group})
        return None
    if held := [item["name"] for item in run.daemon.client().read_status()["deployments"]]:
        run.daemon.client().release(held)
    run.daemon.clear_cache()
    done = run.apply({name: STARTS[name] for name in group}, replace=True)
    run.say(f"starts {', '.join(group)}: {done['seconds']} s {done['error'] or ''} {done['steps']}")
    answered = {name: whole_answer(URL, name, 16)[0] for name in group}
    driver = run.daemon.driver_bytes()
    for name in [name for name in group if name not in [row.get("name") for row in rows]]:
        rows.append(start_row(name, done, driver, STARTS[name]["shape"]) | {"answered_tokens": answered[name]})
        run.say(str(rows[-1]))
    run.daemon.keep_logs(group)
    run.save()
    return done


def _critical(run: Run, **more: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - keys of a stack file
    """Three of them, each with its own shape."""
    environment = {"env": run.mps} if run.mps else {}
    shapes = {"chat": "3b", "second": "1b", "third": "1.5b"}
    return {name: {**CHAT, "shape": shape, **environment, **more} for name, shape in shapes.items()}


def _batch(run: Run) -> dict[str, Any]:
    return {**BATCH, "env": low_priority(run.mps)} if run.mps else BATCH


def run_sleep(run: Run) -> dict[str, Any]:
    """One model with a keep time of two seconds, asked again and again after it fell asleep."""
    if "sleeper" not in run.stack:
        run.apply({"sleeper": SLEEPER}, replace=True)
    rows, asleep = [], []
    for _ in range(20):
        if run.left < 60:  # noqa: PLR2004
            break
        asleep.append(_put_to_sleep(run, "sleeper"))
        answer = stream_answer(URL, "sleeper", 8)
        rows.append(answer["arrivals"][0] if answer["arrivals"] else None)
    awake = run.daemon.driver_bytes()
    good = sorted(one for one in rows if one is not None)
    found: dict[str, Any] = {
        "rounds": len(rows),
        "failed": sum(one is None for one in rows),
        "first_token_seconds": {"p50": percentile(good, 0.5), "max": good[-1] if good else None},
        "asleep_mib": [mib(asleep[0]), mib(asleep[-1])] if asleep else None,
        "awake_mib": {name: mib(size) for name, size in awake.items()},
    }
    run.say(f"sleep: {found}")
    return found | (_lend_memory(run) if run.left > 110 else {})  # noqa: PLR2004


def _lend_memory(run: Run) -> dict[str, Any]:
    """Another model gets what the sleeper gave back, then sleeps in its turn."""
    _put_to_sleep(run, "sleeper")
    other = run.apply({"other": {**BATCH, "concurrency": 8, "gpu": {"memory": "70GiB"}, "keep": "2s"}})
    beside = run.daemon.driver_bytes()
    _put_to_sleep(run, "other")
    back = stream_answer(URL, "sleeper", 8)
    return {
        "other": {"error": other["error"], "state": other["instances"].get("other", {}).get("state")},
        "beside_mib": {name: mib(size) for name, size in beside.items()},
        "taken_back_first_token_seconds": back["arrivals"][0] if back["arrivals"] else back["error"],
    }


def _put_to_sleep(run: Run, name: str) -> int | None:
    """As a client of Ollama unloads a model; the driver's bytes once it sleeps."""
    unload(URL, name)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        instance: dict[str, Any] = next(
            (one for one in run.daemon.client().read_status()["instances"] if one["name"] == name), {}
        )
        if instance.get("state") == "sleeping":
            time.sleep(0.3)
            return run.daemon.driver_bytes().get(str(instance.get("id")))
        time.sleep(0.2)
    return None


def run_eight(run: Run) -> dict[str, Any]:
    """Eight copies of one shape under names of their own."""
    models = {f"m{number}": {"shape": "3b", "context": 4096, "concurrency": 4} for number in range(8)}
    done = run.apply(models, replace=True)
    driver = run.daemon.driver_bytes()
    answers = {name: whole_answer(URL, name, 16)[0] for name in models}
    rows = [start_row(name, done, driver) for name in models]
    run.daemon.keep_logs(list(models))
    return {
        "seconds": done["seconds"],
        "error": done["error"],
        "answered": sum(tokens > 0 for tokens in answers.values()),
        "within_grants": all((row["over_mib"] or -1) >= 0 for row in rows),
        "rows": rows,
    }


def run_trace(run: Run) -> dict[str, Any]:
    """Promises of 1.3 times what each needs without batch."""
    run.apply({**_critical(run, sharing="fair"), "batch": _batch(run)}, replace=True)
    seconds = run.given.seconds
    batch = run.read_load(run.load("batch", "batch", seconds=6, after=2, tokens=BATCH_TOKENS), "batch")
    quiet = _traced(run, seconds, with_batch=False)
    names = list(_critical(run))
    promises = {name: round(percentile(quiet[name]["tpot"], 0.95) * 1.3 * 1000, 3) for name in names}
    run.say(f"trace: batch alone {batch['tokens_per_second']:.0f}/s, promises {promises}")
    slo = {name: {"sharing": "promise", "slo": {"tpot_p95": f"{promises[name]}ms"}} for name in names}
    run.apply({name: {**given, **slo[name]} for name, given in _critical(run).items()})
    loaded = _traced(run, seconds + 6, with_batch=True)
    found = {
        "without_batch_p95_ms": {name: round(percentile(quiet[name]["tpot"], 0.95) * 1000, 3) for name in names},
        "promises_ms": promises,
        "kept": {name: _kept(loaded[name]["tpot"], promises[name]) for name in names},
        "windows_kept": {name: _kept(loaded[name]["windows"], promises[name]) for name in names},
        "kept_without_batch": {name: _kept(quiet[name]["tpot"], promises[name]) for name in names},
        "requests": {name: loaded[name]["requests"] for name in names},
        "batch_alone_tokens_per_second": round(batch["tokens_per_second"]),
        "batch_share": round(loaded["batch"]["tokens_per_second"] / batch["tokens_per_second"], 3),
        "mps": bool(run.mps),
        "shares": loaded["shares"],
    }
    run.say(f"trace: {found}")
    return found


def _kept(seconds: list[float], promise_ms: float) -> float:
    return round(sum(one * 1000 <= promise_ms for one in seconds) / max(len(seconds), 1), 3)


def _traced(run: Run, seconds: float, *, with_batch: bool) -> dict[str, Any]:
    after = 8 if with_batch else 1
    going = {name: run.load("trace", name, seconds=seconds, after=after, rate=2.0) for name in _critical(run)}
    if with_batch:
        going["batch"] = run.load("batch", "batch", seconds=seconds, after=after, tokens=BATCH_TOKENS)
    shares = []
    while any(process.poll() is None for process in going.values()):
        found = run.daemon.client().read_status()["sharing"]
        shares.append({name: round(found.get(name, {}).get("share") or 0, 3) for name in _critical(run)})
        time.sleep(1)
    return {name: run.read_load(process, name) for name, process in going.items()} | {"shares": shares}


def print_table(results: dict[str, Any]) -> None:
    """What the bars are about, one line each."""
    print("\n=== engines_h200 ===")
    for name, section in results["sections"].items():
        rows = section.get("rows", []) if isinstance(section, dict) else []
        short = {key: value for key, value in section.items() if key not in ("rows", "stages")}
        print(f"{name}: {json.dumps(short)[:1500]}")
        for row in rows:
            shown = {key: value for key, value in row.items() if key not in _LONG}
            print("   ", json.dumps(shown)[:400])


SECTIONS: dict[str, tuple[Section, int]] = {
    "starts": (run_starts, 150),
    "sharing": (lambda run: run_sharing(run, CHAT, BATCH, SLEEPER if run.wants("sleep") else None), 180),
    "sleep": (run_sleep, 60),
    "trace": (run_trace, 75),
    "pair": (lambda run: run_pair(run, CHAT, BATCH), 200),
    "threads": (lambda run: run_threads(run, CHAT, BATCH), 200),
    "eight": (run_eight, 150),
    "llamacpp": (run_llamacpp, 60),
    "replay": (run_replay, 100),
    "sweep": (lambda run: run_sweep(run, CHAT, BATCH), 200),
}

if __name__ == "__main__":
    sys.exit(main())
