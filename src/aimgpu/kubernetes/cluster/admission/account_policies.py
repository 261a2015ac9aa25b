"""Policies for what a role cannot express: the API server evaluates them itself.

An agent's role covers all nodes; the token of its pod names the one that it may write. A gateway's role covers all Deployments;
it may scale those of models.
"""

from typing import Any

from aimgpu.kubernetes.cluster.admission.webhook_configurations import matching_rule, with_binding
from aimgpu.kubernetes.vocabulary.model_labels import SERVED_MODEL
from aimgpu.kubernetes.vocabulary.names import AGENT_ACCOUNT, DRIVER, GATEWAY_ACCOUNT, GROUP, WEBHOOKS

_RULES = (
    ("", "v1", ("nodes",), ("UPDATE",)),
    (GROUP, "*", ("gpunodes", "gpunodes/status"), ("CREATE", "UPDATE", "DELETE")),
    ("resource.k8s.io", "*", ("resourceslices",), ("CREATE", "UPDATE", "DELETE")),
    ("resource.k8s.io", "*", ("resourceclaims/status",), ("UPDATE",)),
)
_NO_MODEL = f"the gateway may scale Deployments that select their pods by the label {SERVED_MODEL} only"
_RESULTS = "variables.was.?status.?allocation.?devices.?results.orValue([])"
_OWN = {
    "nodes": "variables.is.metadata.name == variables.node && variables.is.spec == variables.was.spec",
    "gpunodes": "variables.is.metadata.name == variables.node",
    "resourceslices": f"[variables.is, variables.was].all(one, one.spec.driver == '{DRIVER}' && "
    "one.spec.?nodeName.orValue('') == variables.node)",
    "resourceclaims": f"{_RESULTS}.exists(one, one.driver == '{DRIVER}' && one.pool == variables.node)",
}


def node_policy(namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`namespace`: of the agents."""
    user = f"system:serviceaccount:{namespace}:{AGENT_ACCOUNT}"
    cases = " : ".join(f"request.resource.resource == '{kind}' ? ({rule})" for kind, rule in _OWN.items())
    message = (
        "'the node agent of ' + (variables.node == '' ? 'no node' : variables.node) + "
        "' may write what is of its own node only, and this is ' + request.resource.resource + ' ' + request.name"
    )
    holds = f"variables.node != '' && ({cases} : false)"
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**matching_rule(*rule), "scope": "*"} for rule in _RULES]},
        "matchConditions": [{"name": "is-a-node-agent", "expression": f"request.userInfo.username == '{user}'"}],
        "variables": [
            {
                "name": "node",
                "expression": "request.userInfo.?extra[?'authentication.kubernetes.io/node-name'].orValue([''])[0]",
            },
            {"name": "is", "expression": "request.operation == 'DELETE' ? oldObject : object"},
            {"name": "was", "expression": "request.operation == 'CREATE' ? object : oldObject"},
        ],
        "validations": [{"expression": holds, "messageExpression": message, "reason": "Forbidden"}],
    }
    return with_binding(f"{WEBHOOKS}-agents", policy)


def gateway_policy(namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`namespace`: of the gateway. A Scale has no labels of its Deployment, but the selector of its pods."""
    user = f"system:serviceaccount:{namespace}:{GATEWAY_ACCOUNT}"
    named = " || ".join(f"one.startsWith('{SERVED_MODEL}{sign}')" for sign in ("=", " in "))
    rule = f"oldObject.?status.?selector.orValue('').split(',').exists(one, {named})"
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [matching_rule("apps", "v1", ("deployments/scale",), ("UPDATE",))]},
        "matchConditions": [{"name": "is-a-gateway", "expression": f"request.userInfo.username == '{user}'"}],
        "validations": [{"expression": rule, "message": _NO_MODEL, "reason": "Forbidden"}],
    }
    return with_binding(f"{WEBHOOKS}-gateways", policy)
