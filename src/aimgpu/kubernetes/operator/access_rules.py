"""What the operator may do in the API, as small as it can be."""

from typing import Any

from aimgpu.kubernetes.names import GROUP
from aimgpu.kubernetes.operator.definitions import definition_rules


def cluster_role_rules() -> list[dict[str, Any]]:
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims", "resourceslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["gpushares"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": [GROUP], "resources": ["gpushares/status", "partitionplans/status"], "verbs": ["patch"]},
        {"apiGroups": [GROUP], "resources": ["partitionplans"], "verbs": ["list", "create", "delete"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "patch"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaimtemplates"], "verbs": ["list", "patch", "delete"]},
        definition_rules(),
    ]


def role_rules() -> list[dict[str, Any]]:
    """In its own namespace: the Lease by which one replica leads."""
    return [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}]
