"""Whose pods the admission webhooks see. The API server compares these selectors before it converts an object."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from aimgpu.kubernetes.vocabulary.names import GROUP, LABEL_PLACEMENT

LABEL = f"{GROUP}/admission"  # of a namespace
ENABLED = "enabled"
IGNORE = "ignore"  # its pods pass without a share while admission is down
DISABLED = "disabled"
SYSTEM = ("kube-system", "kube-public", "kube-node-lease")
_NAME = "kubernetes.io/metadata.name"  # which the API server gives to every namespace


class AdmittedNamespaces(StrEnum):
    """Which namespaces the webhooks select: all but those of the system, or those with the label."""

    ALL = "all"
    LABELLED = "labelled"


def refusing_selector(scope: AdmittedNamespaces) -> dict[str, Any]:
    """Namespaces whose annotated pods are refused while admission is down."""
    if scope is AdmittedNamespaces.LABELLED:
        return _selector(LABEL, "In", ENABLED)
    return {"matchExpressions": [_row(LABEL, "NotIn", DISABLED, IGNORE), _row(_NAME, "NotIn", *SYSTEM)]}


def passing_selector() -> dict[str, Any]:
    """Namespaces whose annotated pods pass while admission is down; no namespace is in both."""
    return _selector(LABEL, "In", IGNORE)


def checked_selector(scope: AdmittedNamespaces) -> dict[str, Any]:
    """Namespaces whose InferenceServices are checked: those whose pods are admitted."""
    if scope is AdmittedNamespaces.LABELLED:
        return _selector(LABEL, "In", ENABLED, IGNORE)
    return {"matchExpressions": [_row(LABEL, "NotIn", DISABLED), _row(_NAME, "NotIn", *SYSTEM)]}


def placing_selector() -> dict[str, Any]:
    """Namespaces whose pods are placed."""
    return _selector(LABEL_PLACEMENT, "In", ENABLED)


def unadmitted_selector() -> dict[str, Any]:
    """Where only labelled namespaces are selected: those without the label, and those with a value that is none of ours."""
    return _selector(LABEL, "NotIn", ENABLED, IGNORE, DISABLED)


def admits(configuration: Mapping[str, Any], namespace: Mapping[str, Any]) -> bool:
    """Whether one of the installed webhooks selects the namespace."""
    selectors = [each.get("namespaceSelector") or {} for each in configuration.get("webhooks") or ()]
    return any(_selects(selector, _labels(namespace)) for selector in selectors)


def explain_unadmitted(configuration: Mapping[str, Any], namespace: Mapping[str, Any]) -> str:
    """What a user can do so that pods of the namespace get their shares, without a full stop."""
    name = namespace["metadata"]["name"]
    labelled = {"metadata": {"name": name, "labels": {**_labels(namespace), LABEL: ENABLED}}}
    if admits(configuration, labelled):
        return f"Label it: kubectl label namespace {name} {LABEL}={ENABLED} --overwrite"
    return "Use another namespace"


def _labels(namespace: Mapping[str, Any]) -> dict[str, str]:
    metadata = namespace["metadata"]
    return {_NAME: metadata["name"], **(metadata.get("labels") or {})}


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    rows: Sequence[Mapping[str, Any]] = selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in wanted.items()) and all(_holds(row, labels) for row in rows)


def _holds(row: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    present, value = row["key"] in labels, labels.get(row["key"])
    if row["operator"] in ("Exists", "DoesNotExist"):
        return present is (row["operator"] == "Exists")
    listed = present and value in (row.get("values") or ())
    return listed is (row["operator"] == "In")


def _selector(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [_row(key, operator, *values)]}


def _row(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}
