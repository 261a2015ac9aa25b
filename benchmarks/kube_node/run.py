"""The node agent on a real cluster: what a claim adds to a pod's start, prepares a minute, memory, and scheduling rates.

As root: ``make bench-kube-node``. Parts can be chosen: ``ARGS="--only start churn"``.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.kubernetes.node_agent import claim_template, gpu_pod, running_agent, share

from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import PODS
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.dra_driver.checkpoint import Checkpoint
from aimgpu.kubernetes.node.dra_driver.claims import Allocated, DraClaim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.grants import NodeGrants
from aimgpu.kubernetes.node.layouts import NodeLayouts
from aimgpu.ledger import Ledger
from benchmarks.kube_node.calls import measure_calls
from benchmarks.kube_node.churn import WAIT_SECONDS, is_running, measure_churn, plain_pod, wait_for_pods
from benchmarks.kube_node.kills import measure_kills
from benchmarks.kube_node.scheduling import measure_scheduling
from benchmarks.recording import RESULTS, write_result

SHARE_MIB = 256
PARTS = ("start", "churn", "prepare", "calls", "scheduling", "kills")
_NOT_FIGURES = ("part", "date", "load_average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--claims", type=int, default=100, help="allocated claims that the calls go round")
    parser.add_argument("--call-seconds", type=float, default=60.0)
    parser.add_argument("--calls-at-once", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="*", default=[500, 1000])
    parser.add_argument("--scheduled-pods", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill-rounds", type=int, default=200)
    parser.add_argument("--kill-minutes", type=float, default=120.0, help="no round of kills begins after this")
    parser.add_argument("--kill-clusters", type=int, default=1, help="clusters that share the rounds of kills")
    given = parser.parse_args()
    measured: dict[str, dict[str, Any]] = {}
    for part in given.only:
        found = _measure(part, given)
        measured[part] = {"part": part, "date": _now(), "load_average": round(os.getloadavg()[0], 1), **found}
        for name, value in found.items():
            print(f"{name}: {value}")
    kept = _read_kept(given.only) | measured  # read last: parts may be measured side by side
    figures = {name: value for row in kept.values() for name, value in row.items() if name not in _NOT_FIGURES}
    write_result("kube-node", figures, list(kept.values()))


def _measure(part: str, given: argparse.Namespace) -> dict[str, float]:
    if part == "prepare":
        return measure_prepare(given.pods)
    if part == "scheduling":
        return {name: value for nodes in given.nodes for name, value in _scheduling(nodes, given).items()}
    if part == "kills":
        return measure_kills(given.kill_rounds, 60 * given.kill_minutes, given.kill_clusters)
    with Cluster() as cluster, running_agent(cluster, "--simulated", "MI300X:1") as agent:
        cluster.apply(claim_template("share", share(f"{SHARE_MIB}Mi")))
        if part == "start":
            return asyncio.run(measure_starts(cluster, given.starts))
        if part == "calls":
            return measure_calls(cluster, agent, given.claims, given.call_seconds, given.calls_at_once)
        return asyncio.run(measure_churn(cluster, agent, given.pods, given.batch))


def _scheduling(nodes: int, given: argparse.Namespace) -> dict[str, float]:
    row = measure_scheduling(nodes, given.scheduled_pods, given.rounds)
    return {
        f"scheduled_per_second{suffix}.{nodes}": row[f"{name}_per_second"]
        for name, suffix in (("two_devices", ""), ("single_device", "_single_device"), ("without_claims", "_without_claims"))
    } | {
        f"scheduler_cpu_ms{suffix}.{nodes}": row[f"{name}_cpu_ms"]
        for name, suffix in (("two_devices", ""), ("single_device", "_single_device"), ("without_claims", "_without_claims"))
    }


def _read_kept(only: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows of parts that are not measured this time: each says when and under which load it was."""
    path = RESULTS / "kube-node.json"
    if not path.exists():
        return {}
    return {row["part"]: row for row in json.loads(path.read_text())["rows"] if row["part"] not in only}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def measure_prepare(count: int) -> dict[str, float]:
    """The driver alone, in this process: claims prepared one after the other while all stay prepared, then undone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hardware = SimulatedHardware([("MI300X", 1)], folder / "gpus.json")
        ledger = Ledger.open(folder / "ledger.db")
        grants = NodeGrants(
            hardware=hardware, ledger=ledger, isolator=MechanismChooser((HardwareBoundary(), EngineFlags())), node="n"
        )
        driver = Preparation(
            hardware=hardware,
            grants=grants,
            layouts=NodeLayouts(hardware=hardware, ledger=ledger, allowed=False),
            checkpoint=Checkpoint(ledger),
            specs=SpecFolder("gpu.aim.amd.com/claim", folder / "cdi"),
            boot_id="boot",
        )
        claims = [_claim(number) for number in range(count)]
        prepare = [_milliseconds(lambda claim=claim: driver.prepare(claim)) for claim in claims]
        undo = [_milliseconds(lambda claim=claim: driver.unprepare(claim.uid)) for claim in claims]
        ledger.close()
    return {
        "prepare_ms": round(statistics.median(prepare), 2),
        "prepare_p99_ms": round(statistics.quantiles(prepare, n=100)[98], 2),
        "unprepare_ms": round(statistics.median(undo), 2),
        "prepare_and_unprepare_per_minute": round(60_000 * count / (sum(prepare) + sum(undo))),
    }


async def measure_starts(cluster: Cluster, count: int) -> dict[str, float]:
    """Pods with and without a claim in turns: from the request that creates one to the first sight of a running container."""
    plain: list[float] = []
    claimed: list[float] = []
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        for number in range(count):
            for into, body in (
                (plain, plain_pod(f"plain-{number}")),
                (claimed, gpu_pod(f"claim-{number}", "share")),
            ):
                into.append(await _time_to_run(client, body))
    return {
        "start_ms": round(statistics.median(plain)),
        "start_with_claim_ms": round(statistics.median(claimed)),
        "start_added_ms": round(statistics.median(claimed) - statistics.median(plain)),
        "start_added_p90_ms": round(statistics.quantiles(claimed, n=10)[8] - statistics.quantiles(plain, n=10)[8]),
    }


async def _time_to_run(client: Client, body: dict[str, Any]) -> float:
    name = body["metadata"]["name"]
    begin = time.monotonic()
    watching = asyncio.create_task(_seen_running(client, name))
    await client.create(PODS, body, "default")
    await asyncio.wait_for(watching, WAIT_SECONDS)
    taken = 1000 * (time.monotonic() - begin)
    await client.delete(PODS, name, "default")
    await wait_for_pods(client, [name], running=False)
    return taken


async def _seen_running(client: Client, name: str) -> None:
    async for event in client.watch(PODS, "default", fields=f"metadata.name={name}"):
        if event.object and is_running(event.object):
            return


def _claim(number: int) -> DraClaim:
    one = Allocated(request="gpu", pool="n", device="sim-mi300x-0-shared", share_id=f"s{number}", memory_bytes=SHARE_MIB << 20)
    return DraClaim(uid=f"uid-{number}", namespace="default", name=f"claim-{number}", allocated=(one,))


def _milliseconds(act: Any) -> float:  # noqa: ANN401 - a call without arguments
    begin = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
