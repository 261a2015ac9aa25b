"""Thirty models of the embedded engine on a simulated GPU that holds eight, under bursty traffic, by the daemon's real path.

The models are llamas of two layers with random weights: what is measured is ours. One asleep is stopped; waking starts it.
A look compares the ledger with the processes that run; a difference counts when a second look a moment later finds it too.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tests.programs.tiny_llama import make_weights, write_model

from aimgpu.cli.client import DaemonClient
from aimgpu.domain import InstanceState
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.home import Home
from aimgpu.ledger.read_only import read_instances
from aimgpu.placement.residency_replay import Request
from benchmarks.daemon.run import cpu_seconds, cpu_share, percentile, rss_mb, wait_for
from benchmarks.dense.traffic import Speed, make_traffic
from benchmarks.recording import write_result

_MODELS, _FIT = 30, 8
_LOOK_SECONDS, _AGAIN_SECONDS = 2.0, 0.5
_IDLE_SECONDS = 60.0
_LONGEST_SECONDS = 300.0
_IN_TIME_SECONDS = 2.0
_NOTABLE_SECONDS = 1.0  # to the first token: requests that took longer are kept in the file
_OK = 200
_GPU_BYTES = 192 << 30  # an MI300X


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=21)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aimgpu-bench-") as folder:
        figures, rows = _measure(Path(folder), given.minutes, given.seed)
    figures = {"minutes": given.minutes, "seed": given.seed, "models": _MODELS, "fit": _FIT, **figures}
    print(json.dumps(figures, indent=1))
    write_result("dense_live", figures, rows, packages=("xllamacpp",))


def _measure(folder: Path, minutes: float, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    home = Home(folder / "home")
    home.create()
    model = write_model(folder / "tiny.gguf", make_weights())
    command = [sys.executable, "-m", "aimgpu.daemon", "--home", str(home.path), "--port", "0", "--simulate", "MI300X"]
    with home.log_file.open("ab") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        record = wait_for(home.read_daemon, 120)
        client = DaemonClient(record.url, home.read_token())
        wait_for(lambda: client.read_status()["reconciled"], 60)
        names = [f"m{number:02}" for number in range(_MODELS)]
        list(client.apply(_stack(names, model), "/", dry_run=False))
        speeds = {name: Speed(prefill_tokens_per_second=1e5, seconds_per_token=0.001) for name in names}
        requests = [one for one in make_traffic("bursty", seed, speeds, None) if one.at < minutes * 60]
        began, cpu_before = time.monotonic(), cpu_seconds(daemon.pid)
        rows, looks = asyncio.run(_drive(record.url, requests, home))
        busy = (cpu_seconds(daemon.pid) - cpu_before) / (time.monotonic() - began)
        idle = cpu_share(daemon.pid, _IDLE_SECONDS)
        memory = rss_mb(daemon.pid)
        wakes = _read_wakes(home.log_file)
        client.stop()
        daemon.wait(120)
    finally:
        daemon.kill()
        daemon.wait()
        launcher = ProcessLauncher(home.path)
        for left in launcher.find_started().values():
            launcher.stop(left, grace_seconds=0)
    return {
        **_summary(rows),
        "looks": sum(looks.values()),
        "looks_that_differed": looks["differs"],
        "wakes": len(wakes),
        "wake_p50_seconds": round(percentile(wakes, 50), 3),
        "wake_p95_seconds": round(percentile(wakes, 95), 3),
        "daemon_busy_percent": round(100 * busy, 2),
        "daemon_idle_percent": round(100 * idle, 2),
        "daemon_rss_mb": round(memory, 1),
    }, [row for row in rows if "error" in row or row["first_token_seconds"] > _NOTABLE_SECONDS]


def _stack(names: Sequence[str], model: Path) -> str:
    one = {"model": str(model), "engine": "llamacpp", "context": 512, "gpu": {"fraction": round(0.97 / _FIT, 3)}, "keep": "30m"}
    return json.dumps({"models": dict.fromkeys(names, one)})


async def _drive(url: str, requests: Sequence[Request], home: Home) -> tuple[list[dict[str, Any]], Counter[str]]:
    looks: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        watch = asyncio.create_task(_watch(home, looks))
        began = time.monotonic()
        calls = []
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
            calls.append(asyncio.create_task(_call(session, url, request)))
        rows = await asyncio.gather(*calls)
        watch.cancel()
    return rows, looks


async def _call(session: aiohttp.ClientSession, url: str, request: Request) -> dict[str, Any]:
    body = {"model": request.model, "stream": True, "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}
    began, first, heartbeats, last = time.monotonic(), None, 0, b""
    try:
        timeout = aiohttp.ClientTimeout(total=_LONGEST_SECONDS)
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=timeout) as answer:
            status = answer.status
            async for line in answer.content:
                heartbeats += line.startswith(b":")
                if first is None and line.startswith(b"data:"):
                    first = time.monotonic() - began
                last = line.strip() or last
    except (TimeoutError, aiohttp.ClientError) as error:
        return {"at": round(request.at, 2), "model": request.model, "error": repr(error)}
    answered = status == _OK and last == b"data: [DONE]"
    row: dict[str, Any] = {"at": round(request.at, 2), "model": request.model, "first_token_seconds": round(first or 0.0, 3)}
    if heartbeats:
        row["heartbeats"] = heartbeats
    return row if answered else row | {"error": f"{status}: {last[:200].decode(errors='replace')}"}


async def _watch(home: Home, looks: Counter[str]) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        found = await asyncio.to_thread(_differences, home)
        if found:
            await asyncio.sleep(_AGAIN_SECONDS)
            found &= await asyncio.to_thread(_differences, home)
        if found:
            print(f"{time.strftime('%X')} the ledger differs: {sorted(found)}", flush=True)
        looks["differs" if found else "same"] += 1


def _differences(home: Home) -> set[str]:
    """Between what the ledger grants and the processes that are there."""
    running = ProcessLauncher(home.path).find_started()
    instances = {one.id: one for one in read_instances(home.ledger_file)}
    granted = sum(grant.memory_bytes for one in instances.values() for grant in one.grants)
    ready = {one.id for one in instances.values() if one.state is InstanceState.READY}
    held = {one.id for one in instances.values() if one.grants}
    found = {f"{name} is ready and does not run" for name in ready - running.keys()}
    found |= {f"{name} runs and is granted nothing" for name in running.keys() - held}
    if granted > _GPU_BYTES:
        found.add(f"{granted} bytes are granted")
    return found


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [row["first_token_seconds"] for row in rows if "error" not in row]
    return {
        "requests": len(rows),
        "not_answered": sum("error" in row for row in rows),
        "errors": dict(Counter(row["error"] for row in rows if "error" in row)),
        "in_time_percent": round(100 * sum(seconds <= _IN_TIME_SECONDS for seconds in times) / len(rows), 2),
        "first_token_p50_seconds": round(percentile(times, 50), 3),
        "first_token_p95_seconds": round(percentile(times, 95), 3),
        "first_token_p99_seconds": round(percentile(times, 99), 3),
        "first_token_longest_seconds": max(times),
        "with_heartbeats": sum("heartbeats" in row for row in rows),
    }


def _read_wakes(log: Path) -> list[float]:
    """Seconds of those that found room, from the beginning until the model was ready."""
    found = [json.loads(line) for line in log.read_text().splitlines() if '"wake.ended"' in line]
    return [one["seconds"] for one in found if one["problem"] is None]


if __name__ == "__main__":
    os.environ.setdefault("AIMGPU_CACHE", str(Path.home() / ".cache" / "aimgpu"))
    main()
