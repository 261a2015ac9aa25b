"""The manifests of examples/kubernetes, as they are and with stand-ins for the engines."""

from pathlib import Path
from typing import Any

import yaml
from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))


def read_example(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def with_stand_in(item: dict[str, Any]) -> dict[str, Any]:
    """A pod whose containers sleep instead of running an engine."""
    for container in item["spec"]["containers"]:
        container |= {"image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
        container.pop("args", None)
    item["spec"]["terminationGracePeriodSeconds"] = 0
    return item


def granted_bytes(cluster: Cluster, pod: str, namespace: str) -> int:
    """What its container sees as its cap."""
    environment = dict(line.partition("=")[::2] for line in cluster.exec(pod, "env", namespace=namespace).splitlines())
    return int(environment["AIMGPU_MEMORY_BYTES"])
