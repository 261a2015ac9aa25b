"""The chart as it ships, installed with real helm: pods of all parts run with the shipped roles, and nothing is left after."""

import base64
import json
import operator
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import BUSYBOX_IMAGE, PYTHON_IMAGE, Cluster
from tests.cluster.waiting import wait_for, wait_until
from tests.kubernetes.chart import CHART, NAMESPACE, RELEASE, ROOT, helm
from tests.kubernetes.cluster_page import check_layouts_of_the_pod, check_page_in_chromium, check_page_of_the_pod

PARTS = (
    "daemonset/aim-gpu-sharing-agent",
    "deployment/aim-gpu-sharing-admission",
    "deployment/aim-gpu-sharing-operator",
    "deployment/aim-gpu-sharing-gateway",
    "deployment/aim-gpu-sharing-web",
)
ENGINE_IMAGE = "localhost/vllm:test"


def test_the_kustomize_base_made_of_the_chart_is_accepted(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_kustomize.py"), "registry.example/aimgpu:1", str(tmp_path)]
    subprocess.run(command, check=True)
    text = cluster.kubectl("kustomize", str(tmp_path))
    kinds = [item["kind"] for item in yaml.safe_load_all(text)]
    assert {"DaemonSet", "Deployment", "CustomResourceDefinition", "Namespace"} <= set(kinds)
    definitions = [item for item in yaml.safe_load_all(text) if item["kind"] == "CustomResourceDefinition"]
    namespaced = [item for item in yaml.safe_load_all(text) if item["kind"] not in ("CustomResourceDefinition", "Namespace")]
    for items in (definitions, [_elsewhere(item) for item in namespaced]):
        manifest = yaml.safe_dump_all(items)
        cluster.kubectl("apply", "--dry-run=server", "--server-side", "--validate=strict", "--filename=-", stdin=manifest)


def _elsewhere(item: dict[str, Any]) -> dict[str, Any]:
    """In a namespace that exists: the API server's dry run makes none."""
    if "namespace" in item["metadata"]:
        item["metadata"]["namespace"] = "default"
    return item


CLOUDS: dict[str, dict[str, Any]] = {  # what guides for them set
    "eks": {
        "agent": {
            "pod": {
                "nodeSelector": {"eks.amazonaws.com/nodegroup": "gpu"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            }
        },
        "gateway": {
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}},
            "service": {
                "type": "LoadBalancer",
                "loadBalancerClass": "service.k8s.aws/nlb",
                "annotations": {"service.beta.kubernetes.io/aws-load-balancer-type": "external"},
            },
            "ingress": {
                "enabled": True,
                "className": "alb",
                "host": "models.example.com",
                "annotations": {"alb.ingress.kubernetes.io/target-type": "ip"},
            },
        },
    },
    "gke": {
        "agent": {
            "pod": {
                "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
                "priorityClassName": "system-node-critical",
            }
        },
        "gateway": {
            "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "models@p.iam.gserviceaccount.com"}},
            "service": {"annotations": {"cloud.google.com/neg": '{"ingress": true}'}},
            "autoscaling": {"enabled": True},
        },
    },
    "aks": {
        "imagePullSecrets": [{"name": "registry"}],
        "agent": {"pod": {"nodeSelector": {"agentpool": "mi300x"}, "labels": {"azure.workload.identity/use": "true"}}},
        "gateway": {
            "pod": {"securityContext": {"fsGroup": 1000}},
            "container": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy.example"}]},
            "service": {
                "type": "LoadBalancer",
                "annotations": {"service.beta.kubernetes.io/azure-load-balancer-internal": "true"},
            },
        },
    },
}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_usual_values_of_three_clouds_are_accepted(cluster: Cluster, tmp_path: Path, cloud: str) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(CLOUDS[cloud]))
    command = ("template", RELEASE, str(CHART), "--kube-version=1.36.4", "--namespace=default", f"--values={values}")
    manifest = helm(*command, "--set=image.repository=registry.example/aimgpu,placement.enabled=true")
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", stdin=manifest)


WITHOUT_SERVING = ("--set=gateway.enabled=false,web.enabled=false",)


def _earlier_build(folder: Path) -> Path:
    """The chart with a lower version, and a definition that lacks a field."""
    chart = folder / CHART.name
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.1"}))
    path = chart / "crds" / "gpushares.yaml"
    definition = yaml.safe_load(path.read_text())
    status = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    del status["properties"]["replicas"]["items"]["properties"]["simulated"]
    path.write_text(yaml.safe_dump(definition))
    return chart


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    repository, _, tag = PYTHON_IMAGE.rpartition(":")
    options = [
        "--create-namespace",
        f"--namespace={NAMESPACE}",
        f"--set=image.repository={repository},image.tag={tag},image.pullPolicy=Never",
        "--set=agent.simulated=MI300X:1,agent.repartition=true,agent.layouts=memory",
        f"--set=agent.stateFolder={cluster.folder}/agent-state",  # nodes share this machine's /var with other clusters on it
    ]
    try:
        # An earlier build first, so that every test here runs on what an upgrade makes of it.
        earlier = _earlier_build(tmp_path_factory.mktemp("earlier"))
        helm("install", RELEASE, str(earlier), *options, *WITHOUT_SERVING, kubeconfig=cluster.outside_kubeconfig)
        for part in PARTS[:3]:
            cluster.kubectl("rollout", "status", part, f"--namespace={NAMESPACE}", "--timeout=600s")
        wait_until(lambda: cluster.get_all("resourceslices") != [], "GPUs are published")
        wait_until(partial(is_admitted, cluster, pod("from-before"), "default"), "the webhooks are reached")
        cluster.wait("pod/from-before", "condition=Ready")
        upgrade = ["upgrade", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--reset-then-reuse-values"]
        helm(
            *upgrade,
            "--set=gateway.enabled=true,gateway.drainSeconds=1,gateway.shortNames={*},web.enabled=true",
            kubeconfig=cluster.outside_kubeconfig,
        )
        for part in PARTS:
            cluster.kubectl("rollout", "status", part, f"--namespace={NAMESPACE}", "--timeout=600s")
        yield cluster
    finally:
        cluster.kubectl("delete", "pod", "from-before", "--grace-period=0", "--force", "--ignore-not-found", check=False)
        helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait", kubeconfig=cluster.outside_kubeconfig, check=False)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        cluster.kubectl(
            "delete", "crd", "gpushares.aim.amd.com", "gpunodes.aim.amd.com", "partitionplans.aim.amd.com", check=False
        )
        cluster.kubectl("delete", "resourceslices", "--all", check=False)


def is_admitted(cluster: Cluster, item: dict[str, Any], namespace: str) -> bool:
    """Applied; False while the API server has no endpoint of the webhooks that answers, as during their rollout."""
    try:
        cluster.apply(item, namespace)
    except RuntimeError as error:
        if "failed calling webhook" not in str(error):
            raise
        return False
    return True


def pod(name: str) -> dict[str, Any]:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"gpu-fraction": "0.5"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [main]},
    }


def test_an_upgrade_from_an_earlier_build_keeps_pods_and_brings_new_definitions(installed: Cluster) -> None:
    status = installed.get("pod", "from-before")["status"]
    assert status["phase"] == "Running"
    assert status["containerStatuses"][0]["restartCount"] == 0

    def knows_simulated() -> bool:
        schema = installed.get("crd", "gpushares.aim.amd.com")["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        return "simulated" in schema["properties"]["status"]["properties"]["replicas"]["items"]["properties"]

    wait_until(knows_simulated, "the upgrade updates the definitions")
    installed.delete("pod", "from-before")


def test_what_the_chart_installs_shares_a_gpu(installed: Cluster, namespace: str) -> None:
    wait_until(lambda: installed.get_all("resourceslices") != [], "GPUs are published")
    for name in ("one", "two"):
        wait_until(partial(is_admitted, installed, pod(name), namespace), "the webhooks are reached")
    for name in ("one", "two"):
        installed.wait(f"pod/{name}", "condition=Ready", namespace)
    assert "AIMGPU_MEMORY_BYTES=" in installed.exec("one", "env", namespace=namespace)
    # The watchdog looks at the open files of processes that are not the agent's.
    look = ("python", "-c", "import os; print(os.listdir('/proc/1/fd'))")
    assert installed.exec("daemonset/aim-gpu-sharing-agent", *look, namespace=NAMESPACE).startswith("[")
    wait_until(lambda: len(installed.get_all("gpushares", namespace)) == 2, "shares are reported")

    installed.delete("pod", "one", "two", namespace=namespace)
    wait_until(lambda: installed.get_all("gpushares", namespace) == [], "shares go with their pods")


def test_an_upgrade_changes_only_what_was_asked_and_keeps_shares(installed: Cluster, namespace: str) -> None:
    wait_until(partial(is_admitted, installed, pod("kept"), namespace), "the webhooks are reached")
    installed.wait("pod/kept", "condition=Ready", namespace)
    helm(
        *("upgrade", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--reuse-values", "--set=operator.replicas=1"),
        kubeconfig=installed.outside_kubeconfig,
    )
    for part in PARTS:
        installed.kubectl("rollout", "status", part, f"--namespace={NAMESPACE}", "--timeout=600s")
    status = installed.get("pod", "kept", namespace)["status"]
    assert status["phase"] == "Running"
    assert status["containerStatuses"][0]["restartCount"] == 0
    installed.delete("pod", "kept", namespace=namespace)


def test_a_node_is_tried_with_the_agents_rights_and_nothing_is_left(installed: Cluster, tmp_path: Path) -> None:
    where = ["--kubeconfig", str(installed.outside_kubeconfig), "--report", str(tmp_path / "report.json"), "--json"]
    program = str(Path(sys.executable).parent / "aimgpu")
    found = json.loads(run([program, "k8s", "verify-node", installed.nodes[0].name, *where]))
    trials = {trial["what"]: trial for trial in found["trials"]}
    assert trials["right to memory modes"]["outcome"] == "passed"
    assert trials["preload"]["outcome"] == "passed", trials["preload"]["text"]
    assert (found["real"], trials["memory cap"]["outcome"]) == (False, "skipped")
    assert json.loads((tmp_path / "report.json").read_text())["trials"] == found["trials"]
    pods = partial(installed.get_all, "pods", NAMESPACE, "app.kubernetes.io/component=verify")
    wait_until(lambda: pods() == [], "the pod is removed")


def test_tokens_of_agent_and_gateway_write_what_is_theirs_only(installed: Cluster, namespace: str) -> None:
    node = installed.nodes[0].name
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    foreign = slice_of("foreign", {"driver": "gpu.example.com", "nodeName": node, "pool": pool, "devices": []})
    installed.apply([{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}, foreign])
    container = {"name": "main", "image": BUSYBOX_IMAGE}
    for name, key in (("dns", "k8s-app"), ("model", "aim.amd.com/served-model")):
        template = {"metadata": {"labels": {key: name}}, "spec": {"containers": [container]}}
        spec = {"replicas": 0, "selector": {"matchLabels": {key: name}}, "template": template}
        installed.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}, namespace)
    agents = installed.get_all("pods", NAMESPACE, "app.kubernetes.io/component=agent")
    running = next(pod for pod in agents if _is_ready(pod) and not pod["metadata"].get("deletionTimestamp"))
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={running['metadata']['name']}")
    agent = partial(write_as, installed, token_of(installed, "aim-gpu-sharing-agent", *bound))
    label = {"metadata": {"labels": {"some": "label"}}}
    slices, gpu_nodes = "/apis/resource.k8s.io/v1/resourceslices", "/apis/aim.amd.com/v1alpha1/gpunodes"
    assert agent("PATCH", f"/api/v1/nodes/{node}", label)[0] == 200
    gpu_node = {"apiVersion": "aim.amd.com/v1alpha1", "kind": "GpuNode", "metadata": {"name": "other"}, "spec": {}}
    made = {"driver": "gpu.aim.amd.com", "nodeName": "other", "pool": {**pool, "name": "other"}, "devices": []}
    for method, path, body in (
        ("PATCH", "/api/v1/nodes/other", label),
        ("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}),
        ("POST", slices, slice_of("made", made)),
        ("DELETE", f"{slices}/foreign", {}),
        ("POST", gpu_nodes, gpu_node),
    ):
        status, text = agent(method, path, body)
        assert (status, "of its own node only" in text) == (403, True), (path, text)

    gateway = partial(write_as, installed, token_of(installed, "aim-gpu-sharing-gateway"), "PATCH")
    deployments, up = f"/apis/apps/v1/namespaces/{namespace}/deployments", {"spec": {"replicas": 1}}
    assert gateway(f"{deployments}/model/scale", up)[0] == 200
    status, text = gateway(f"{deployments}/dns/scale", up)
    assert (status, "select their pods by the label" in text) == (403, True), text
    assert gateway(f"{deployments}/model", label)[0] == 403
    installed.kubectl("delete", "node/other", "resourceslice/foreign")


def slice_of(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def token_of(cluster: Cluster, account: str, *bound: str) -> str:
    return cluster.kubectl("create", "token", account, f"--namespace={NAMESPACE}", *bound).strip()


def write_as(cluster: Cluster, token: str, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """A dry run with this token: what the API server answers."""
    config = yaml.safe_load(cluster.outside_kubeconfig.read_text())["clusters"][0]["cluster"]
    trusted = ssl.create_default_context(cadata=base64.b64decode(config["certificate-authority-data"]).decode())
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    head = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    url = f"{config['server']}{path}?dryRun=All"
    request = urllib.request.Request(url, json.dumps(body).encode(), head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("repartition", [True, False])
def test_plans_back_and_forth_leave_no_pod_of_a_deployment_without_a_gpu(
    installed: Cluster, namespace: str, *, repartition: bool
) -> None:
    upgrade = ("upgrade", RELEASE, str(CHART), f"--namespace={NAMESPACE}", "--reuse-values")
    helm(*upgrade, f"--set=agent.repartition={str(repartition).lower()}", kubeconfig=installed.outside_kubeconfig)
    installed.kubectl("rollout", "status", PARTS[0], f"--namespace={NAMESPACE}", "--timeout=600s")
    template = pod("moved")
    template["metadata"] = {"labels": {"app": "moved"}, "annotations": {"gpu-memory": "8192"}}
    spec = {"selector": {"matchLabels": {"app": "moved"}}, "template": {key: template[key] for key in ("metadata", "spec")}}
    installed.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "moved"}, "spec": spec}, namespace)
    installed.kubectl("rollout", "status", "deployment/moved", f"--namespace={namespace}", "--timeout=600s")

    def seen() -> tuple[str, list[str]]:
        """The mode of the GPU, and whether each pod is ready."""
        gpu = installed.get("gpunode", installed.nodes[0].name)["status"]["gpus"][0]
        pods = [one["status"].get("conditions", []) for one in installed.get_all("pods", namespace, "app=moved")]
        return gpu["computeMode"], [next((c["status"] for c in one if c["type"] == "Ready"), "") for one in pods]

    for mode in ("DPX", "QPX", "SPX"):
        plan = {"apiVersion": "aim.amd.com/v1alpha1", "kind": "PartitionPlan", "metadata": {"name": "moves"}}
        installed.apply({**plan, "spec": {"layout": {"computeMode": mode}}})
        installed.wait("partitionplan/moves", "jsonpath={.status.phase}=Succeeded")
        wait_for(seen, partial(operator.eq, (mode, ["True"])), f"the pod runs, on a GPU in {mode}")
        installed.kubectl("delete", "partitionplan", "moves")
    installed.delete("deployment", "moved", namespace=namespace)


STACK = """
queue: {per_gpu: 9, longest_wait: {low: 7m}, most_queued: {low: 100}}
models:
  chat: {model: org/chat, engine: vllm, image: "IMAGE", gpu: {fraction: 0.25}, concurrency: 4, priority: high,
         slo: {ttft_p95: 30s, availability: 99%}}
  rare: {model: org/rare, engine: vllm, image: "IMAGE", gpu: {memory: 4GiB}, keep: 1h}
"""


@pytest.fixture(scope="module")
def stack(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    installed.add_image(ENGINE_IMAGE, programs={"vllm": "tests.programs.fake_vllm"})
    path = tmp_path_factory.mktemp("stack") / "stack.yaml"
    path.write_text(STACK.replace("IMAGE", ENGINE_IMAGE))
    return path


def aimgpu(cluster: Cluster, namespace: str, *arguments: str) -> str:
    """The command as a user runs it, from outside the cluster."""
    where = ["--on", "kubernetes", "--kubeconfig", str(cluster.outside_kubeconfig), "--namespace", namespace]
    command = [str(Path(sys.executable).parent / "aimgpu"), *arguments, *where]
    return run(command)


def run(command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
    return done.stdout


def test_a_stack_file_is_applied_seen_and_removed(installed: Cluster, namespace: str, stack: Path) -> None:
    shown = aimgpu(installed, namespace, "up", "-f", str(stack), "--dry-run")
    assert "gpu-fraction: '0.25'" in shown
    assert installed.get_all("deployments", namespace) == []

    aimgpu(installed, namespace, "up", "-f", str(stack))
    # A resize goes by the share that the operator reports, after the pods are ready.
    found = wait_for(
        partial(instances, installed, namespace), lambda found: found["chat"][0]["memory_bytes"], "the share of the pod"
    )
    rows = {name: row for name, (row,) in found.items()}
    assert (rows["chat"]["state"], rows["rare"]["state"]) == ("ready", "ready")
    printed = partial(aimgpu, installed, namespace, "logs", "chat")
    wait_for(printed, lambda text: "Application startup complete" in text, "the log of the pod")
    pod = installed.get("pod", rows["chat"]["id"], namespace)
    assert pod["spec"]["resourceClaims"]

    again = json.loads(aimgpu(installed, namespace, "up", "-f", str(stack), "--json"))
    assert {change["change"] for change in again["changes"]} == {"unchanged"}
    assert installed.get("pod", rows["chat"]["id"], namespace)["metadata"]["uid"] == pod["metadata"]["uid"]

    check_resize(installed, namespace, rows["chat"]["id"], stack)
    shorter = stack.with_name("shorter.yaml")
    shorter.write_text("\n".join(stack.read_text().splitlines()[:5]))
    pruned = json.loads(aimgpu(installed, namespace, "up", "-f", str(shorter), "--prune", "--json"))
    assert [change["name"] for change in pruned["changes"] if change["change"] == "deleted"] == ["rare", "rare"]
    with pytest.raises(RuntimeError, match="there is no model 'rare'"):
        aimgpu(installed, namespace, "down", "rare")
    aimgpu(installed, namespace, "down")
    assert installed.get_all("deployments,services,networkpolicies", namespace) == []


def instances(cluster: Cluster, namespace: str) -> dict[str, list[dict[str, Any]]]:
    """What `aimgpu ps` shows, by model; a pod that ends is shown until it is gone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(aimgpu(cluster, namespace, "ps", "--json"))["instances"]:
        found.setdefault(row["name"], []).append(row)
    return found


def check_resize(cluster: Cluster, namespace: str, before: str, stack: Path) -> None:
    """The command replaces the pod and waits for it; the stack file applied again sets its own share, and no other is left."""

    def asked() -> dict[str, str]:
        found: dict[str, str] = cluster.get("deployment", "chat", namespace)["spec"]["template"]["metadata"]["annotations"]
        return {key: value for key, value in found.items() if key.startswith("gpu-")}

    with pytest.raises(RuntimeError, match="no GPU of the cluster has room"):
        aimgpu(cluster, namespace, "resize", "chat", "--memory", "900GiB")
    assert "would get 20GiB" in aimgpu(cluster, namespace, "resize", "chat", "--memory", "20GiB", "--dry-run")
    assert asked() == {"gpu-fraction": "0.25"}
    shown = aimgpu(cluster, namespace, "resize", "chat", "--memory", "20GiB")
    assert "The old pod answers until the new one is ready" in shown
    assert asked() == {"gpu-memory": str(20 << 10)}
    strategy = cluster.get("deployment", "chat", namespace)["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}, "as it was before"
    rows = wait_for(
        lambda: instances(cluster, namespace)["chat"],
        lambda rows: len(rows) == 1 and rows[0]["memory_bytes"],
        "the old pod is gone, and the share of the new one is reported",
    )
    assert (rows[0]["id"] != before, rows[0]["state"], rows[0]["memory_bytes"]) == (True, "ready", 20 << 30)
    aimgpu(cluster, namespace, "up", "-f", str(stack), "--detach")
    assert asked() == {"gpu-fraction": "0.25"}


def guide_commands() -> list[str]:
    """What the deployment guide has its reader type on a cluster that the chart is installed in, in its order."""
    text = (ROOT / "docs" / "how-to" / "deploy-from-a-clean-node.md").read_text()
    section = text.partition("## A Kubernetes cluster")[2].partition("| instead of claims")[0]
    lines = (line.strip().partition("  #")[0] for line in section.splitlines() if line.startswith("       "))
    return [line for line in lines if line.startswith(("kubectl", "aimgpu", "curl", "KEY="))]


GUIDE_SHOWS = {  # sooner or later
    "kubectl get gpunodes": "MI300X",
    "kubectl get resourceslices": "gpu.aim.amd.com",
    "kubectl get gpushares": "half",
    "kubectl get gpushares --all-namespaces": "True",
    "curl -s": '"chat"',
}


def test_the_deployment_guide_works_as_it_is_written(installed: Cluster, stack: Path) -> None:
    installed.add_image("registry.k8s.io/pause:3.10")
    folders = [Path(sys.executable).parent, Path(installed.program("kubectl")).parent]
    search = ":".join([*map(str, folders), os.environ["PATH"]])
    environment = os.environ | {"KUBECONFIG": str(installed.outside_kubeconfig), "PATH": search}

    def follow(line: str) -> str:
        return run(["/bin/sh", "-c", line], environment, stack.parent)

    def shows(line: str, words: str) -> bool:
        return words in follow(line)

    for line in guide_commands():
        if "port-forward" in line:
            ready = wait_for(partial(gateways, installed), bool, "a gateway")
            port = installed.forward(8080, ready[0]["status"]["podIP"])
        elif "keys add" in line:
            environment["KEY"] = follow(f"{line}; echo $KEY").strip()
        elif shown := next((words for start, words in GUIDE_SHOWS.items() if line == start or start == line[:7]), None):
            command = line.replace("127.0.0.1:8080", f"127.0.0.1:{port}") if line.startswith("curl") else line
            wait_until(partial(shows, command, shown), line)
        else:
            follow(line + (" --timeout=600s" if "--for=condition" in line else ""))
    follow("aimgpu down --on kubernetes; aimgpu keys remove alice --on kubernetes")


def gateways(cluster: Cluster) -> list[dict[str, Any]]:
    """The pods that are ready."""
    pods = cluster.get_all("pods", NAMESPACE, "app.kubernetes.io/component=gateway")
    return [pod for pod in pods if _is_ready(pod) and not pod["metadata"].get("deletionTimestamp")]


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True"


def ask(port: int, key: str, model: str) -> tuple[int, dict[str, Any]]:
    """One chat request to a forwarded gateway."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data=body, headers=head)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_gateway_serves_wakes_and_survives_the_loss_of_a_replica(installed: Cluster, namespace: str, stack: Path) -> None:
    impatient = stack.with_name("impatient.yaml")
    impatient.write_text(stack.read_text().replace("keep: 1h", "keep: 5s"))
    aimgpu(installed, namespace, "up", "-f", str(impatient), "--detach")
    both = wait_for(partial(gateways, installed), lambda found: len(found) == 2, "two gateways")
    key = aimgpu_keys(installed, "add", "alice").strip()
    first, second = sorted(pod["status"]["podIP"] for pod in both)
    ports = [installed.forward(8080, address) for address in (first, second)]
    wait_until(lambda: all(ask(port, key, "chat")[0] == 200 for port in ports), "both gateways serve")
    service = f"/api/v1/namespaces/{NAMESPACE}/services/aim-gpu-sharing-gateway:http/proxy/readyz"
    wait_until(lambda: "ready" in installed.kubectl("get", f"--raw={service}", check=False), "its Service has endpoints")
    assert ask(ports[0], "aimgpu-wrong", "chat")[0] == 401
    assert ask(ports[0], key, "no-such-model")[0] == 404

    # Idle for its five seconds, the model is scaled to zero; the next request is held until it is back.
    wait_until(lambda: replicas(installed, "rare", namespace) == 0, "scaled to zero")
    again = json.loads(aimgpu(installed, namespace, "up", "-f", str(impatient), "--detach", "--json"))
    assert {one["change"] for one in again["changes"]} == {"unchanged"}  # it is not woken by that
    status, answer = ask(ports[1], key, "rare")
    assert status == 200, answer

    def report() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(aimgpu(installed, namespace, "slo", "--json"))
        return found

    def scores() -> dict[str, Any]:
        found: dict[str, Any] = report()["models"]["chat"]
        return found

    def bounds() -> tuple[int | None, float, int]:
        queue = report()["queue"]
        return queue["per_gpu"], queue["longest_wait_seconds"]["low"], queue["most_queued"]["low"]

    # One gateway that does not answer at once is left out of a report.
    wait_for(scores, lambda chat: chat["targets"] and chat["windows"][-1]["requests"] >= 2, "the scores of both gateways")
    wait_for(scores, lambda chat: 0 < chat["slots"] <= 4, "gateways divide the slots that the model has")
    wait_for(bounds, lambda found: found == (9, 420.0, 100), "gateways divide the queue's bounds of the stack")
    check_page_of_the_pod(installed, NAMESPACE, (namespace, key))
    check_page_in_chromium(installed, (namespace, key), ENGINE_IMAGE)

    both = wait_for(partial(gateways, installed), lambda found: len(found) == 2, "both are ready")
    lost = next(pod for pod in both if pod["status"]["podIP"] == first)
    installed.kubectl("delete", "pod", lost["metadata"]["name"], f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
    assert ask(ports[1], key, "chat")[0] == 200
    wait_until(lambda: len(gateways(installed)) == 2, "a new gateway")

    aimgpu_keys(installed, "remove", "alice")
    wait_until(lambda: ask(ports[1], key, "chat")[0] == 401, "the removed key is refused")
    aimgpu(installed, namespace, "down")
    wait_for(bounds, lambda found: found[:2] == (None, 120.0), "the defaults of the queue")
    check_layouts_of_the_pod(installed, NAMESPACE, namespace)


def test_a_request_for_a_model_whose_image_is_nowhere_is_answered_with_the_reason(
    installed: Cluster, namespace: str, stack: Path
) -> None:
    image = "localhost/nowhere:1"
    broken = stack.with_name("broken.yaml")
    broken.write_text(f'models: {{broken: {{model: org/broken, engine: vllm, image: "{image}", gpu: {{memory: 4GiB}}}}}}')
    aimgpu(installed, namespace, "up", "-f", str(broken), "--detach")
    key = aimgpu_keys(installed, "add", "bob").strip()
    ready = wait_for(partial(gateways, installed), bool, "a gateway")
    port = installed.forward(8080, ready[0]["status"]["podIP"])

    def knows(found: tuple[int, Any]) -> bool:
        """The gateway: the key, and the model."""
        return found[0] not in {401, 404} and "No model is served here yet" not in str(found[1])

    status, answer = wait_for(partial(ask, port, key, "broken"), knows, "an answer")
    assert (status, image in answer["error"]["message"]) == (503, True), answer
    aimgpu_keys(installed, "remove", "bob")
    aimgpu(installed, namespace, "down")


def test_one_model_and_the_web_chat_are_deployed_twice_and_cleaned_up(installed: Cluster, namespace: str, stack: Path) -> None:
    model = (
        "deploy",
        "org/Tiny-1B",
        "--engine",
        "vllm",
        "--image",
        ENGINE_IMAGE,
        "--memory",
        "2GiB",
        "--cache",
        "1Gi",
        "--no-wait",
    )
    web = ("deploy", "web", "--image", PYTHON_IMAGE, "--pull-policy", "Never")
    assert "gpu-memory: '2048'" in k8s(installed, namespace, *model)
    k8s(installed, namespace, *web)
    for again in (model, web):
        changes = json.loads(k8s(installed, namespace, *again, "--json"))["changes"]
        assert {one["change"] for one in changes} == {"unchanged"}
    installed.kubectl("rollout", "status", "deployment/aim-gpu-web-chat", f"--namespace={namespace}", "--timeout=600s")
    (chat,) = installed.get_all("pods", namespace, "app.kubernetes.io/component=web-chat")
    with urllib.request.urlopen(f"http://127.0.0.1:{installed.forward(8000, chat['status']['podIP'])}/") as page:
        assert b"<title>Chat</title>" in page.read()

    status = partial(k8s, installed, namespace, "status", "--json")
    found = wait_for(lambda: json.loads(status()), lambda found: found["nodes"][0]["gpus"], "the node's GPUs")
    assert found["gateways"]["wanted"] == 2
    assert "MI300X (simulated)" in found["nodes"][0]["gpus"]
    assert " of " in found["nodes"][0]["granted"]
    assert [row["name"] for row in found["instances"]] == ["Tiny-1B"]

    k8s(installed, namespace, "cleanup")
    assert installed.get_all("deployments,services,secrets,networkpolicies", namespace) == []
    claims = installed.get_all("persistentvolumeclaims", namespace)
    assert [claim["metadata"]["labels"]["aim.amd.com/served-model"] for claim in claims] == ["Tiny-1B"]
    k8s(installed, namespace, "cleanup", "--caches")
    left = installed.get_all("persistentvolumeclaims", namespace)
    assert all(claim["metadata"].get("deletionTimestamp") for claim in left)


def k8s(cluster: Cluster, namespace: str, *arguments: str) -> str:
    where = ["--kubeconfig", str(cluster.outside_kubeconfig), "--namespace", namespace]
    return run([str(Path(sys.executable).parent / "aimgpu"), "k8s", *arguments, *where])


def replicas(cluster: Cluster, name: str, namespace: str) -> int:
    found: int = cluster.get("deployment", name, namespace)["spec"]["replicas"]
    return found


def aimgpu_keys(cluster: Cluster, verb: str, name: str) -> str:
    command = [str(Path(sys.executable).parent / "aimgpu"), "keys", verb, name, "--on", "kubernetes"]
    command += ["--kubeconfig", str(cluster.outside_kubeconfig)]
    return run(command)


def test_uninstalling_leaves_nothing_but_definitions(installed: Cluster) -> None:
    helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait", kubeconfig=installed.outside_kubeconfig)
    kinds = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,deviceclasses"
    kinds += ",validatingadmissionpolicies,validatingadmissionpolicybindings"
    left = json.loads(installed.kubectl("get", kinds, "--output=json"))["items"]
    names = [
        item["metadata"]["name"]
        for item in left
        if "aim-gpu" in item["metadata"]["name"] or "aim.amd" in item["metadata"]["name"]
    ]
    assert names == []
    assert (
        installed.get_all(
            "daemonsets,deployments,services,jobs,serviceaccounts", NAMESPACE, "app.kubernetes.io/part-of=aim-gpu-sharing"
        )
        == []
    )
    labels = [name for node in installed.get_all("nodes") for name in node["metadata"]["labels"]]
    assert not [name for name in labels if name.startswith(("aim.amd.com/", "amd.com/", "nvidia.com/"))]
    assert installed.get_all("gpunodes") == []
    assert installed.get_all("resourceslices") == []
    templates = json.loads(installed.kubectl("get", "resourceclaimtemplates", "--all-namespaces", "--output=json"))["items"]
    assert [item["metadata"]["name"] for item in templates if "aim-gpu" in item["metadata"]["name"]] == []

    def names_left(kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in installed.get_all(kind, NAMESPACE)]

    # The callers' keys are data.
    wait_until(lambda: set(names_left("secrets")) <= {"aim-gpu-sharing-keys"}, "certificates go")
    wait_until(lambda: names_left("leases") == [], "Leases go")
    wait_until(lambda: names_left("configmaps") == ["kube-root-ca.crt"], "the queue's bounds go")
