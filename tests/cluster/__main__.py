"""``make cluster``: a Kubernetes cluster to touch, with two pods that share a simulated GPU. Ctrl-C removes it.

So does any other end of this process.
With ``ARGS=--chart`` the Helm chart is installed in it instead, as the deployment guide does, with images of stand-in engines.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.cluster import PYTHON_IMAGE, Cluster
from tests.cluster.requirements import missing
from tests.downloads import DownloadFailed
from tests.kubernetes.node_agent import claim_template, gpu_pod, running_agent, share

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "aim-gpu-sharing"
STAND_IN_IMAGE = "localhost/vllm:stand-in"  # not :latest, which the kubelet would pull again
ENGINE_IMAGES = (STAND_IN_IMAGE, "docker.io/vllm/vllm-openai-rocm:latest", "docker.io/vllm/vllm-openai:latest")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--simulated", default="MI300X:1", help="GPUs of the first node, such as MI300X:2,H200:1")
    parser.add_argument("--chart", action="store_true", help="install the Helm chart and images of stand-in engines")
    given = parser.parse_args()
    if reason := missing():
        sys.stderr.write(f"error: {reason}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _print("Starting Kubernetes. The first time it is built, which takes ten CPU minutes; later starts take one minute.")
    with Cluster(nodes=given.nodes, proxy=True) as cluster:
        if given.chart:
            _install_chart(cluster, given.simulated)
            _wait_for_interrupt(
                cluster, "Try: kubectl get gpunodes, and docs/how-to/deploy-from-a-clean-node.md from its second step."
            )
            return 0
        with running_agent(cluster, "--simulated", given.simulated, "--repartition"):
            cluster.apply(claim_template("half", share("90Gi", "50")))
            cluster.apply([gpu_pod(name, "half") for name in ("first", "second")])
            for name in ("first", "second"):
                cluster.wait(f"pod/{name}", "condition=Ready")
            _print(cluster.kubectl("get", "pods,resourceclaims,resourceslices", "--output=wide"))
            _wait_for_interrupt(cluster, "Try: kubectl exec first -- env | grep AIM")
    return 0


def _install_chart(cluster: Cluster, simulated: str) -> None:
    """From the checkout, whose code the pods run; engines are stand-ins, which answer without a model."""
    cluster.add_image("registry.k8s.io/pause:3.10")
    cluster.add_image(*ENGINE_IMAGES, programs={"vllm": "tests.programs.fake_vllm"})
    repository, _, tag = PYTHON_IMAGE.rpartition(":")
    values = [
        "image.pullPolicy=Never",
        f"image.repository={repository}",
        f"image.tag={tag}",
        "agent.repartition=true",
        "agent.layouts=memory",
    ]
    values += [r"agent.pod.nodeSelector.kubernetes\.io/hostname=node1"]  # nodes of one machine have one state folder
    values += ["agent.simulated=" + simulated.replace(",", r"\,"), f"agent.stateFolder={cluster.folder}/agent-state"]
    command = [str(Path(sys.executable).with_name("helm")), "install", "sharing", str(CHART), "--wait", "--timeout=10m"]
    command += ["--namespace=gpu-sharing", "--create-namespace", *(f"--set={value}" for value in values)]
    subprocess.run(command, env=os.environ | {"KUBECONFIG": str(cluster.outside_kubeconfig)}, check=True)


def _wait_for_interrupt(cluster: Cluster, hint: str) -> None:
    _print(f"export KUBECONFIG={cluster.outside_kubeconfig}")
    programs = f"{Path(sys.executable).parent}:{Path(cluster.program('kubectl')).parent}"
    _print(f"export PATH={programs}:$PATH")
    _print(hint)
    _print("Ctrl-C removes the cluster.")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DownloadFailed as error:
        sys.exit(f"error: {error}")
