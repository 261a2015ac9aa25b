"""What the operator may write of pods: the API server evaluates it itself.

The right to patch pods is the right to change their images, and that to patch their status can feign readiness. This policy
leaves of both what placement needs: take our gate off a pod that has it, say where to look first, and two annotations.
"""

from typing import Any

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import POLICIES, POLICY_BINDINGS
from aimgpu.kubernetes.cluster.admission.webhook_configurations import matching_rule, with_binding
from aimgpu.kubernetes.cluster.operator.leader import own_account
from aimgpu.kubernetes.vocabulary.names import GATE, HINT, OPERATOR_ACCOUNT, UNHINTED, WEBHOOKS

NAME = f"{WEBHOOKS}-placement"
_OLD_GATES, _GATES = (f"{one}.spec.?schedulingGates.orValue([])" for one in ("oldObject", "object"))
_PART = "request.?subResource.orValue('')"
_NOTES = f"['{HINT}', '{UNHINTED}']"


def _same(place: str, *but: str) -> str:
    """All keys of a map are as they were, except these."""
    left_out = ", ".join(f"'{key}'" for key in but)
    return (
        f"object.{place}.all(key, key in [{left_out}] || oldObject.{place}[?key] == optional.of(object.{place}[key])) && "
        f"oldObject.{place}.all(key, key in [{left_out}] || key in object.{place})"
    )


_VALIDATIONS = (
    (
        "the pod is not gated for placement, or bound already",
        f"{_OLD_GATES}.exists(gate, gate.name == '{GATE}') && oldObject.spec.?nodeName.orValue('') == ''",
    ),
    (
        "of a pod's metadata only the notes of placement may change",
        (
            "['labels', 'finalizers', 'ownerReferences'].all(key, object.metadata[?key] == oldObject.metadata[?key]) && "
            "[[object, oldObject], [oldObject, object]].all(pair, pair[0].metadata.?annotations.orValue({}).all(key, "
            f"key in {_NOTES} || pair[0].metadata.annotations[?key] == pair[1].metadata.?annotations[?key]))"
        ),
    ),
    (
        "of a pod's spec only the gate of placement and node affinity may change",
        (
            f"{_PART} == 'status' || ({_same('spec', 'schedulingGates', 'affinity')} && "
            "['podAffinity', 'podAntiAffinity'].all(key, object.spec.?affinity[?key] == oldObject.spec.?affinity[?key]) && "
            f"{_OLD_GATES}.all(gate, gate.name == '{GATE}' || {_GATES}.exists(one, one.name == gate.name)))"
        ),
    ),
    (
        "of a pod's status only nominatedNodeName may change",
        f"{_PART} != 'status' || ({_same('status', 'nominatedNodeName')})",
    ),
)


def placement_policy(namespace: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`namespace`: of the operator. The policy and its binding."""
    user = f"system:serviceaccount:{namespace}:{OPERATOR_ACCOUNT}"
    policy: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [matching_rule("", "v1", ("pods", "pods/status"), ("UPDATE",))]},
        "matchConditions": [{"name": "is-the-operator", "expression": f"request.userInfo.username == '{user}'"}],
        "validations": [{"expression": rule, "message": text, "reason": "Forbidden"} for text, rule in _VALIDATIONS],
    }
    return with_binding(NAME, policy)


async def find_gap(client: Client, namespace: str) -> str | None:
    """Why the policy does not bind this program; None where it does."""
    if not await own_account(client, namespace, OPERATOR_ACCOUNT):
        return f"the operator does not run as the service account {namespace}/{OPERATOR_ACCOUNT}"
    for resource, wanted in zip((POLICIES, POLICY_BINDINGS), placement_policy(namespace), strict=True):
        found = await client.find(resource, NAME)
        if found is None or not _holds(wanted["spec"], found["spec"]) or _is_narrowed(found["spec"]):
            return f"{resource.plural}/{NAME} is not installed as this version of the chart has it"
    return None


def _holds(wanted: object, found: object) -> bool:
    """Fields that the API server adds do not count as a difference."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(key in found and _holds(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(_holds(one, other) for one, other in zip(wanted, found, strict=True))
    return wanted == found


def _is_narrowed(spec: dict[str, Any]) -> bool:
    """By a selector or an exclusion."""
    scope = spec.get("matchResources") or spec.get("matchConstraints") or {}
    selectors = (scope.get("namespaceSelector"), scope.get("objectSelector"), scope.get("excludeResourceRules"))
    return any(selectors) or "paramRef" in spec
