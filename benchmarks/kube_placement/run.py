"""A quarter of openb on a real API server and kube-scheduler: our placement beside kube-scheduler alone.

As root: ``make bench-kube-placement ARGS="--traces FOLDER"``, with openb's CSV files in the folder. Nodes report to be ready
and have no kubelet: pods are bound and never run. Claims are made before their pods. Each run has a cluster of its own. Ours is
the whole way: admission gates every pod, the operator with the chart's rights places it, gates are kept (`waiting: never`).
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission
from tests.kubernetes.placed_nodes import add_node, claim_body, node_body, pod_body, slice_bodies

from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror
from aimgpu.kubernetes.api.resources import LEASES, PODS, RESOURCE_CLAIMS
from aimgpu.kubernetes.cluster.operator.access_rules import cluster_role_rules, namespaced_rules, placement_rules, role_rules
from aimgpu.kubernetes.cluster.placer.policy import placement_policy
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions
from aimgpu.kubernetes.vocabulary.names import GATE, HINT, OPERATOR_ACCOUNT, PLACER_LEASE
from benchmarks.kube_node.scheduling import create_all
from benchmarks.kube_placement.score import Binding, score
from benchmarks.kube_placement.trace import TraceNode, TracePod, draw
from benchmarks.recording import write_result

QUIET_SECONDS = 20.0  # without a pod bound, after the last was made
PLACE = "default"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with openb's CSV files")
    parser.add_argument("--part", type=int, default=4, help="one node of so many (default: 4)")
    parser.add_argument("--seeds", default="2001,2002,2003")
    parser.add_argument("--ways", default="stock,ours", help="in which order, for each seed")
    parser.add_argument("--pods", type=int, help="only the first so many: for a trial, which is not written")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in given.seeds.split(","):
        nodes, pods = draw(given.traces, part=given.part, seed=int(seed))
        for way in given.ways.split(","):
            with Cluster() as cluster:
                row = {"way": way, "seed": int(seed), **_measure(cluster, nodes, pods[: given.pods], ours=way == "ours")}
            print({key: value for key, value in row.items() if key != "bindings"}, flush=True)
            rows.append(row)
    if given.pods is None:
        write_result("kube-placement", _figures(rows), rows, command=_command(given))


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds."""
    names = ("allocated_percent", "bound_per_second", "scheduler_cpu_ms", "operator_cpu_ms", "refused_that_fit")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    figures: dict[str, Any] = {"commit": commit, "nodes": rows[0]["nodes"], "gpus": rows[0]["gpus"]}
    for way in dict.fromkeys(row["way"] for row in rows):
        chosen = [row for row in rows if row["way"] == way]
        figures |= {f"{way}.{name}": round(statistics.mean(row[name] for row in chosen), 2) for name in names}
    return figures


def _command(given: argparse.Namespace) -> str:
    return (
        f"python -m benchmarks.kube_placement.run --traces FOLDER --part {given.part} --seeds {given.seeds} --ways {given.ways}"
    )


def _measure(cluster: Cluster, nodes: Sequence[TraceNode], pods: Sequence[TracePod], *, ours: bool) -> dict[str, Any]:
    cluster.apply([*device_classes(), *custom_resource_definitions()])
    cluster.wait_until_served("gpunodes.aim.amd.com", "gpushares.aim.amd.com", "partitionplans.aim.amd.com")
    cluster.kubectl("cordon", "node1")
    with ExitStack() as stack:
        programs = {"scheduler": cluster.process("kube-scheduler")}
        if ours:
            rules = [*cluster_role_rules(), *namespaced_rules(), *placement_rules()]
            kubeconfig = make_account(cluster, OPERATOR_ACCOUNT, rules, role_rules())
            cluster.apply(list(placement_policy(NAMESPACE)))
            cluster.kubectl("label", "namespace", PLACE, "aim.amd.com/placement=enabled")
            stack.enter_context(running_admission(cluster, placed="all"))
            command = [sys.executable, "-m", "aimgpu.kubernetes.cluster.operator", "--namespace", NAMESPACE]
            command += ["--placement=hint", "--placement-waiting=never"]
            programs["operator"] = cluster.start("operator", command, env={"KUBECONFIG": str(kubeconfig)})
        # It would find out that nobody answers for the nodes. Claims are named: nothing else is needed of it.
        cluster.process("kube-controller-manager").stop()
        return asyncio.run(_place(cluster, nodes, pods, {name: process.pid for name, process in programs.items()}))


async def _place(
    cluster: Cluster, nodes: Sequence[TraceNode], pods: Sequence[TracePod], programs: dict[str, int]
) -> dict[str, Any]:
    async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
        await create_all(_add(client, number, node) for number, node in enumerate(nodes))
        claims = [(number, pod) for number, pod in enumerate(pods) if pod.gpus]
        await create_all(
            client.create(RESOURCE_CLAIMS, claim_body(f"c{number:05d}", pod.milli, pod.gpus), PLACE) for number, pod in claims
        )
        if "operator" in programs:
            await _until_gated(client)
        times: dict[str, float] = {}
        mirror = Mirror(client, PODS, lambda pod: pod, namespaces=(PLACE,), on_change=_noting(times))
        following = asyncio.ensure_future(mirror.run())
        await mirror.synced.wait()
        begin, before = time.monotonic(), {name: _cpu(pid) for name, pid in programs.items()}
        for number, pod in enumerate(pods):  # one after the other: their order is the trace's
            await client.create(PODS, _pod(number, pod), PLACE)
        made = time.monotonic()
        while time.monotonic() - max([made, *times.values()]) < QUIET_SECONDS:  # noqa: ASYNC110 - what comes is not known
            await asyncio.sleep(0.5)
        cpu = {name: 1000 * (_cpu(pid) - before[name]) / len(pods) for name, pid in programs.items()}
        found = await _bindings(client, nodes, list(mirror.kept.values()))
        following.cancel()
        lease = await client.find(LEASES, PLACER_LEASE, NAMESPACE)
    result = score(nodes, pods, found)
    gated = sum(any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or ()) for pod in mirror.kept.values())
    hinted = [pod for pod in mirror.kept.values() if HINT in (pod["metadata"].get("annotations") or {})]
    return {
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "pods": len(pods),
        **asdict(result),
        "gated_at_the_end": gated,
        "placed_elsewhere": sum(pod["metadata"]["annotations"][HINT] != pod["spec"].get("nodeName") for pod in hinted),
        "counted": (lease or {}).get("metadata", {}).get("annotations", {}),
        "seconds": round(max(times.values()) - begin, 1),
        "bound_per_second": round(len(times) / (max(times.values()) - begin), 1),
        "scheduler_cpu_ms": round(cpu["scheduler"], 2),
        "operator_cpu_ms": round(cpu.get("operator", 0.0), 2),
        "load_average": round(os.getloadavg()[0], 1),
        "bindings": ";".join(
            f"{number}:{node}:{','.join(map(str, places))}" for number, (node, places) in sorted(found.items())
        ),
    }


async def _add(client: Client, number: int, node: TraceNode) -> None:
    amounts = {"cpu": f"{node.cpu_millis}m", "memory": f"{node.memory_mib}Mi", "pods": "1000"}
    await add_node(client, node_body(f"n{number:05d}", amounts), node.gpus)


async def _until_gated(client: Client) -> None:
    """Admission has seen the placer, and gates a pod."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        made = await client.request("POST", PODS.path(PLACE), body=pod_body("probe", {}), query={"dryRun": "All"})
        if made["spec"].get("schedulingGates"):
            return
        await asyncio.sleep(0.2)
    raise TimeoutError("no pod is gated")


def _noting(times: dict[str, float]) -> Any:  # noqa: ANN401 - a callback
    def saw(key: Key, _before: Object | None, now: Object | None) -> None:
        if now is not None and now["spec"].get("nodeName"):
            times.setdefault(key[1], time.monotonic())

    return saw


def _pod(number: int, pod: TracePod) -> Object:
    amounts = {"cpu": f"{pod.cpu_millis}m", "memory": f"{pod.memory_mib}Mi"}
    return pod_body(f"p{number:05d}", amounts, f"c{number:05d}" if pod.gpus else "")


async def _bindings(client: Client, nodes: Sequence[TraceNode], pods: Sequence[Object]) -> dict[int, Binding]:
    claims, _ = await client.list(RESOURCE_CLAIMS, PLACE)
    results = {
        one["metadata"]["name"]: ((one.get("status") or {}).get("allocation") or {}).get("devices", {}).get("results") or ()
        for one in claims
    }
    names: dict[int, list[str]] = {}
    found: dict[int, Binding] = {}
    for pod in pods:
        name, place = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if not place:
            continue
        node = int(place[1:])
        count = nodes[node].gpus
        if count not in names:
            names[count] = [device["name"] for body in slice_bodies("any", count) for device in body["spec"]["devices"]]
        mine = results.get(name.replace("p", "c"), ())
        if any(one["pool"] != place for one in mine):
            raise ValueError(f"{name} is on {place}, and its devices are not")
        found[int(name[1:])] = node, tuple(names[count].index(one["device"]) for one in mine)
    return found


def _cpu(pid: int) -> float:
    """Seconds, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
