import json
import ssl
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.cluster import requirements
from tests.cluster.cluster import BUSYBOX_IMAGE, PYTHON_IMAGE, Cluster
from tests.cluster.images import CHECKOUT
from tests.cluster.kubernetes_versions import COMPONENTS, chosen_minor, chosen_version
from tests.cluster.requirements import missing
from tests.cluster.waiting import wait_for
from tests.cluster.wrapper_module import wrapper


def pod(name: str, image: str, *command: str, node: str = "node1") -> dict[str, object]:
    container = {"name": "main", "image": image, "imagePullPolicy": "Never", "command": list(command)}
    chosen = {"kubernetes.io/hostname": node}
    spec = {"nodeSelector": chosen, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_pod_runs_this_checkout_and_reaches_the_api_with_its_own_token(cluster: Cluster, namespace: str) -> None:
    program = """
import os, ssl, urllib.request
import aimgpu
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=folder + "/ca.crt")
token = open(folder + "/token").read()
url = "https://%s/version" % os.environ["KUBERNETES_SERVICE_HOST"]
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
print(aimgpu.__file__, urllib.request.urlopen(request, context=context).read().decode())
"""
    cluster.apply(pod("web", PYTHON_IMAGE, "python", "-c", program), namespace)
    cluster.wait("pod/web", "jsonpath={.status.phase}=Succeeded", namespace)

    printed = cluster.kubectl("logs", "web", f"--namespace={namespace}")

    assert printed.startswith(str(CHECKOUT / "src" / "aimgpu"))
    assert f'"gitVersion": "{chosen_version()}"' in printed


def test_pods_outlive_a_killed_kubelet_and_a_killed_containerd(cluster: Cluster, namespace: str) -> None:
    node = cluster.nodes[0]
    cluster.apply(pod("before", BUSYBOX_IMAGE, "/bin/sleep", "1000"), namespace)
    cluster.wait("pod/before", "condition=Ready", namespace)

    node.restart_containerd(kill=True)
    node.restart_kubelet(kill=True)
    cluster.apply(pod("after", BUSYBOX_IMAGE, "/bin/sleep", "1000"), namespace)
    cluster.wait("pod/after", "condition=Ready", namespace)

    assert cluster.get("pod", "before", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0


def test_programs_outside_reach_the_api_by_the_outside_kubeconfig(cluster: Cluster) -> None:
    configuration = yaml.safe_load(cluster.outside_kubeconfig.read_text())
    server = configuration["clusters"][0]["cluster"]["server"]
    context = ssl.create_default_context(cafile=str(cluster.authority.certificate))
    client = cluster.certificate("outside", ())
    context.load_cert_chain(client.certificate, client.key)

    with urllib.request.urlopen(f"{server}/version", context=context) as answer:
        assert json.load(answer)["minor"] == str(chosen_minor())


def test_a_program_on_the_node_sees_the_node_as_its_machine(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    show = "import os; print(sorted(os.listdir('/var/lib/kubelet')), os.path.exists('/dev/vda'))"

    printed = node.run(sys.executable, "-c", show)

    assert "plugins_registry" in printed
    assert printed.strip().endswith("False")


@pytest.mark.parametrize("line", ["k8s.io/api => ./staging/src/k8s.io/api", "replace k8s.io/api => ./staging/src/k8s.io/api"])
def test_a_wrapper_takes_staging_modules_at_their_published_version(line: str) -> None:
    text = wrapper(
        f"// comment\n\nmodule k8s.io/kubernetes\n\nrequire (\n\tk8s.io/api v0.0.0\n)\n\n{line}\n",
        "k8s.io/kubernetes",
        "v1.36.4",
    )

    assert "\tk8s.io/api v0.36.4\n" in text
    assert "k8s.io/api => k8s.io/api v0.36.4\n" in text
    assert "require k8s.io/kubernetes v1.36.4\n" in text
    assert text.startswith("module aimgpu.test/programs")


def test_two_nodes_their_pods_and_services_reach_each_other_and_nothing_is_left() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    server = pod("server", BUSYBOX_IMAGE, "/bin/sh", "-c", "echo hello > /tmp/index.html; exec httpd -f -p 8080 -h /tmp")
    server |= {"metadata": {"name": "server", "labels": {"app": "server"}}}
    ports = [{"port": 80, "targetPort": 8080}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": ports},
    }
    with Cluster(nodes=2, proxy=True) as pair:
        pair.apply([server, service, pod("client", BUSYBOX_IMAGE, "/bin/sleep", "1000", node="node2")])
        for name in ("server", "client"):
            pair.wait(f"pod/{name}", "condition=Ready")
        assert pair.get("pod", "client")["spec"]["nodeName"] == "node2"

        direct = pair.get("pod", "server")["status"]["podIP"]
        # A pod without a probe is ready before it listens, and kube-proxy follows the endpoints.
        wait_for(partial(fetched, pair, "client", f"http://{direct}:8080/"), lambda text: text == "hello\n", "pod to pod")
        address = pair.get("service", "server")["spec"]["clusterIP"]
        wait_for(partial(fetched, pair, "server", f"http://{address}/"), lambda text: text == "hello\n", "pod to Service")
        # More than one connection over the forwarded port.
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{pair.forward(8080, direct)}/") as answer:
                assert answer.read() == b"hello\n"

    assert pair.leftovers() == []


def fetched(cluster: Cluster, pod_name: str, url: str) -> str:
    """From inside that pod; empty where nothing answers."""
    return cluster.kubectl("exec", pod_name, "--", "wget", "-q", "-O", "-", url, check=False)


def test_without_root_or_tools_the_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(requirements, "TOOLS", ("no-such-tool",))
    monkeypatch.setattr(requirements, "KEYRING", tmp_path / "none")
    reason = requirements.missing()
    assert reason is not None
    for words in ("root", "no-such-tool", "debian-archive-keyring"):
        assert words in reason


def test_given_programs_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in COMPONENTS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    monkeypatch.setattr(requirements, "unpack", lambda: tmp_path / "packages")
    (tmp_path / "packages/usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    found = requirements.programs.__wrapped__()
    assert found.find("kubelet") == str(tmp_path / "kubelet")
    with pytest.raises(FileNotFoundError, match="no program etcd in"):
        found.find("etcd")
