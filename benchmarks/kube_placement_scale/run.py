"""The placer's own part at scale: a decision's time and the memory of what it keeps, fed as its mirrors feed it.

``make bench-kube-placement-scale``: 5,000 nodes with 8 GPUs and 50,000 pods with shares. No API server takes part, so what the
client costs is not in here. Seconds are of CPU time.
"""

import argparse
import resource
import statistics
import time

import numpy as np
from tests.kubernetes.placed_nodes import Object, claim_body, node_body, pod_body, slice_bodies

from aimgpu.kubernetes.cluster.placer.cluster_fleet import ClusterFleet
from aimgpu.kubernetes.cluster.placer.gpus import read_claim
from aimgpu.kubernetes.cluster.placer.pods import PodView, read_pod
from aimgpu.kubernetes.cluster.placer.rules import read_node
from aimgpu.kubernetes.vocabulary.names import DRIVER, GATE
from benchmarks.recording import write_result

GPUS, DECISIONS, PLACE = 8, 300, "a"
AMOUNTS = {"cpu": "96", "memory": "800Gi", "pods": "1000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=50000)
    given = parser.parse_args()
    draw, fleet, begin = np.random.default_rng(1), ClusterFleet(), time.process_time()
    for number in range(given.nodes):
        name = f"n{number:05d}"
        fleet.put_node(name, read_node(node_body(name, AMOUNTS)))
        for body in slice_bodies(name, GPUS):
            fleet.put_slice(body["metadata"]["name"], dict(body["spec"]))
    devices = [device["name"] for body in slice_bodies("any", GPUS) for device in body["spec"]["devices"]]
    for number in range(given.pods):
        node, device = f"n{number % given.nodes:05d}", devices[number // given.nodes % GPUS]
        _put(fleet, f"b{number}", int(draw.choice((100, 125, 250))), {"cpu": "1", "memory": "4Gi"}, (node, device))
    fed = time.process_time()
    fleet.waiting()
    seconds = [_decide(fleet, f"w{number}", draw) for number in range(DECISIONS)]
    built, later = seconds[0], sorted(seconds[1:])
    figures = {
        "nodes": given.nodes,
        "gpus": GPUS * given.nodes,
        "pods": given.pods,
        "fed_seconds": round(fed - begin, 1),
        "first_decision_seconds": round(built, 2),  # builds the engine's arrays, as after a restart
        "decision_ms": round(1000 * statistics.mean(later), 3),
        "decision_p99_ms": round(1000 * later[len(later) * 99 // 100], 3),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(figures)
    write_result("kube-placement-scale", figures, packages=("numpy",))


def _put(fleet: ClusterFleet, name: str, milli: int, amounts: dict[str, str], at: tuple[str, str] | None = None) -> PodView:
    """A pod that is bound with its share of a device, `at` a node and a device, or one that waits."""
    claim = claim_body(f"c-{name}", milli)
    placed: Object = {"schedulingGates": [{"name": GATE}]}
    if at is not None:
        placed = {"nodeName": at[0]}
        exactly = claim["spec"]["devices"]["requests"][0]["exactly"]
        result = {"driver": DRIVER, "pool": at[0], "device": at[1], "request": "gpu"}
        result["consumedCapacity"] = exactly["capacity"]["requests"]
        claim["status"] = {"allocation": {"devices": {"results": [result]}}}
    fleet.put_claim((PLACE, f"c-{name}"), read_claim(claim))
    pod = pod_body(name, amounts, f"c-{name}", **placed)
    pod["metadata"] |= {"namespace": PLACE, "uid": name, "creationTimestamp": name}
    fleet.put_pod((PLACE, name), view := read_pod(pod))
    return view


def _decide(fleet: ClusterFleet, name: str, draw: np.random.Generator) -> float:
    view = _put(fleet, name, int(draw.choice((100, 250, 500, 1000))), {"cpu": "4", "memory": "16Gi"})
    begin = time.process_time()
    fleet.choose(view)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
