"""The page of a cluster: in the chart's pod, and as `aimgpu web --on kubernetes` in a real Chromium."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.web.browser import CHROMIUM, open_browser, open_page

expect.set_options(timeout=120_000)

_CALL = """
import json, sys, urllib.error, urllib.request
method, path, body, token = json.loads(sys.argv[1])
head = {"X-Aimgpu-Page": "1", "Content-Type": "application/json"} | ({"Authorization": "Bearer " + token} if token else {})
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request("http://127.0.0.1:8081" + path, data, head, method=method)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
_ACCOUNT = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: NAME}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: NAME}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: ROLE}
subjects: [{kind: ServiceAccount, name: NAME}]
"""


class PodPage:
    """The chart's page, as a browser behind `kubectl port-forward` reaches it: from inside its pod."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        (self.pod,) = cluster.get_all("pods", namespace, "app.kubernetes.io/component=web")
        self._cluster = cluster
        self._namespace = namespace

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, str]:
        given = json.dumps([method, path, body, token])
        name = self.pod["metadata"]["name"]
        status, _, text = self._cluster.exec(name, "python", "-c", _CALL, given, namespace=self._namespace).partition(" ")
        return int(status), text

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("GET", "/api/v1/state")[1])
        return found

    def models(self) -> dict[str, Any]:
        return {model["name"]: model for model in self.state()["models"]}


def check_page_of_the_pod(cluster: Cluster, chart_namespace: str, models: tuple[str, str]) -> None:
    """It shows what runs to a browser that `kubectl port-forward` lets in, and changes things with that person's rights."""
    namespace, key = models
    page = PodPage(cluster, chart_namespace)
    wait_until(lambda: bool(page.models()["chat"]["targets"]), "the gateways' scores", lambda: None)
    chat = page.models()["chat"]
    assert (chat["state"], chat["instances"][0]["places"][0]["gpu"]) == ("ready", "node1/sim-mi300x-0")
    shown = page.state()
    assert shown["gpus"][0]["simulated"]
    assert shown["gpus"][0]["granted_bytes"] >= chat["granted_bytes"] > 0
    assert (shown["page"]["cluster"]["own_rights"], shown["page"]["cluster"]["models"]["chat"]) == (False, namespace)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{cluster.forward(8081, page.pod['status']['podIP'])}/api/v1/state")
    with refused.value:
        assert refused.value.code == 401

    _check_placement(page, chat)
    wait_until(
        lambda: not any("Measured memory" in one for one in page.state()["page"]["notes"]), "the agents' metrics", lambda: None
    )

    change = ("PATCH", "/api/v1/models/chat", {"priority": "low"})
    assert page.call(*change)[0] == 401, "the pod's own account changes nothing"
    assert page.call(*change, token="nobody")[0] == 401
    viewer, editor = (_make_account(cluster, namespace, role) for role in ("view", "edit"))
    status, text = page.call(*change, token=viewer)
    assert (status, "forbidden" in text) == (403, True)
    assert page.call(*change, token=editor)[0] == 200
    wait_until(lambda: page.models()["chat"]["priority"] == "low", "the page follows the change", lambda: None)
    page.call("PATCH", "/api/v1/models/chat", {"priority": "high"}, editor)

    log = f"/api/v1/instances/{chat['instances'][0]['id']}/log"
    assert page.call("GET", log)[0] == 401
    assert "Application startup complete" in page.call("GET", log, token=viewer)[1]
    asked = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    assert page.call("POST", "/v1/chat/completions", asked)[0] == 401, "the gateway asks for a key"
    status, text = page.call("POST", "/v1/chat/completions", asked, key)
    assert (status, "data: [DONE]" in text) == (200, True)
    wait_until(lambda: page.models()["chat"]["last_used"] is not None, "the gateways' requests", lambda: None)


def _check_placement(page: PodPage, chat: dict[str, Any]) -> None:
    """Why it is where it is, from the objects of a real cluster; and why its share stays as it is."""
    (explained,) = json.loads(page.call("GET", "/api/v1/models/chat")[1])["explanations"]
    assert explained["facts"][0].startswith("kube-scheduler chose node node1")
    assert explained["facts"][1].startswith("ResourceClaim chat-"), explained["facts"]
    assert [one["verdict"] for one in explained["devices"] if one["device_id"] == "node1/sim-mi300x-0"] == ["chosen"]
    wish = {"model": "chat", "memory_bytes": chat["granted_bytes"] + 1}
    status, text = page.call("POST", "/api/v1/resize?dry_run=1", wish)
    assert (status, "ResourceClaim" in text) == (403, True), text


def check_layouts_of_the_pod(cluster: Cluster, chart_namespace: str, namespace: str) -> None:
    """A GPU that nothing holds is changed and changed back, with the rights of someone who may make PartitionPlans."""
    page = PodPage(cluster, chart_namespace)
    editor, administrator = (_make_account(cluster, namespace, role) for role in ("edit", "cluster-admin"))
    binding = [f"--serviceaccount={namespace}:page-cluster-admin", "--clusterrole=cluster-admin"]
    cluster.kubectl("create", "clusterrolebinding", "page-cluster-admin", *binding)
    try:
        for layout, partitions in (("CPX/NPS1", 8), ("SPX/NPS1", 1)):
            body = {"device": "node1/sim-mi300x-0", "layout": layout}
            assert page.call("POST", "/api/v1/partition", body, editor)[0] == 403
            status, text = page.call("POST", "/api/v1/partition", body, administrator)
            assert (status, "PartitionPlan page-" in text) == (200, True), text
            wait_until(partial(_has_partitions, page, partitions), f"the layout {layout}", lambda: None)
            wait_until(partial(_all_plans_succeeded, cluster), f"the plan of {layout}, which uncordons the node", lambda: None)
    finally:
        cluster.kubectl("delete", "clusterrolebinding", "page-cluster-admin")
        cluster.kubectl("delete", "partitionplans", "--all")


def _all_plans_succeeded(cluster: Cluster) -> bool:
    plans = cluster.get_all("partitionplans")
    return all((plan.get("status") or {}).get("phase") == "Succeeded" for plan in plans)


def _has_partitions(page: PodPage, count: int) -> bool:
    return len(page.state()["gpus"][0]["partitions"]) == count


def check_page_in_chromium(cluster: Cluster, models: tuple[str, str], image: str) -> None:
    """Deploy, chat, read the log, put to sleep, wake and unload, on the machine of someone with a kubeconfig."""
    if CHROMIUM is None:
        return
    namespace, key = models
    with _served(cluster, namespace) as url, open_browser() as browser:
        watched = open_page(browser, url)
        page = watched.page
        _deploy(page, image)
        row = page.locator("table.models tr:has(button.name:text-is('paged'))")
        expect(row).to_contain_text("ready")
        _chat(page, key)
        page.get_by_role("link", name="Activity").click()
        expect(page.locator("table.requests tbody tr").first).to_contain_text("paged")
        page.get_by_role("link", name="Models", exact=True).click()
        row.get_by_role("button", name="Logs").click()
        expect(page.locator("dialog.side .log")).to_contain_text("Application startup complete")
        page.keyboard.press("Escape")
        for action, state in (("Sleep", "asleep"), ("Load", "ready")):
            page.get_by_role("button", name="More actions for paged").click()
            page.get_by_role("menuitem", name=action, exact=True).click()
            expect(row).to_contain_text(state)
        page.get_by_role("button", name="Change the layout of GPU 0").click()
        page.locator("button.layout", has_text="CPX/NPS1").click()
        expect(page.locator(".preview .notice")).to_contain_text("evicted from the node")
        page.locator("dialog").get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="More actions for paged").click()
        page.get_by_role("menuitem", name="Unload", exact=True).click()
        page.locator("dialog").get_by_role("button", name="Unload").click()
        expect(row).to_have_count(0)
        assert (watched.foreign, watched.errors) == ([], [])


def _deploy(page: Page, image: str) -> None:
    page.get_by_role("button", name="Deploy a model").click()
    dialog = page.locator("dialog[open]")
    for label, text in {
        "Name that callers use": "paged",
        "Model": "Qwen/Qwen2.5-7B-Instruct",
        "Context, tokens": "2048",
        "Requests at once": "4",
        "Image": image,
        "Keep loaded": "1h",
    }.items():
        dialog.get_by_label(label, exact=True).fill(text)
    dialog.get_by_label("Engine").select_option("vllm")
    expect(dialog.locator(".verdict .notice.ok")).to_contain_text("Fits: needs")
    dialog.get_by_role("button", name="Deploy", exact=True).click()


def _chat(page: Page, key: str) -> None:
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Keys").click()
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use", exact=True).click()
    page.goto(page.url.split("#")[0] + "#/chat/paged")
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant small")).to_contain_text("tokens")


def _make_account(cluster: Cluster, namespace: str, role: str) -> str:
    """Its token."""
    name = f"page-{role}"
    text = _ACCOUNT.replace("NAME", name).replace("ROLE", role)
    cluster.kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=text)
    return cluster.kubectl("create", "token", name, f"--namespace={namespace}").strip()


@contextmanager
def _served(cluster: Cluster, namespace: str) -> Iterator[str]:
    where = ["--on", "kubernetes", "--kubeconfig", str(cluster.outside_kubeconfig), "--namespace", namespace]
    command = [str(Path(sys.executable).parent / "aimgpu"), "web", "--port", "0", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().rstrip("/")
        finally:
            process.terminate()
