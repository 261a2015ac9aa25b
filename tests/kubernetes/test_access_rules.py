"""No role of the chart has a verb that its program's code does not use; that it has all it needs, the cluster's tests show."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aimgpu.kubernetes import custom_resources, standard_resources
from aimgpu.kubernetes.admission import access_rules as admission_rules
from aimgpu.kubernetes.admission.certificate_keeper import CONFIGURATIONS
from aimgpu.kubernetes.agent import access_rules as agent_rules
from aimgpu.kubernetes.agent.uninstall import uninstall_rules
from aimgpu.kubernetes.api_client import Resource
from aimgpu.kubernetes.gateway import access_rules as gateway_rules
from aimgpu.kubernetes.operator import access_rules as operator_rules

ROOM = Path(str(standard_resources.__file__)).parent
VERBS = {
    "get": {"get"},
    "find": {"get"},
    "list": {"list"},
    "watch": {"list", "watch"},
    "create": {"create"},
    "replace": {"update"},
    "patch": {"patch"},
    "delete": {"delete"},
}
KINDS = {
    name: value.plural
    for module in (custom_resources, standard_resources)
    for name, value in vars(module).items()
    if isinstance(value, Resource)
}
BY_PATH = {("pods/eviction", "create"), ("resourceclaims/driver", "associated-node:patch")}  # not by one of the client's verbs
WEBHOOKS = {(kind.plural, verb) for kind in CONFIGURATIONS for verb in ("get", "patch")}  # of a tuple of both
APPLIED = {("leases", "create")}  # an apply of what is not there yet


def used(*folders: str) -> set[tuple[str, str]]:
    """Kinds and verbs of calls of the client; a call with a variable counts for every kind that its file names."""
    found = set()
    for path in (path for folder in folders for path in (ROOM / folder).glob("*.py")):
        tree = ast.parse(path.read_text())
        named = {KINDS[node.id] for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in KINDS}
        for verb, kind, subresource in _calls(tree):
            for each in (kind,) if kind else named:
                found |= {(each + subresource, one) for one in VERBS[verb]}
    return found


def _calls(tree: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VERBS and node.args:
            owner, first = ast.unparse(node.func.value), node.args[0]
            if not owner.endswith("client") or not isinstance(first, ast.Name | ast.Subscript):
                continue
            under = [ast.literal_eval(one.value) for one in node.keywords if one.arg == "subresource"]
            kind = KINDS.get(first.id) if isinstance(first, ast.Name) else None
            yield node.func.attr, kind, f"/{under[0]}" if under else ""


@pytest.mark.parametrize(
    ("rules", "folders"),
    [
        (agent_rules.cluster_role_rules(), ("agent", "dra_driver")),
        (agent_rules.role_rules(), ("device_plugin",)),
        (agent_rules.kai_rules(), ("kai",)),
        (uninstall_rules(), ("agent",)),
        (admission_rules.cluster_role_rules(), ("admission",)),
        (admission_rules.role_rules("name"), ("admission",)),
        (operator_rules.cluster_role_rules(), ("operator",)),
        (operator_rules.role_rules(), ("operator",)),
        (gateway_rules.cluster_role_rules(), ("gateway",)),
        (gateway_rules.role_rules("name"), ("gateway",)),
    ],
)
def test_a_role_has_no_verb_that_is_not_used(rules: list[dict[str, Any]], folders: tuple[str, ...]) -> None:
    granted = {(kind, verb) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}
    assert granted - used(*folders) - BY_PATH - WEBHOOKS - APPLIED == set()
