"""No role of the chart has a verb that its program's code does not use; that it has all it needs, the cluster's tests show."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aimgpu.kubernetes.api import resources as standard_resources
from aimgpu.kubernetes.api.client import Resource
from aimgpu.kubernetes.cluster.admission import access_rules as admission_rules
from aimgpu.kubernetes.cluster.admission.certificate_keeper import CONFIGURATIONS
from aimgpu.kubernetes.cluster.definitions import definition_rules
from aimgpu.kubernetes.cluster.operator import access_rules as operator_rules
from aimgpu.kubernetes.cluster.uninstall import uninstall_rules
from aimgpu.kubernetes.models.gateway import access_rules as gateway_rules
from aimgpu.kubernetes.models.page import access_rules as page_rules
from aimgpu.kubernetes.node.agent import access_rules as agent_rules
from aimgpu.kubernetes.vocabulary import custom_resources

ROOM = Path(str(standard_resources.__file__)).parent.parent
VERBS = {
    "get": {"get"},
    "find": {"get"},
    "list": {"list"},
    "create": {"create"},
    "replace": {"update"},
    "patch": {"patch"},
    "delete": {"delete"},
    "delete_all": {"deletecollection"},
}
KINDS = {
    name: value.plural
    for module in (custom_resources, standard_resources)
    for name, value in vars(module).items()
    if isinstance(value, Resource)
}
OF_PATHS = {"read_lines": "get", "open_proxied": "create"}  # calls that take a path in place of a kind
OF_METHODS = {"GET": "get", "POST": "create"}
DRIVER = {("resourceclaims/driver", "associated-node:patch")}  # no call: a right beside that to patch the status
WEBHOOKS = {(kind.plural, verb) for kind in CONFIGURATIONS for verb in ("get", "patch")}  # of a tuple of both
APPLIED = {("leases", "create"), ("customresourcedefinitions", "create")}  # an apply of what is not there yet


# The page's own calls: what its control API changes, it changes with the rights of the caller.
PAGE = ("models/page/follower.py", "models/page/chat_proxy.py", "models/serving/cluster_view.py")


def used(*places: str) -> set[tuple[str, str]]:
    """Kinds and verbs of calls of the client; a call with a variable counts for every kind that its file names."""
    found = set()
    for path in (path for place in places for path in _files(ROOM / place)):
        tree = ast.parse(path.read_text())
        found |= _called_by_path(tree) | {(kind, verb) for kind in _followed(tree) for verb in ("list", "watch")}
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


def _followed(tree: ast.AST) -> set[str]:
    """Kinds of which a file has a Mirror."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    kinds = (node.args[1] for node in calls if node.func.id == "Mirror")  # type: ignore[attr-defined]
    return {KINDS[kind.id] for kind in kinds if isinstance(kind, ast.Name)}


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("*.py")) if place.is_dir() else [place]


def _called_by_path(tree: ast.AST) -> set[tuple[str, str]]:
    """Subresources whose paths a file makes, with the verbs of its calls that take one."""
    names, verbs = set(), set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, call, arguments = node.func.value, node.func.attr, node.args
        if call == "path" and isinstance(owner, ast.Name) and owner.id in KINDS and len(arguments) > 2:
            text = ast.unparse(arguments[2]).removeprefix("f").strip("'\"")
            names.add(f"{KINDS[owner.id]}/{re.split('[/{]', text)[0]}")
        elif call == "request" and arguments and isinstance(arguments[0], ast.Constant):
            verbs.add(OF_METHODS.get(str(arguments[0].value), ""))
        elif call in OF_PATHS:
            verbs.add(OF_PATHS[call])
    return {(name, verb) for name in names for verb in verbs}


@pytest.mark.parametrize(
    ("rules", "places"),
    [
        (agent_rules.cluster_role_rules(), ("node/agent", "node/dra_driver")),
        (agent_rules.role_rules(), ("node/device_plugin",)),
        (agent_rules.kai_rules(), ("node/kai",)),
        (uninstall_rules(), ("cluster/uninstall.py", "cluster/placer/ungating.py")),
        (definition_rules(), ("cluster/definitions.py",)),
        (admission_rules.cluster_role_rules(), ("cluster/admission",)),
        (admission_rules.role_rules("name"), ("cluster/admission",)),
        (admission_rules.issued_rules("name", "other"), ("cluster/admission",)),
        (operator_rules.cluster_role_rules(), ("cluster/operator", "cluster/operator/shares")),
        (operator_rules.namespaced_rules(), ("cluster/operator", "cluster/operator/shares")),
        (operator_rules.role_rules(), ("cluster/operator", "cluster/placer")),
        (operator_rules.placement_rules(), ("cluster/placer",)),
        (gateway_rules.namespaced_rules(), ("models/gateway",)),
        (gateway_rules.role_rules("name"), ("models/gateway",)),
        (page_rules.cluster_role_rules(), PAGE),
        (page_rules.role_rules(), PAGE),
    ],
)
def test_a_role_has_no_verb_that_is_not_used(rules: list[dict[str, Any]], places: tuple[str, ...]) -> None:
    granted = {(kind, verb) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}
    assert granted - used(*places) - DRIVER - WEBHOOKS - APPLIED == set()


def test_the_page_itself_changes_nothing() -> None:
    assert {verb for kind, verb in used(*PAGE) if kind != "pods/proxy"} <= {"get", "list", "watch"}


def test_the_page_asks_with_its_own_rights_only_where_its_role_is_compared() -> None:
    """A file of the page that keeps the client it was started with, and is not compared, would make the comparison blind."""
    own = {
        f"models/page/{path.name}"
        for path in _files(ROOM / "models/page")
        if "self._client." in (text := path.read_text()) or ".own." in text
    }
    assert own - {"models/page/callers.py"} <= set(PAGE)
