"""What the gateway may do in the API, as small as it can be."""

from typing import Any

from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS
from aimgpu.kubernetes.models.serving.queue_bounds import QUEUE_MAP
from aimgpu.kubernetes.vocabulary.names import GROUP


def namespaced_rules() -> list[dict[str, Any]]:
    """Where its models are: see them, where they answer and the keys of engines, and scale them."""
    return [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},  # why one does not start
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["gpushares"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [ENGINE_KEYS], "verbs": ["list", "watch"]},
    ]


def role_rules(secret: str) -> list[dict[str, Any]]:
    """In its own namespace: keys, the queue's bounds, which replicas there are, and Leases that say when a model was used."""
    leases = ["list", "watch", "create", "patch", "delete"]
    return [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [QUEUE_MAP], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": leases},
    ]
