"""A policy that holds each node agent to its own node: the API server evaluates it itself.

A role cannot say "your own node", so each agent may write what concerns all nodes. The token of its pod names the pod's node.
"""

from typing import Any

from aimgpu.kubernetes.cluster.admission.webhook_configurations import matching_rule
from aimgpu.kubernetes.vocabulary.names import AGENT_ACCOUNT, DRIVER, GROUP, WEBHOOKS

_VERSION = "admissionregistration.k8s.io/v1"
_RULES = (
    ("", "v1", ("nodes",), ("UPDATE",)),
    (GROUP, "*", ("gpunodes", "gpunodes/status"), ("CREATE", "UPDATE", "DELETE")),
    ("resource.k8s.io", "*", ("resourceslices",), ("CREATE", "UPDATE", "DELETE")),
    ("resource.k8s.io", "*", ("resourceclaims/status",), ("UPDATE",)),
)
_RESULTS = "variables.was.?status.?allocation.?devices.?results.orValue([])"
_OWN = {
    "nodes": "variables.is.metadata.name == variables.node && variables.is.spec == variables.was.spec",
    "gpunodes": "variables.is.metadata.name == variables.node",
    "resourceslices": f"[variables.is, variables.was].all(one, one.spec.driver == '{DRIVER}' && "
    "one.spec.?nodeName.orValue('') == variables.node)",
    "resourceclaims": f"{_RESULTS}.exists(one, one.driver == '{DRIVER}' && one.pool == variables.node)",
}


def node_policy(namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`namespace`: of the agents. The policy and its binding."""
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
    metadata = {"name": f"{WEBHOOKS}-agents", "labels": {"app.kubernetes.io/part-of": WEBHOOKS}}
    binding = {"policyName": metadata["name"], "validationActions": ["Deny"]}
    return (
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicy", "metadata": metadata, "spec": policy},
        {"apiVersion": _VERSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata, "spec": binding},
    )
