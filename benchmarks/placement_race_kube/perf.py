"""One workload of scheduler_perf: the binary is run where its configuration lies, and its data items are read."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_DECIDING = ("PreFilter", "Filter", "PreScore", "Score")
_GPU = "nvidia.com/gpu"
_TIMEOUT_SECONDS = 1800


def run_perf(binary: Path, folder: Path, workload: str, *, etcd: Path) -> dict[str, float]:
    """Pods bound a second, and the mean milliseconds of deciding one: filters and scores, binding left out."""
    with TemporaryDirectory() as results:
        command = [
            *(str(binary), "-test.run=^$", "-test.benchtime=1x", f"-test.bench=^BenchmarkPerfScheduling$/{_exactly(workload)}"),
            *(f"-test.timeout={_TIMEOUT_SECONDS}s", "-perf-scheduling-label-filter=", f"-data-items-dir={results}"),
        ]
        settings = {"KUBE_CACHE_MUTATION_DETECTOR": "false", "ETCD_LOGLEVEL": "warn"}
        environment = os.environ | settings | {"PATH": f"{etcd.parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        files = sorted(Path(results).glob("*.json"))
        if done.returncode or not files:
            sys.exit(f"{workload}: {(done.stdout + done.stderr)[-4000:]}")
        items = json.loads(files[-1].read_text())["dataItems"]
    return read_items(items)


def read_items(items: list[dict[str, Any]]) -> dict[str, float]:
    throughput = next(item["data"] for item in items if item["labels"]["Metric"] == "SchedulingThroughput")
    points = {
        item["labels"]["extension_point"]: item["data"]["Average"]
        for item in items
        if item["labels"]["Metric"] == "scheduler_framework_extension_point_duration_seconds"
    }
    found = {"pods_per_second": throughput["Average"], "pods_per_second_p50": throughput["Perc50"]}
    found["decision_ms"] = sum(points.get(point, 0.0) for point in _DECIDING)
    return {**found, **{f"{point}_ms": mean for point, mean in sorted(points.items())}}


@contextmanager
def gpu_workload(load: Mapping[str, int]) -> Iterator[Path]:
    """A folder with a workload of our own: nodes with GPUs as an extended resource, and pods that want some."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "performance-config.yaml", [_configuration(load)])
        _write(folder / "node.yaml", _node(load))
        _write(folder / "pod.yaml", _pod(load))
        yield folder


def _exactly(workload: str) -> str:
    return "/".join(f"^{part}$" for part in workload.split("/"))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))  # JSON is YAML


def _configuration(load: Mapping[str, int]) -> dict[str, Any]:
    pods = {"opcode": "createPods", "podTemplatePath": "pod.yaml"}
    return {
        "name": "GPUs",
        "workloadTemplate": [
            {"opcode": "createNodes", "nodeTemplatePath": "node.yaml", "countParam": "$nodes"},
            {**pods, "countParam": "$before"},
            {**pods, "countParam": "$pods", "collectMetrics": True},
        ],
        "workloads": [
            {"name": f"{load['nodes']}Nodes", "params": {name: load[name] for name in ("nodes", "before", "pods")}},
        ],
    }


def _node(load: Mapping[str, int]) -> dict[str, Any]:
    amounts = _amounts(load, "node") | {"pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"generateName": "node-"},
        "spec": {},
        "status": {"capacity": amounts, "conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"},
    }


def _pod(load: Mapping[str, int]) -> dict[str, Any]:
    amounts = _amounts(load, "pod")
    container = {"name": "c", "image": "i", "resources": {"requests": amounts, "limits": amounts}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "pod-"}, "spec": {"containers": [container]}}


def _amounts(load: Mapping[str, int], whose: str) -> dict[str, str]:
    return {
        "cpu": f"{load[f'{whose}_cpu_millis']}m",
        "memory": f"{load[f'{whose}_memory_mib']}Mi",
        _GPU: str(load[f"{whose}_gpus"]),
    }
