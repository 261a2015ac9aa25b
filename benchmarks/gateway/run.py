"""What a gateway adds: ours with everything on, beside direct, nginx, LiteLLM, vllm-router and a bare aiohttp proxy.

All are up at once, in interleaved rounds; the median of the rounds counts. The engine and the caller are C programs on one
core, the gateway has another. On a shared machine read the ratios: the absolute times include the neighbours. `stream` is 50
chunks as fast as they go, which keeps every gateway at its limit; `paced` is a chunk every 10 ms, as tokens come; `offered` is
the former at the same rate for all, so that a gateway does not wait longer for the engine because it asks it for more.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.gateway.peers import Peer, make_before, make_peers
from benchmarks.recording import write_result

ROOT = Path(__file__).resolve().parents[2]
BODIES = {
    "json": {"model": "m", "messages": [{"role": "user", "content": "Say hello to everybody"}]},
    "stream": {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Say hello to everybody"}]},
    "offered": {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Say hello to everybody"}]},
    "paced": {"model": "m", "stream": True, "user": "paced", "messages": [{"role": "user", "content": "Say hello"}]},
}
OFFERED = 1000  # streams a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: str
    connections: int
    rate: int | None = None  # a second; None: each connection asks again when it has its answer

    @property
    def name(self) -> str:
        rate = "" if self.rate in {None, OFFERED} else f"_{self.rate}"
        return f"{self.kind}_{self.connections}{rate}"

    @property
    def load(self) -> str:
        return str(self.connections) if self.rate is None else f"{self.connections}@{self.rate}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=list(BODIES), default=list(BODIES))
    parser.add_argument("--rates", type=int, nargs="+", default=[OFFERED], help="of `offered`: streams a second")
    parser.add_argument("--only", nargs="+", help="these gateways alone")
    parser.add_argument("--before", type=Path, help="another checkout, whose gateway runs beside ours as `before`")
    given = parser.parse_args()
    cases = [Case(kind=kind, connections=count) for kind in given.kinds if kind != "offered" for count in given.connections]
    if "offered" in given.kinds:
        cases += [Case(kind="offered", connections=max(given.connections), rate=rate) for rate in given.rates]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        tool = _build(folder)
        upstream = stack.enter_context(_engine(tool))
        peers, missing = make_peers(upstream, folder)
        peers = [peer for peer in peers if not given.only or peer.name in given.only]
        if given.before is not None:
            peers.append(make_before(upstream, given.before.resolve()))
        running = {peer.name: stack.enter_context(_running(peer)) for peer in peers}
        targets: list[tuple[str, Peer | None]] = [("direct", None), *((peer.name, peer) for peer in peers)]
        rows = []
        for round_number in range(given.rounds):
            for case in cases:
                for name, peer in targets:
                    port = upstream if peer is None else peer.port
                    process = None if peer is None else running[name]
                    row = _measure(
                        tool,
                        folder,
                        case,
                        port,
                        peer.header if peer else None,
                        process,
                        given.seconds * (peer.times_longer if peer else 1),
                    )
                    rows.append({"gateway": name, "case": case.name, "round": round_number} | row)
                    print(f"{round_number} {case.name:10} {name:13} {row}", flush=True)
        memory = {name: _memory_mb(pid) for name, pid in running.items()}
    figures = _figures(rows, memory)
    figures["left_out"] = missing
    if not given.only and given.before is None:
        write_result("gateway", figures, rows, packages=("uvicorn", "httptools", "uvloop", "aiohttp", "orjson"))
    _print_table(figures)


def _build(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("a C compiler is needed")
    tool = folder / "http_load"
    subprocess.run([compiler, "-O2", "-o", str(tool), str(Path(__file__).with_name("http_load.c"))], check=True)
    for name, body in BODIES.items():
        (folder / name).write_text(json.dumps(body))
    return tool


@contextlib.contextmanager
def _engine(tool: Path) -> Iterator[int]:
    with subprocess.Popen([*_on_core(0), str(tool), "serve"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def _running(peer: Peer) -> Iterator[int]:
    argv = [*_on_core(1), *peer.argv]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        deadline = time.monotonic() + peer.start_seconds
        while not _answers(peer):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{peer.name} did not start: {' '.join(peer.argv)}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(peer: Peer) -> bool:
    headers = {"content-type": "application/json"}
    if peer.header:
        name, _, value = peer.header.partition(": ")
        headers[name] = value
    url = f"http://127.0.0.1:{peer.port}/v1/chat/completions"
    try:
        with urlopen(Request(url, json.dumps(BODIES["json"]).encode(), headers), timeout=5) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004
    except (URLError, OSError):
        return False


def _measure(  # noqa: PLR0913, PLR0917  # one measurement has this many sides
    tool: Path, folder: Path, case: Case, port: int, header: str | None, process: int | None, seconds: float
) -> dict[str, Any]:
    before = _cpu_seconds(process)
    argv = [str(tool), "load", str(port), case.load, str(seconds), str(folder / case.kind)]
    command = [*_on_core(0), *argv, *([header] if header else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    after = _cpu_seconds(process)
    if before is not None and after is not None:
        row["cpu_us_per_request"] = round((after - before) / (row["requests"] / 0.9) * 1e6, 1)
    return row


def _on_core(core: int) -> list[str]:
    """The command that pins what follows it; nothing where there is one core or no taskset."""
    program = shutil.which("taskset")
    return [program, "-c", str(core)] if program and (os.cpu_count() or 1) > 1 else []


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in _tree(int(child)))]


def _cpu_seconds(pid: int | None) -> float | None:
    if pid is None:
        return None
    ticks = 0
    for one in _tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    kib = 0
    for one in _tree(pid):
        for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                kib += int(line.split()[1])
    return round(kib / 1024, 1)


def _figures(rows: list[dict[str, Any]], memory: dict[str, float]) -> dict[str, Any]:
    """Added times are against the direct measurement of the same round and case."""
    direct = {(row["case"], row["round"]): row for row in rows if row["gateway"] == "direct"}
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["gateway"], row["case"]), []).append(row)
    figures: dict[str, Any] = {}
    for (gateway, case), found in grouped.items():
        entry = {
            "requests_per_second": statistics.median(row["requests_per_second"] for row in found),
            "first_byte_ms": statistics.median(row["first_byte_p50_ms"] for row in found),
        }
        if gateway != "direct":
            for part in ("p50", "p99"):
                added = (row[f"{part}_ms"] - direct[case, row["round"]][f"{part}_ms"] for row in found)
                entry[f"added_{part}_ms"] = round(statistics.median(added), 3)
            entry["cpu_us_per_request"] = statistics.median(row["cpu_us_per_request"] for row in found)
        figures.setdefault(gateway, {})[case] = entry
    for gateway, megabytes in memory.items():
        figures[gateway]["rss_mb"] = megabytes
    return figures


def _print_table(figures: dict[str, Any]) -> None:
    print(f"{'gateway':13} {'case':10} {'added p50':>10} {'added p99':>10} {'req/s':>9} {'first byte':>11} {'CPU us':>8}")
    for gateway, cases in figures.items():
        for case, entry in cases.items():
            if isinstance(entry, dict) and "first_byte_ms" in entry:
                added = (entry.get("added_p50_ms", 0.0), entry.get("added_p99_ms", 0.0))
                line = f"{gateway:13} {case:10} {added[0]:10.3f} {added[1]:10.3f} {entry['requests_per_second']:9.0f} "
                print(line + f"{entry['first_byte_ms']:11.3f} {entry.get('cpu_us_per_request', 0):8.1f}")


if __name__ == "__main__":
    main()
