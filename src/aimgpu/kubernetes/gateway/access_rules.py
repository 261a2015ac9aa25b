"""What the gateway may do in the API, as small as it can be."""

from typing import Any

from aimgpu.kubernetes.names import GROUP
from aimgpu.kubernetes.serving.queue_bounds import QUEUE_MAP


def cluster_role_rules() -> list[dict[str, Any]]:
    """See models and where they answer, and scale them; nothing else of a Deployment can be changed."""
    return [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},  # why one does not start
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["gpushares"], "verbs": ["list", "watch"]},
    ]


def role_rules(secret: str) -> list[dict[str, Any]]:
    """In its own namespace: the callers' keys, the queue's bounds, and Leases by which replicas share when a model was used."""
    leases = ["list", "watch", "create", "patch", "delete"]
    return [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [QUEUE_MAP], "verbs": ["list", "watch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": leases},
    ]
