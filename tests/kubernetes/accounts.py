"""Service accounts with the rights that the chart gives them, and kubeconfigs that carry their tokens."""

from pathlib import Path
from typing import Any

import yaml
from tests.cluster.cluster import Cluster

NAMESPACE = "aim-gpu-sharing"
_RBAC = "rbac.authorization.k8s.io"


def make_account(cluster: Cluster, name: str, cluster_rules: list[dict[str, Any]], rules: list[dict[str, Any]]) -> Path:
    """Its kubeconfig, for programs inside the cluster's network."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}, NAMESPACE)
    for kind, granted in (("ClusterRole", cluster_rules), ("Role", rules)):
        scope = "default" if kind == "ClusterRole" else NAMESPACE
        cluster.apply({"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": {"name": name}, "rules": granted}, scope)
        binding = {
            "apiVersion": f"{_RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
        }
        cluster.apply(binding, scope)
    token = cluster.kubectl("create", "token", name, f"--namespace={NAMESPACE}", "--duration=24h").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = cluster.folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
