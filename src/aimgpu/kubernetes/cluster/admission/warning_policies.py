"""Policies that warn of annotations that nobody reads: the API server evaluates them itself, and `kubectl` prints the warning.

Those for a namespace that the webhooks do not select see the objects that make pods, never pods that are made: a policy for
those would convert every pod, which is what selecting namespaces avoids. Changes of pods are rare and are seen everywhere.
"""

from typing import Any

from aimgpu.kubernetes.cluster.admission.webhook_configurations import matching_rule, with_binding
from aimgpu.kubernetes.vocabulary.annotations import COMPUTE, ISOLATION, PRIORITY, REVIEWED, SHARING
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS
from aimgpu.kubernetes.vocabulary.namespaces import ENABLED, LABEL, unadmitted_selector

_WRITES = ("CREATE", "UPDATE")
_CHANGED = (
    "the share of a GPU is that of the pod's creation, and this annotation changes nothing of it: "
    "change that of its Deployment or InferenceService, or create the pod again"
)
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
    return [item for suffix, place, rules in _KINDS for item in _policy(f"{WEBHOOKS}-unlabelled-{suffix}", place, rules)]


def changed_pod_warning() -> tuple[dict[str, Any], dict[str, Any]]:
    """For who annotates a pod that is there: its share is that of its creation."""
    keys = ", ".join(f"'{key}'" for key in (*REVIEWED, COMPUTE, ISOLATION, PRIORITY))
    places = ("oldObject.metadata", "object.metadata")
    values = [f"(has({one}.annotations) && key in {one}.annotations ? {one}.annotations[key] : '')" for one in places]
    policy = {
        "failurePolicy": "Ignore",
        "matchConstraints": {"resourceRules": [matching_rule("", "v1", ("pods",), ("UPDATE",))], "matchPolicy": "Exact"},
        "matchConditions": [{"name": "changes-a-gpu-share", "expression": f"[{keys}].exists(key, {' != '.join(values)})"}],
        "validations": [{"expression": "false", "message": _CHANGED}],
    }
    return with_binding(f"{WEBHOOKS}-changed-pods", policy, "Warn")


def _policy(name: str, place: str, rules: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
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
    return with_binding(name, policy, "Warn", matchResources={"namespaceSelector": unadmitted_selector()})
