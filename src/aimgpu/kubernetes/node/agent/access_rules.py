"""What the node agent may do in the API: the rules of its ClusterRole, as small as they can be."""

from typing import Any

from aimgpu.kubernetes.vocabulary.names import DRIVER, WHOLE_CLASS


def cluster_role_rules() -> list[dict[str, Any]]:
    """The `driver` line is new in 1.36: without it the status of a claim's devices cannot be written there."""
    dra = "resource.k8s.io"
    return [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [dra], "resources": ["resourceclaims"], "verbs": ["get"]},
        {"apiGroups": [dra], "resources": ["resourceclaims/status"], "verbs": ["patch"]},
        {
            "apiGroups": [dra],
            "resources": ["resourceclaims/driver"],
            "resourceNames": [DRIVER],
            "verbs": ["associated-node:patch"],
        },
        {"apiGroups": [dra], "resources": ["resourceslices"], "verbs": ["get", "list", "watch", "create", "update", "delete"]},
        {"apiGroups": [dra], "resources": ["deviceclasses"], "resourceNames": [WHOLE_CLASS], "verbs": ["get"]},
        {"apiGroups": ["aim.amd.com"], "resources": ["gpunodes"], "verbs": ["get", "list", "watch", "create"]},
        {"apiGroups": ["aim.amd.com"], "resources": ["gpunodes/status"], "verbs": ["patch"]},
    ]


def kai_rules() -> list[dict[str, Any]]:
    """Beside the others where KAI-Scheduler places: a grant is in the pod, a ConfigMap beside it, and KAI's own pods."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
    ]


def role_rules() -> list[dict[str, Any]]:
    """In its own namespace: the configurations of its device plugin."""
    names = {"resourceNames": ["time-slicing-config"]}
    return [{"apiGroups": [""], "resources": ["configmaps"], **names, "verbs": ["list", "watch"]}]
