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
from tests.cluster.waiting import wait_for, wait_until
from tests.web.browser import CHROMIUM, open_browser, open_page

from aimgpu.units import GIB

_CALL = """
import json, sys, urllib.error, urllib.request
method, path, body, token = json.loads(sys.argv[1])
head = {"X-Aimgpu-Page": "1", "Content-Type": "application/json"} | ({"Authorization": "Bearer " + token} if token else {})
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request("http://127.0.0.1:8081" + path, data, head, method=method)
try:
    with urllib.request.urlopen(request, timeout=300) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
# Without a program to start for every look: what a rollout shows on its way is there for a few seconds.
_RESIZE = """
import json, sys, time, urllib.request
wish, before, token = json.loads(sys.argv[1])
head = {"X-Aimgpu-Page": "1", "Content-Type": "application/json", "Authorization": "Bearer " + token}
page = "http://127.0.0.1:8081/api/v1/"
urllib.request.urlopen(urllib.request.Request(page + "resize", json.dumps(wish).encode(), head), timeout=300).close()
shown, deadline = [], time.monotonic() + 300
while time.monotonic() < deadline:
    with urllib.request.urlopen(page + "state", timeout=300) as answer:
        (model,) = [one for one in json.load(answer)["models"] if one["name"] == wish["model"]]
    now = {key: model[key] for key in ("state", "reason", "granted_bytes")}
    now["pods"] = [one["id"] for one in model["instances"]]
    if now not in shown:
        shown.append(now)
    if now["granted_bytes"] == wish["memory_bytes"] and len(now["pods"]) == 1 and before not in now["pods"]:
        break
    time.sleep(0.05)
print(json.dumps(shown))
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
        self._cluster = cluster
        self._namespace = namespace
        (self.pod,) = wait_for(self._pods, lambda pods: len(pods) == 1, "one pod of the page")

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, str]:
        given = json.dumps([method, path, body, token])
        name = self.pod["metadata"]["name"]
        status, _, text = self._cluster.exec(name, "python", "-c", _CALL, given, namespace=self._namespace).partition(" ")
        return int(status), text

    def resize(self, wish: dict[str, Any], before: str, token: str) -> list[dict[str, Any]]:
        """All that is shown of the model on the way from this pod alone to the new one alone."""
        given, name = json.dumps([wish, before, token]), self.pod["metadata"]["name"]
        printed = self._cluster.exec(name, "python", "-c", _RESIZE, given, namespace=self._namespace)
        found: list[dict[str, Any]] = json.loads(printed)
        return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("GET", "/api/v1/state")[1])
        return found

    def model(self, name: str) -> dict[str, Any]:
        """Empty where it is not shown."""
        return next((model for model in self.state()["models"] if model["name"] == name), {})

    def explanations(self, name: str) -> list[dict[str, Any]]:
        """Why its pods are where they are."""
        found: list[dict[str, Any]] = json.loads(self.call("GET", f"/api/v1/models/{name}")[1])["explanations"]
        return found

    def _pods(self) -> list[dict[str, Any]]:
        pods = self._cluster.get_all("pods", self._namespace, "app.kubernetes.io/component=web")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def check_page_of_the_pod(cluster: Cluster, chart_namespace: str, models: tuple[str, str]) -> None:
    """It shows what runs to a browser that `kubectl port-forward` lets in, and changes things with that person's rights."""
    namespace, key = models
    page = PodPage(cluster, chart_namespace)
    shown = wait_for(page.state, partial(_is_placed, name="chat"), "the model's scores, pod and share")
    (chat,) = (model for model in shown["models"] if model["name"] == "chat")
    assert (chat["state"], chat["instances"][0]["places"][0]["gpu"]) == ("ready", "node1/sim-mi300x-0")
    assert shown["gpus"][0]["simulated"]
    assert shown["gpus"][0]["granted_bytes"] >= chat["granted_bytes"] > 0
    assert (shown["page"]["cluster"]["own_rights"], shown["page"]["cluster"]["models"]["chat"]) == (False, namespace)
    with pytest.raises(ConnectionError):  # it listens on the pod's loopback alone
        urllib.request.urlopen(f"http://127.0.0.1:{cluster.forward(8081, page.pod['status']['podIP'])}/api/v1/state")

    _check_placement(page)
    wait_for(
        lambda: page.state()["page"]["notes"],
        lambda notes: not any("Measured memory" in one for one in notes),
        "the agents' metrics",
    )

    change = ("PATCH", "/api/v1/models/chat", {"priority": "low"})
    assert page.call(*change)[0] == 401, "the pod's own account changes nothing"
    assert page.call(*change, token="nobody")[0] == 401
    viewer, editor = (_make_account(cluster, namespace, role) for role in ("view", "edit"))
    # The API server learns of accounts and of their rights a moment after they are made.
    wait_for(partial(page.call, *change, token=editor), lambda found: found[0] == 200, "an editor changes the priority")
    status, text = wait_for(partial(page.call, *change, token=viewer), lambda found: found[0] != 401, "a viewer is known")
    assert (status, "forbidden" in text) == (403, True), text
    wait_for(partial(page.model, "chat"), lambda model: model["priority"] == "low", "the page follows the change")
    assert page.call("PATCH", "/api/v1/models/chat", {"priority": "high"}, editor)[0] == 200
    wait_for(partial(page.model, "chat"), lambda model: model["priority"] == "high", "the page follows it back")

    replaced = _check_resize(page, chat, (viewer, editor))
    log = f"/api/v1/instances/{replaced}/log"
    assert page.call("GET", log)[0] == 401
    read_log, started = partial(page.call, "GET", log, token=viewer), "Application startup complete"
    wait_for(read_log, lambda found: found[0] == 200 and started in found[1], "the new pod's log")
    asked = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    assert page.call("POST", "/v1/chat/completions", asked)[0] == 401, "the gateway asks for a key"
    status, text = page.call("POST", "/v1/chat/completions", asked, key)
    assert (status, "data: [DONE]" in text) == (200, True)
    wait_for(partial(page.model, "chat"), lambda model: model["last_used"] is not None, "the gateways' requests")


def _is_placed(shown: dict[str, Any], name: str) -> bool:
    """Pods, their shares and the gateways' scores come to the page one after the other."""
    (model,) = [model for model in shown["models"] if model["name"] == name] or [{}]
    places = model["instances"][0]["places"]
    return bool(model["state"] == "ready" and model["targets"] and model["granted_bytes"] and places)


def _check_placement(page: PodPage) -> None:
    """Why it is where it is, from the objects of a real cluster."""
    (explained,) = wait_for(
        partial(page.explanations, "chat"), lambda found: len(found) == 1 and len(found[0]["facts"]) > 1, "one explained pod"
    )
    assert explained["facts"][0].startswith("kube-scheduler chose node node1")
    assert explained["facts"][1].startswith("ResourceClaim chat-"), explained["facts"]
    assert [one["verdict"] for one in explained["devices"] if one["device_id"] == "node1/sim-mi300x-0"] == ["chosen"]


def _check_resize(page: PodPage, chat: dict[str, Any], tokens: tuple[str, str]) -> str:
    """The old pod answers until one with the new share is ready, which is returned; what does not fit is not written."""
    viewer, editor = tokens
    before, size = chat["instances"][0]["id"], 20 * GIB
    wish = {"model": "chat", "memory_bytes": size}
    preview = json.loads(page.call("POST", "/api/v1/resize?dry_run=1", wish)[1])
    assert preview["rollout"] == {"restarts": True, "old_serves": True, "changed": True}, preview
    status, text = page.call("POST", "/api/v1/resize", {"model": "chat", "memory_bytes": 900 * GIB}, editor)
    assert (status, "no GPU of the cluster has room" in text) == (409, True), text
    assert page.call("POST", "/api/v1/resize", wish, viewer)[0] == 403
    shown = page.resize(wish, before, editor)
    (replaced,) = shown[-1]["pods"]
    assert (replaced != before, shown[-1]["granted_bytes"]) == (True, size), shown
    assert {one["state"] for one in shown} == {"ready"}, f"it answered all the time: {shown}"
    assert any(one["reason"] and " is " in one["reason"] for one in shown), f"its progress was shown: {shown}"
    return str(replaced)


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
            change = partial(page.call, "POST", "/api/v1/partition", body, administrator)
            _, text = wait_for(change, lambda found: found[0] == 200, "an administrator changes the layout")
            assert "PartitionPlan page-" in text
            wait_until(partial(_has_partitions, page, partitions), f"the layout {layout}")
            wait_until(partial(_all_plans_succeeded, cluster), f"the plan of {layout}, which uncordons the node")
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
        for action, state in (("Sleep", "asleep"), ("Wake", "ready")):
            page.get_by_role("button", name="More actions for paged").click()
            page.get_by_role("menuitem", name=action, exact=True).click()
            expect(row).to_contain_text(state)
        _resize(page)
        page.get_by_role("button", name="Change the layout of gpu0").click()
        page.locator("button.layout", has_text="CPX/NPS1").click()
        expect(page.locator(".preview .notice")).to_contain_text("evicted from the node")
        page.locator("dialog").get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="More actions for paged").click()
        page.get_by_role("menuitem", name="Stop", exact=True).click()
        page.locator("dialog").get_by_role("button", name="Stop").click()
        expect(row).to_have_count(0)
        assert (watched.foreign, watched.errors) == ([], [])


def _deploy(page: Page, image: str) -> None:
    page.get_by_role("button", name="Deploy a model").click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_label("Model", exact=True).fill("Qwen/Qwen2.5-7B-Instruct")
    dialog.get_by_role("button", name="Options").click()
    for label, text in {
        "Name that callers use": "paged",
        "Context, tokens": "2048",
        "Requests at once": "4",
        "Image": image,
        "Keep loaded": "1h",
    }.items():
        dialog.get_by_label(label, exact=True).fill(text)
    dialog.get_by_label("Engine").select_option("vllm")
    expect(dialog.locator(".verdict .notice.ok")).to_contain_text("Fits: needs")
    dialog.get_by_role("button", name="Deploy", exact=True).click()


def _resize(page: Page) -> None:
    """Refused while it is typed, then rolled out: the row has the new share when the new pod has it."""
    page.get_by_role("button", name="More actions for paged").click()
    page.get_by_role("menuitem", name="Resize").click()
    dialog = page.locator("dialog[open]")
    expect(dialog.locator(".notice")).to_contain_text("possible.")  # what it has now is not refused
    dialog.get_by_label("Memory for each copy").fill("900")
    expect(dialog.locator(".notice.bad")).to_contain_text("no GPU of the cluster has room")
    dialog.get_by_label("Memory for each copy").fill("40")
    expect(dialog.locator(".notice")).to_contain_text("The old pod answers until the new one is ready")
    dialog.get_by_role("button", name="Restart with this share").click()
    expect(page.locator("table.models tr:has(button.name:text-is('paged'))")).to_contain_text("40 GiB")


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
