"""The openb pods as one snapshot for KAI-Scheduler's snapshot tool: the same pending pods for both, one cycle, no API server.

The tool replays a cycle from a zipped JSON snapshot with fake clients and says how long the allocate action took; its log names
every bind. A share becomes the annotation gpu-fraction; all pods are in one queue without limits.
"""

import json
import re
import resource
import subprocess
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.placement.openb import Engine

SEED = 42
TIMEOUT_SECONDS = 1200.0

NAMESPACE = "bench"
QUEUE, PARENT = "queue", "parent"
_BIND = re.compile(r"Creating bind request for task <bench/p(\d+)> to node <([^>]+)>")
_UNLIMITED = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
_PLUGINS = (
    *("predicates", "proportion", "priority", "nodeavailability", "gpusharingorder", "gpupack", "resourcetype"),
    *("taskorder", "nodeplacement", "sg-nodelocalgreedy", "sg-multinodegang"),
)


def race_openb(tool: Path, scorer: Any, figures: dict[str, float], rows: list[dict[str, object]]) -> None:  # noqa: ANN401
    """Pods up to 130 % of the GPUs, seed 42, all pending at once: what each places, and how long deciding takes."""
    cluster = scorer.Cluster()
    trace = scorer.Trace("default", cluster.models)
    order, _ = trace.arrivals(SEED, cluster)
    pods = [int(pod) for pod in order]
    cluster.reset()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.zip"
        write_snapshot(path, cluster, trace, pods)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, bound = run_tool(tool, path, TIMEOUT_SECONDS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    theirs = 100 * sum(int(trace.demand[pods[number]]) for number in bound) / cluster.total
    engine = Engine(cluster, trace, None)
    start, start_cpu = time.perf_counter(), time.process_time()
    placed = [pod for pod in pods if engine.decide(int(trace.kind[pod]), int(trace.mem[pod])) is not None]
    ours_seconds, ours_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    ours = 100 * sum(int(trace.demand[pod]) for pod in placed) / cluster.total
    figures["race.openb.kai.alloc130"], figures["race.openb.ours.alloc130"] = round(theirs, 2), round(ours, 2)
    figures["race.openb.kai.decisions_per_second"] = round(len(pods) / seconds)
    figures["race.openb.ours.decisions_per_second"] = round(len(pods) / ours_seconds)
    figures["race.openb.times_faster"] = round(seconds / ours_seconds, 1)
    figures["race.openb.cpu_times_less"] = round(cpu / ours_cpu, 1)
    rows.append(
        {
            "benchmark": "openb default, 1,213 nodes, all pods pending, allocate action",
            "pods": len(pods),
            "kai": {"seconds": seconds, "process_cpu_seconds": round(cpu, 1), "placed": len(bound)},
            "ours": {"seconds": ours_seconds, "cpu_seconds": ours_cpu, "placed": len(placed)},
        }
    )


def write_snapshot(path: Path, cluster: Any, trace: Any, pods: list[int]) -> None:  # noqa: ANN401 - the scorer's types
    """Nodes as they are, and these pods, all pending, in this order of creation."""
    nodes = [
        _node(f"n{number:05d}", int(gpus), int(cpu), int(mib))
        for number, (gpus, cpu, mib) in enumerate(zip(cluster.slots, cluster.cap_cpu, cluster.cap_mem, strict=True))
    ]
    arguments = {"nodeplacement": {"cpu": "binpack", "gpu": "binpack"}}
    plugins = [{"name": name, **({"arguments": arguments[name]} if name in arguments else {})} for name in _PLUGINS]
    document = {
        "config": {"actions": "allocate", "tiers": [{"plugins": plugins}]},
        "schedulerParams": {
            "schedulerName": "kai-scheduler",
            "partitionParams": {},
            "numOfStatusRecordingWorkers": 1,
            "useSchedulingSignatures": True,
        },
        "rawObjects": {
            "nodes": nodes,
            "pods": [_pod(number, trace, pod) for number, pod in enumerate(pods)],
            "podGroups": [_pod_group(number) for number in range(len(pods))],
            "queues": [_queue(PARENT, None), _queue(QUEUE, PARENT)],
            "priorityClasses": [],
        },
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("snapshot.json", json.dumps(document))


def run_tool(tool: Path, snapshot: Path, timeout_seconds: float) -> tuple[float, dict[int, str]]:
    """Seconds of the allocate action, and the node of every pod that was bound."""
    command = [str(tool), "--filename", str(snapshot), "--verbosity", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_seconds)
    output = done.stdout + done.stderr
    bound = {int(pod): node for pod, node in _BIND.findall(output)}
    summary = re.search(r'"allocate": (\d+)', output)
    if summary is None:
        raise RuntimeError(output[-2000:])
    return int(summary[1]) / 1000, bound


def _node(name: str, gpus: int, cpu_millis: int, memory_mib: int) -> dict[str, Any]:
    resources = {"cpu": f"{cpu_millis}m", "memory": f"{memory_mib}Mi", "nvidia.com/gpu": str(gpus), "pods": "1000"}
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": {"nvidia.com/gpu.count": str(gpus), "nvidia.com/gpu.memory": "16384"},
        },
        "spec": {},
        "status": {"capacity": resources, "allocatable": resources, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def _pod(number: int, trace: Any, pod: int) -> dict[str, Any]:  # noqa: ANN401
    gpus, milli = int(trace.ngpu[pod]), int(trace.milli[pod])
    requests = {"cpu": f"{int(trace.cpu[pod])}m", "memory": f"{int(trace.mem[pod])}Mi"}
    annotations = {"pod-group-name": f"g{number}"}
    if gpus and milli < 1000:  # noqa: PLR2004 - a whole GPU
        annotations["gpu-fraction"] = f"{milli / 1000:.3f}"
    elif gpus:
        requests["nvidia.com/gpu"] = str(gpus)
    container = {"name": "c", "image": "i", "resources": {"requests": requests, "limits": requests}}
    return {
        "metadata": {
            "name": f"p{number}",
            "namespace": NAMESPACE,
            "uid": f"p{number}",
            "annotations": annotations,
            "labels": {"kai.scheduler/queue": QUEUE},
            "creationTimestamp": _moment(number),
        },
        "spec": {"schedulerName": "kai-scheduler", "containers": [container]},
        "status": {"phase": "Pending"},
    }


def _pod_group(number: int) -> dict[str, Any]:
    metadata = {"name": f"g{number}", "namespace": NAMESPACE, "uid": f"g{number}", "creationTimestamp": _moment(number)}
    return {"metadata": metadata, "spec": {"minMember": 1, "queue": QUEUE}}


def _queue(name: str, parent: str | None) -> dict[str, Any]:
    resources = {"gpu": _UNLIMITED, "cpu": _UNLIMITED, "memory": _UNLIMITED}
    spec = {"resources": resources, **({"parentQueue": parent} if parent else {})}
    return {"metadata": {"name": name, "uid": name}, "spec": spec}


def _moment(number: int) -> str:
    hours, rest = divmod(number, 3600)
    return f"2026-01-01T{hours:02d}:{rest // 60:02d}:{rest % 60:02d}Z"
