"""Policies that warn of annotations in a namespace that the webhooks do not select.

The API server evaluates them itself and returns the warning to the caller, so that `kubectl apply` prints it. They see the
objects that make pods, never pods: a policy for pods would convert every pod, which is what selecting namespaces avoids.
"""

from typing import Any

from aimgpu.kubernetes.admission.annotations import REVIEWED, SHARING
from aimgpu.kubernetes.admission.namespaces import ENABLED, LABEL, unadmitted_selector
from aimgpu.kubernetes.admission.webhook_configurations import NAME, matching_rule

_VERSION = "admissionregistration.k8s.io/v1"
_WRITES = ("CREATE", "UPDATE")
_TEMPLATES = [
    matching_rule("apps", "v1", ("deployments", "statefulsets", "daemonsets"), _WRITES),
    matching_rule("batch", "v1", ("jobs",), _WRITES),
]
_SERVICES = [matching_rule("serving.kserve.io", "*", ("inferenceservices", "llminferenceservices"), _WRITES)]
# Where each kind keeps the annotations that its pods get.
_KINDS: tuple[tuple[str, str, list[dict[str, Any]]], ...] = (
    ("templates", "object.spec.template.metadata", _TEMPLATES),
    ("cron-jobs", "object.spec.jobTemplate.spec.template.metadata", [matching_rule("batch", "v1", ("cronjobs",), _WRITES)]),
    ("services", "object.metadata", _SERVICES),
)


def warning_policies() -> list[dict[str, Any]]:
    """A policy and its binding for each place where annotations are."""
    return [item for suffix, place, rules in _KINDS for item in _policy(f"{NAME}-unlabelled-{suffix}", place, rules)]


def _policy(name: str, place: str, rules: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": NAME}}
    keys = ", ".join(f"'{key}'" for key in REVIEWED)
    found = f"{place}.annotations"
    asks = f"has({place}) && has({found}) && [{keys}].exists(key, key in {found})"
    asks += f" && !('{SHARING}' in {found} && {found}['{SHARING}'] == 'false')"
    message = (
        f"'pods in namespace ' + request.namespace + ' get no share of a GPU: it has no label {LABEL}={ENABLED} "
        f"(kubectl label namespace ' + request.namespace + ' {LABEL}={ENABLED} --overwrite)'"
    )
    policy = {
        "failurePolicy": "Ignore",
        "matchConstraints": {"resourceRules": rules, "matchPolicy": "Exact"},
        "matchConditions": [{"name": "asks-for-a-gpu-share", "expression": asks}],
        "validations": [{"expression": "false", "messageExpression": message}],
    }
    # Here, not in the policy: a policy's selector is parsed for each request of any kind, a binding's where the policy matches.
    matched = {"namespaceSelector": unadmitted_selector()}
    binding = {"policyName": name, "matchResources": matched, "validationActions": ["Warn"]}
    return (
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicy", "metadata": metadata, "spec": policy},
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata, "spec": binding},
    )
