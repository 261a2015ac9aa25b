"""What the admission server may do in the API, as small as it can be."""

from typing import Any

from aimgpu.kubernetes.vocabulary.names import GROUP, PLACER_LEASE, WEBHOOKS


def cluster_role_rules() -> list[dict[str, Any]]:
    """In every namespace: see GPUs, make claim templates. Certificates go into its own webhook configurations only."""
    dra, registration = "resource.k8s.io", "admissionregistration.k8s.io"
    configurations = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"]
    return [
        {"apiGroups": [dra], "resources": ["resourceslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes"], "verbs": ["list", "watch"]},
        {"apiGroups": [dra], "resources": ["resourceclaimtemplates"], "verbs": ["get", "list", "watch", "create", "update"]},
        {"apiGroups": [registration], "resources": configurations, "resourceNames": [WEBHOOKS], "verbs": ["get", "patch"]},
    ]


def issued_rules(certificate: str, secret: str) -> list[dict[str, Any]]:
    """With cert-manager: make its Certificate the owner of the Secret that it fills."""
    return [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get", "update"]},
        {"apiGroups": ["cert-manager.io"], "resources": ["certificates"], "resourceNames": [certificate], "verbs": ["get"]},
    ]


def role_rules(secret: str) -> list[dict[str, Any]]:
    """In its own namespace: its certificate's Secret, and whether pods are placed. `create` cannot be limited to a name."""
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [PLACER_LEASE]}
    return [
        {**lease, "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get", "update"]},
    ]
