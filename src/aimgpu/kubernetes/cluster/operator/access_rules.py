"""What the operator may do in the API, as small as it can be."""

from typing import Any

from aimgpu.kubernetes.cluster.placer.policy import NAME
from aimgpu.kubernetes.vocabulary.custom_resources import PARTITION_PLANS
from aimgpu.kubernetes.vocabulary.names import GROUP


def namespaced_rules() -> list[dict[str, Any]]:
    """Where the workloads are that it reports on."""
    templates = {"resources": ["resourceclaimtemplates"], "verbs": ["list", "watch", "patch", "delete"]}
    return [
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": [GROUP], "resources": ["gpushares"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": [GROUP], "resources": ["gpushares/status"], "verbs": ["patch"]},
        {"apiGroups": ["resource.k8s.io"], **templates},
    ]


def cluster_role_rules() -> list[dict[str, Any]]:
    """GPUs are shared by pods of all namespaces, and a PartitionPlan evicts those that are in its way."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims", "resourceslices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["partitionplans/status"], "verbs": ["patch"]},
        {"apiGroups": [GROUP], "resources": ["partitionplans"], "verbs": ["list", "watch", "create", "delete"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes"], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": [f"{PARTITION_PLANS.plural}.{GROUP}"],  # whether plans are gone with their definition
            "verbs": ["get"],
        },
    ]


def role_rules() -> list[dict[str, Any]]:
    """In its own namespace: the Lease by which one replica leads, and that of the placer."""
    return [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update", "patch"]}]


def placement_rules() -> list[dict[str, Any]]:
    """Where placement is on. Of what it may patch, the policy of placement leaves a gate, a hint and two notes."""
    registration = {"apiGroups": ["admissionregistration.k8s.io"], "resourceNames": [NAME], "verbs": ["get"]}
    return [
        {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["persistentvolumeclaims", "persistentvolumes"], "verbs": ["get"]},
        {**registration, "resources": ["validatingadmissionpolicies", "validatingadmissionpolicybindings"]},
    ]
