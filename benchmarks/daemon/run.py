"""What the daemon costs with many models: idle processor time, memory, `up`, restarts of all, and answers beside loads.

Engines are `engine.c`, GPUs are eight simulated MI300X in CPX (64 partitions). `--models 10 50 200` by default.

The answers of a ready model are timed with nothing else going on, while this daemon loads 20 models, and while a second daemon
loads the same 20: the last has the same contention for the processor's cores, and nothing in common with the first but that.
Rounds of the three are interleaved, and the medians of their 95th percentiles are kept.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from aimgpu.cli.client import DaemonClient
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.home import Home
from aimgpu.ledger.read_only import read_instances
from benchmarks.recording import write_result

ROOT = Path(__file__).resolve().parents[2]
_GPUS = 8
_IDLE_SECONDS = 20.0
_LOADING = 20  # models that load beside one that answers
_LOAD_MS = 4000
_REQUESTS = 300
_PACE_SECONDS = 0.01  # between two requests: they cover a load from its beginning to its end
_ROUNDS = 3
T = TypeVar("T")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, nargs="+", default=[10, 50, 200])
    counts = parser.parse_args().models
    rows = []
    with tempfile.TemporaryDirectory(prefix="aimgpu-bench-") as folder:
        engine = Path(folder) / "engine"
        source = Path(__file__).with_name("engine.c")
        subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-o", str(engine), str(source)], check=True)
        for count in counts:
            row = measure(Path(folder) / f"home-{count}", engine, count)
            rows.append(row)
            print(json.dumps(row))
    figures = {f"{name}.{row['models']}": row[name] for row in rows for name in row if name != "models"}
    write_result("daemon", figures, rows)


def measure(home_path: Path, engine: Path, models: int) -> dict[str, float]:
    """One daemon with so many models."""
    with running_daemon(home_path, engine) as (client, home, pid):
        split_gpus(client)
        began = cpu_seconds(pid)
        charged, ready = up(client, home, stack(models, load_ms=0), models)
        up_cpu = cpu_seconds(pid) - began
        idle = cpu_share(pid, _IDLE_SECONDS)
        memory = rss_mb(pid)
        began = cpu_seconds(pid)
        restart = kill_all(home, models)
        restart_cpu = cpu_seconds(pid) - began
        with running_daemon(home_path.with_name(f"{home_path.name}-other"), engine) as (other, other_home, _):
            split_gpus(other)
            answers = answers_in_turn((client, home), (other, other_home))
        began = time.monotonic()
        client.stop()
        return {
            "models": models,
            "idle_cpu_percent": round(100 * idle, 2),
            "rss_mb": round(memory, 1),
            "up_charged_seconds": round(charged, 2),
            "up_ready_seconds": round(ready, 2),
            "up_cpu_seconds": round(up_cpu, 2),
            "restarts_begun_seconds": round(restart, 2),
            "restarts_cpu_seconds": round(restart_cpu, 2),
            **{name: round(1000 * seconds, 2) for name, seconds in answers.items()},
            "down_seconds": round(time.monotonic() - began, 2),
        }


def split_gpus(client: DaemonClient) -> None:
    for device in range(_GPUS):
        list(client.partition(str(device), "CPX/NPS1", reload_driver=False))


@contextmanager
def running_daemon(home_path: Path, engine: Path) -> Iterator[tuple[DaemonClient, Home, int]]:
    home = Home(home_path)
    home.create()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AIMGPU_BENCH_ENGINE": str(engine), "AIMGPU_HOME": str(home_path)}
    command = [sys.executable, "-m", "benchmarks.daemon.process", "--home", str(home_path), "--port", "0"]
    command += ["--simulate", "MI300X", "--count", str(_GPUS)]
    with (home_path / "daemon.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
    try:
        record = wait_for(home.read_daemon, 120)
        client = DaemonClient(record.url, home.read_token())
        wait_for(lambda: client.read_status()["reconciled"], 60)
        yield client, home, process.pid
    finally:
        process.terminate()
        process.wait(60)
        launcher = ProcessLauncher(home_path)
        for left in launcher.find_started().values():
            launcher.stop(left, grace_seconds=0)
        shutil.rmtree(home_path, ignore_errors=True)


def stack(models: int, *, load_ms: int, prefix: str = "m") -> str:
    return json.dumps({"models": {f"{prefix}{number}": {"model": f"any/{load_ms}"} for number in range(models)}})


def up(client: DaemonClient, home: Home, text: str, models: int) -> tuple[float, float]:
    """Seconds until everything is charged, and until everything is ready."""
    began = time.monotonic()
    applying = threading.Thread(target=lambda: list(client.apply(text, "/", dry_run=False)))
    applying.start()
    wait_for(lambda: len(read_instances(home.ledger_file)) >= models, 300)
    charged = time.monotonic() - began
    applying.join()
    return charged, time.monotonic() - began


def kill_all(home: Home, models: int) -> float:
    """Seconds from the kill of every engine until every one of them has been started again."""
    old = pids(home)
    began = time.monotonic()
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(pids(home) - old) >= models, 120)
    seconds = time.monotonic() - began
    wait_for(lambda: sum(one.state.value == "ready" for one in read_instances(home.ledger_file)) >= models, 120)
    return seconds


def pids(home: Home) -> set[int]:
    return {one.process.pid for one in read_instances(home.ledger_file) if one.process is not None}


def answers_in_turn(served: tuple[DaemonClient, Home], other: tuple[DaemonClient, Home]) -> dict[str, float]:
    """By case, the median of the rounds' 95th percentiles in seconds; and the medians of their medians."""
    cases: dict[str, Callable[[], list[float]]] = {
        "alone": lambda: answer_times(served[0], lambda: False),
        "beside_loads": lambda: answers_beside_loads(served[0], *served),
        "beside_loads_of_another_daemon": lambda: answers_beside_loads(served[0], *other),
    }
    rounds = [{name: case() for name, case in cases.items()} for _ in range(_ROUNDS)]
    found = {f"p95_{name}_ms": statistics.median(percentile(one[name], 95) for one in rounds) for name in cases}
    return found | {f"p50_{name}_ms": statistics.median(percentile(one[name], 50) for one in rounds) for name in cases}


def answers_beside_loads(served: DaemonClient, loader: DaemonClient, home: Home) -> list[float]:
    """Of `served`, from the moment at which `loader` is asked for 20 models until they are ready; they are released again."""
    text = stack(_LOADING, load_ms=_LOAD_MS, prefix="loading")
    applying = threading.Thread(target=lambda: list(loader.apply(text, "/", dry_run=False)))
    applying.start()
    times = answer_times(served, applying.is_alive)
    applying.join()
    loader.release([f"loading{number}" for number in range(_LOADING)])
    wait_for(lambda: not any(one.deployment.startswith("loading") for one in read_instances(home.ledger_file)), 120)
    return times


def answer_times(client: DaemonClient, go_on: Callable[[], bool]) -> list[float]:
    """At least so many requests, and more for as long as `go_on` says so."""
    url = client.read_status()["models_url"] + "/chat/completions"
    body = json.dumps({"model": "m0", "messages": [{"role": "user", "content": "hello"}]}).encode()
    times: list[float] = []
    while len(times) < _REQUESTS or go_on():
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - ours
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - ours
            answer.read()
        times.append(time.monotonic() - began)
        time.sleep(_PACE_SECONDS)
    return times


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def cpu_share(pid: int, seconds: float) -> float:
    """Of one core, over so many seconds in which nothing is asked of it."""
    time.sleep(3.0)
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds


def cpu_seconds(pid: int) -> float:
    """Of its own, without its engines."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def wait_for(look: Callable[[], T | None], seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise TimeoutError


if __name__ == "__main__":
    main()
