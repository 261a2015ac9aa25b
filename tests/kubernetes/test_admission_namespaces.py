"""Which namespaces the webhooks select, and what is reported of pods in the others."""

import asyncio
from typing import Any

import pytest
from tests.kubernetes.api_server import serving

from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.kubernetes.models.serving.unshared_pods import describe_unshared_pods
from aimgpu.kubernetes.vocabulary.namespaces import AdmittedNamespaces, admits, explain_unadmitted

ALL, LABELLED = AdmittedNamespaces
LABEL = "aim.amd.com/admission"
INSTALLED = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def namespace(label: str | None, name: str = "team") -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {LABEL: label} if label else {}}}


@pytest.mark.parametrize(
    ("label", "name", "in_all", "in_labelled"),
    [
        (None, "team", True, False),
        ("enabled", "team", True, True),
        ("ignore", "team", True, True),
        ("disabled", "team", False, False),
        ("yes", "team", True, False),
        (None, "kube-system", False, False),
        ("enabled", "kube-system", False, True),
    ],
)
def test_a_namespace_has_one_pod_webhook_at_most(label: str | None, name: str, *, in_all: bool, in_labelled: bool) -> None:
    for scope, wanted in ((ALL, in_all), (LABELLED, in_labelled)):
        hooks = mutating_configuration("system", "svc", scope=scope)["webhooks"]
        selecting = [hook for hook in hooks if admits({"webhooks": [hook]}, namespace(label, name))]
        assert len(selecting) == int(wanted)
        if selecting:
            assert selecting[0]["failurePolicy"] == ("Ignore" if label == "ignore" else "Fail")
        for hook in validating_configuration("system", "svc", scope=scope)["webhooks"]:
            assert admits({"webhooks": [hook]}, namespace(label, name)) is wanted


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ({}, True),
        ({"matchLabels": {LABEL: "enabled"}}, True),
        ({"matchLabels": {LABEL: "other"}}, False),
        ({"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": LABEL, "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["a"]}]}, False),
    ],
)
def test_selectors_that_an_administrator_wrote_are_read_as_kubernetes_does(selector: dict[str, Any], *, selected: bool) -> None:
    assert admits({"webhooks": [{"namespaceSelector": selector}]}, namespace("enabled")) is selected


def test_the_advice_is_a_label_only_where_a_label_helps() -> None:
    assert LABEL in explain_unadmitted(mutating_configuration("s", "s", scope=LABELLED), namespace(None))
    assert "another namespace" in explain_unadmitted(mutating_configuration("s", "s"), namespace(None, "kube-system"))


def notes(pods: list[dict[str, Any]], label: str | None = None, *, forbidden: bool = False) -> list[str]:
    async def main() -> list[str]:
        async with serving() as (api, client):
            api.put("/api/v1/namespaces", namespace(label))
            api.put(INSTALLED, mutating_configuration("system", "svc", scope=LABELLED))
            for pod in pods:
                api.put("/api/v1/namespaces/team/pods", pod)
            if forbidden:
                api.fault = lambda method, path: 403 if method == "GET" and "pods" not in path else None
            return await describe_unshared_pods(client, "team")

    return asyncio.run(main())


def pod(name: str, phase: str = "Running", labels: dict[str, str] | None = None, **annotations: str) -> dict[str, Any]:
    found = {key.replace("_", "-"): value for key, value in annotations.items()}
    return {"metadata": {"name": name, "labels": labels or {}, "annotations": found}, "status": {"phase": phase}}


def test_pods_that_ask_and_have_no_share_are_named_with_what_to_do() -> None:
    unshared = pod("chat", gpu_memory="1024")
    (note,) = notes([unshared])
    assert "chat" in note
    assert f"kubectl label namespace team {LABEL}=enabled" in note
    (note,) = notes([unshared], "enabled")
    assert "before their namespace was selected" in note
    (note,) = notes([unshared], forbidden=True)
    assert "labels" in note
    (note,) = notes([pod(f"chat-{number}", gpu_fraction="0.5") for number in range(7)])
    assert "and 2 more" in note


def test_pods_that_have_their_share_or_ask_for_none_are_not_reported() -> None:
    shared = pod("shared", labels={"aim.amd.com/gpu-share": "true"}, gpu_memory="1024")
    refused = pod("no")
    refused["metadata"]["annotations"] = {"aim.amd.com/gpu-sharing": "false", "gpu-memory": "1"}
    ending = pod("ending", gpu_memory="1024")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert notes([shared, pod("plain"), pod("done", "Succeeded", gpu_memory="1024"), refused, ending]) == []
