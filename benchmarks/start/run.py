"""How long `make up` takes to three ready models, cold (fresh clone, empty caches) and warm, and what memory the daemon has.

The clone is of HEAD, in a scratch folder with a HOME of its own; uv is hidden, so it is bootstrapped as on a fresh machine.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.recording import write_result

ROOT = Path(__file__).resolve().parents[2]
_MODELS = 3
_IDLE_SECONDS = 5.0


@dataclass(frozen=True)
class FreshMachine:
    """A clone and a home in which nothing was ever installed."""

    clone: Path
    home: Path
    port: int

    def environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("AIMGPU_", "XDG_", "UV_CACHE", "VIRTUAL_ENV"))
        }
        folders = [folder for folder in kept["PATH"].split(":") if not (Path(folder) / "uv").exists()]
        return kept | {
            "HOME": str(self.home),
            "PATH": ":".join(folders),
            "PIP_CACHE_DIR": str(self.home / "pip"),
            "UV_LINK_MODE": "copy",
        }

    def run(self, *command: str) -> float:
        start = time.monotonic()
        subprocess.run(command, cwd=self.clone, env=self.environment(), check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - start

    def daemon_record(self) -> dict[str, int]:
        record: dict[str, int] = json.loads((self.home / ".local/state/aimgpu/daemon.json").read_text())
        return record


@contextmanager
def fresh_machine() -> Iterator[FreshMachine]:
    folder = Path(tempfile.mkdtemp(prefix="aimgpu-start-"))
    try:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
        (folder / "home").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        yield FreshMachine(folder / "clone", folder / "home", port)
    finally:
        shutil.rmtree(folder)


def measure_up(machine: FreshMachine) -> dict[str, float]:
    """Seconds of one `make up --detach`, and when its milestones came."""
    start = time.monotonic()
    process = subprocess.Popen(
        ["make", "up", f"ARGS=--detach --port {machine.port}"],
        cwd=machine.clone,
        env=machine.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: list[tuple[float, str]] = []

    def read(stream: IO[str]) -> None:
        seen.extend((time.monotonic() - start, line.strip()) for line in stream)

    readers = [threading.Thread(target=read, args=(stream,)) for stream in (process.stdout, process.stderr) if stream]
    for reader in readers:
        reader.start()
    status = process.wait()
    total = time.monotonic() - start
    for reader in readers:
        reader.join()
    lines = sorted(seen)
    if status != 0 or sum(line.endswith(": ready") for _, line in lines) != _MODELS:
        raise SystemExit(f"make up ended with {status}:\n" + "\n".join(line for _, line in lines))
    daemon = next(at for at, line in lines if line.startswith("SIMULATED"))
    loading = min(at for at, line in lines if line.endswith(": loading"))
    ready = max(at for at, line in lines if line.endswith(": ready"))
    return {"total": total, "daemon": daemon, "model": loading - daemon, "load": ready - loading}


def measure_memory(pid: int) -> dict[str, float]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.endswith("kB")}
    return {"rss": kib["Rss"] * 1024 / 1e6, "pss": kib["Pss"] * 1024 / 1e6}


def measure_help(machine: FreshMachine) -> float:
    """Seconds of CPU of `aimgpu --help`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    machine.run(".venv/bin/aimgpu", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-runs", type=int, default=5)
    arguments = parser.parse_args()
    with fresh_machine() as machine:
        bootstrap = machine.run("./tools/uv.sh", "--version")
        environment = machine.run("make", "runtime")
        cold = measure_up(machine)
        warm = []
        for _ in range(arguments.warm_runs):
            machine.run(".venv/bin/aimgpu", "down")
            warm.append(measure_up(machine))
        time.sleep(_IDLE_SECONDS)
        memory = measure_memory(machine.daemon_record()["pid"])
        machine.run(".venv/bin/aimgpu", "down")
        help_cpu = statistics.median(measure_help(machine) for _ in range(5))
    figures = {
        "cold_seconds": round(bootstrap + environment + cold["total"], 2),
        "cold_uv_seconds": round(bootstrap, 2),
        "cold_environment_seconds": round(environment, 2),
        "cold_daemon_seconds": round(cold["daemon"], 2),
        "cold_model_seconds": round(cold["model"], 2),
        "cold_load_seconds": round(cold["load"], 2),
        "warm_seconds": round(statistics.median(run["total"] for run in warm), 2),
        "daemon_rss_mb": round(memory["rss"], 1),
        "daemon_pss_mb": round(memory["pss"], 1),
        "help_cpu_seconds": round(help_cpu, 3),
    }
    rows = [{"run": number, **{key: round(value, 2) for key, value in run.items()}} for number, run in enumerate(warm)]
    path = write_result("start", figures, rows, packages=["aimgpu", "xllamacpp", "uvicorn", "click"])
    print(json.dumps(figures, indent=1), f"\nwritten to {path}")


if __name__ == "__main__":
    main()
