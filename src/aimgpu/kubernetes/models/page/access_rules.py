"""What the page may read in the API."""

from typing import Any

from aimgpu.kubernetes.vocabulary.names import GROUP


def cluster_role_rules() -> list[dict[str, Any]]:
    """See GPUs, shares, models and their pods; change nothing: changes are made with the rights of who makes them."""
    return [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes", "gpushares", "partitionplans"], "verbs": ["list", "watch"]},
    ]


def role_rules() -> list[dict[str, Any]]:
    """In the namespace of the gateways: read what they measured, and pass chats on to them."""
    return [{"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get", "create"]}]
