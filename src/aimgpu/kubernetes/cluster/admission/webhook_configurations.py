"""The webhook configurations that the chart installs: only pods with our annotations depend on the admission server."""

from typing import Any

from aimgpu.kubernetes.vocabulary.annotations import DEFAULT_SCHEDULER, REVIEWED_PREFIXES
from aimgpu.kubernetes.vocabulary.names import GROUP, WEBHOOKS
from aimgpu.kubernetes.vocabulary.namespaces import (
    AdmittedNamespaces,
    checked_selector,
    passing_selector,
    placing_selector,
    refusing_selector,
)

_VERSION = "admissionregistration.k8s.io/v1"
_TIMEOUT_SECONDS = 5
_PLACEMENT = "/mutate/placement"
_PODS, _SERVICES, _LLM_SERVICES = "/mutate/pods", "/validate/inferenceservices", "/validate/llminferenceservices"


def match_condition() -> dict[str, str]:
    """CEL, evaluated by the API server itself: a pod without these annotations never waits for us."""
    ours = " || ".join(f"key.startsWith('{prefix}')" for prefix in REVIEWED_PREFIXES)
    expression = f"has(object.metadata.annotations) && object.metadata.annotations.exists(key, {ours})"
    return {"name": "asks-for-a-gpu-share", "expression": expression}


def mutating_configuration(
    namespace: str,
    service: str,
    authority: str = "",
    *,
    scope: AdmittedNamespaces = AdmittedNamespaces.ALL,
    placed: str = "none",
) -> dict[str, Any]:
    """Two webhooks, of which a namespace has one at most: refuse pods while admission is down, or let them pass.

    A third gates pods of namespaces where placement is on, after they have their claims. `placed`: `gpu`, `all` or `none`.
    """
    webhooks = [
        _webhook(name, _client(namespace, service, _PODS, authority), policy=policy, namespaces=selector)
        for name, policy, selector in (
            ("pods.aim.amd.com", "Fail", refusing_selector(scope)),
            ("pods-ignore.aim.amd.com", "Ignore", passing_selector()),
        )
    ]
    for each in webhooks:
        each["rules"] = [matching_rule("", "v1", ("pods",), ("CREATE",))]
        each["matchConditions"] = [match_condition()]
        each["reinvocationPolicy"] = "IfNeeded"
    gates = _webhook("placement.aim.amd.com", _client(namespace, service, _PLACEMENT, authority), "Ignore", placing_selector())
    gates |= {"rules": [matching_rule("", "v1", ("pods",), ("CREATE",))], "matchConditions": placement_conditions(placed)}
    return _configuration("MutatingWebhookConfiguration", [*webhooks, gates])


def placement_conditions(placed: str) -> list[dict[str, str]]:
    """Pods that kube-scheduler places, DaemonSets' left out; with `gpu`, those that ask for GPUs of ours."""
    resources = f"key.startsWith('{GROUP}/') || key.startsWith('deviceclass.resource.kubernetes.io/')"
    limits = f"has(one.resources) && has(one.resources.limits) && one.resources.limits.exists(key, {resources})"
    annotated = match_condition()["expression"]
    asks = f"has(object.spec.resourceClaims) || object.spec.containers.exists(one, {limits}) || {annotated}"
    owners, scheduler = "object.metadata.ownerReferences", "object.spec.schedulerName"
    return [
        {"name": "is-to-be-placed", "expression": f"'{placed}' == 'all' || '{placed}' == 'gpu' && ({asks})"},
        {"name": "has-no-node", "expression": "!has(object.spec.nodeName) || object.spec.nodeName == ''"},
        {"name": "is-for-kube-scheduler", "expression": f"!has({scheduler}) || {scheduler} == '{DEFAULT_SCHEDULER}'"},
        {"name": "is-no-daemon", "expression": f"!has({owners}) || !{owners}.exists(one, one.kind == 'DaemonSet')"},
    ]


def validating_configuration(
    namespace: str, service: str, authority: str = "", *, scope: AdmittedNamespaces = AdmittedNamespaces.ALL
) -> dict[str, Any]:
    """InferenceServices with our annotations are checked when they are made or changed."""
    found = []
    for name, group, version, resource, path in (
        ("inferenceservices.aim.amd.com", "serving.kserve.io", "v1beta1", "inferenceservices", _SERVICES),
        ("llminferenceservices.aim.amd.com", "serving.kserve.io", "*", "llminferenceservices", _LLM_SERVICES),
    ):
        each = _webhook(name, _client(namespace, service, path, authority), policy="Ignore", namespaces=checked_selector(scope))
        each["rules"] = [matching_rule(group, version, (resource,), ("CREATE", "UPDATE"))]
        each["matchConditions"] = [match_condition()]
        found.append(each)
    return _configuration("ValidatingWebhookConfiguration", found)


def matching_rule(group: str, version: str, resources: tuple[str, ...], operations: tuple[str, ...]) -> dict[str, Any]:
    """What of the API a webhook or a policy is for."""
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": list(resources),
        "operations": list(operations),
        "scope": "Namespaced",
    }


def with_binding(
    name: str, policy: dict[str, Any], action: str = "Deny", **more: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ValidatingAdmissionPolicy and its binding; `more`: of the binding."""
    metadata = {"name": name, "labels": {"app.kubernetes.io/part-of": WEBHOOKS}}
    binding = {"policyName": name, **more, "validationActions": [action]}
    return (
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicy", "metadata": metadata, "spec": policy},
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata, "spec": binding},
    )


def _configuration(kind: str, webhooks: list[dict[str, Any]]) -> dict[str, Any]:
    metadata = {"name": WEBHOOKS, "labels": {"app.kubernetes.io/part-of": WEBHOOKS}}
    return {"apiVersion": _VERSION, "kind": kind, "metadata": metadata, "webhooks": webhooks}


def _webhook(name: str, client: dict[str, Any], policy: str, namespaces: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "clientConfig": client,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "NoneOnDryRun",
        "timeoutSeconds": _TIMEOUT_SECONDS,
        "failurePolicy": policy,
        "namespaceSelector": namespaces,
    }


def _client(namespace: str, service: str, path: str, authority: str) -> dict[str, Any]:
    client: dict[str, Any] = {"service": {"namespace": namespace, "name": service, "path": path, "port": 443}}
    if authority:
        client["caBundle"] = authority
    return client
