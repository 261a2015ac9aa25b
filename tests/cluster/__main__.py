"""``make cluster``: a Kubernetes cluster to touch, with two pods that share a simulated GPU. Ctrl-C removes it."""

import argparse
import signal
import sys
import time

from tests.cluster.cluster import Cluster
from tests.cluster.requirements import missing
from tests.kubernetes.node_agent import claim_template, gpu_pod, running_agent, share


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--simulated", default="MI300X:1", help="GPUs of the first node, such as MI300X:2,H200:1")
    given = parser.parse_args()
    if reason := missing():
        sys.stderr.write(f"error: {reason}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (
        Cluster(nodes=given.nodes, proxy=True) as cluster,
        running_agent(cluster, "--simulated", given.simulated, "--repartition"),
    ):
        cluster.apply(claim_template("half", share("90Gi", "50")))
        cluster.apply([gpu_pod(name, "half") for name in ("first", "second")])
        for name in ("first", "second"):
            cluster.wait(f"pod/{name}", "condition=Ready")
        _print(f"KUBECONFIG={cluster.outside_kubeconfig}")
        _print(f"PATH={cluster.program('kubectl').rpartition('/')[0]}:$PATH")
        _print(cluster.kubectl("get", "pods,resourceclaims,resourceslices", "--output=wide"))
        _print("Try: kubectl exec first -- env | grep AIM")
        _print("Ctrl-C removes the cluster.")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
