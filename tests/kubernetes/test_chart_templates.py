"""What the chart's templates render, for which values, and which values are refused."""

import subprocess
import sys
from typing import Any

import pytest
import yaml
from tests.kubernetes.chart import CHART, NAMESPACE, RELEASE, ROOT, helm

from aimgpu.kubernetes.admission.namespace_warnings import warning_policies
from aimgpu.kubernetes.admission.namespaces import AdmittedNamespaces
from aimgpu.kubernetes.admission.webhook_configurations import mutating_configuration
from aimgpu.kubernetes.operator.config_manager import DCM_TAINT
from aimgpu.kubernetes.operator.plan_vocabulary import PLAN_TAINT


def rendered(*options: str) -> list[dict[str, Any]]:
    text = helm("template", RELEASE, str(CHART), "--kube-version=1.36.4", f"--namespace={NAMESPACE}", *options)
    return [item for item in yaml.safe_load_all(text) if item]


def test_generated_files_of_the_chart_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "generate_chart.py"), "--check"], check=True)


def test_the_chart_lints() -> None:
    assert "0 chart(s) failed" in helm("lint", str(CHART))


def test_containers_are_confined() -> None:
    for item in rendered():
        if item["kind"] not in ("DaemonSet", "Deployment", "Job"):
            continue
        for container in item["spec"]["template"]["spec"]["containers"]:
            context = container["securityContext"]
            assert not context.get("privileged")
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["seccompProfile"]
            if item["kind"] != "DaemonSet":
                assert context["runAsNonRoot"]


@pytest.mark.parametrize(
    "wrong",
    [
        "image.digest=abc",
        "admission.replicas=0",
        "agent.simulated=two words",
        "operatr.enabled=true",
        "agent.enabled=maybe",
        "admission.namespaces=some",
        "agent.singleDevice=maybe",
    ],
)
def test_wrong_values_are_refused(wrong: str) -> None:
    with pytest.raises(RuntimeError, match="values don't meet"):
        rendered("--set-string" if "maybe" in wrong else "--set", wrong)


def test_with_cert_manager_the_server_reads_another_secret_than_the_one_it_would_write_itself() -> None:
    issuer = "--set=admission.certManager.issuer.name=local"
    items = rendered("--set=admission.certManager.enabled=true", issuer)
    (certificate,) = (item for item in items if item["kind"] == "Certificate")
    (server,) = (item for item in items if item["kind"] == "Deployment" and item["metadata"]["name"].endswith("admission"))
    (role,) = (item for item in items if item["kind"] == "Role" and item["metadata"]["name"].endswith("admission"))
    secret = certificate["spec"]["secretName"]
    pod = server["spec"]["template"]["spec"]
    assert secret != server["metadata"]["name"]
    assert certificate["spec"]["issuerRef"] == {"kind": "Issuer", "name": "local"}
    assert {"name": "certificates", "secret": {"secretName": secret}} in pod["volumes"]
    assert f"--secret={secret}" in pod["containers"][0]["args"]
    named = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert named == {secret, server["metadata"]["name"]}  # the Certificate has the server's name; its own Secret as before
    with pytest.raises(RuntimeError, match=r"certManager\.issuer\.name"):
        rendered("--set=admission.certManager.enabled=true")


def test_a_slow_start_of_the_admission_server_does_not_have_it_killed() -> None:
    (server,) = (i for i in rendered() if i["kind"] == "Deployment" and i["metadata"]["name"].endswith("admission"))
    (container,) = server["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


@pytest.mark.parametrize(("value", "options"), [("auto", []), ("true", ["--single-device"]), ("false", ["--no-single-device"])])
def test_the_form_of_devices_is_the_agents_choice_unless_it_is_set(value: str, options: list[str]) -> None:
    (agent,) = [item for item in rendered(f"--set=agent.singleDevice={value}") if item["kind"] == "DaemonSet"]
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert [argument for argument in container["args"] if "single-device" in argument] == options


def test_the_agent_gets_nvidias_library_from_the_container_toolkit_and_mps_where_it_is_set() -> None:
    (plain,) = [item for item in rendered() if item["kind"] == "DaemonSet"]
    assert "runtimeClassName" not in plain["spec"]["template"]["spec"]
    chosen = rendered("--set=agent.runtimeClassName=nvidia", "--set=agent.mps=true")
    (agent,) = [item for item in chosen if item["kind"] == "DaemonSet"]
    assert agent["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "utility" in str(environment["NVIDIA_DRIVER_CAPABILITIES"])
    assert environment["AIMGPU_MPS"] == "1"


@pytest.mark.parametrize("values", ["[]", '[{"key": "gpu", "operator": "Exists"}]'])
def test_agent_and_operator_start_on_a_node_that_a_plan_has_closed_whatever_else_they_tolerate(values: str) -> None:
    found = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"].get("tolerations") or []
        for item in rendered("--set-json", f"agent.tolerations={values}")
        if item["kind"] in ("DaemonSet", "Deployment")
    }
    for name in ("aim-gpu-sharing-agent", "aim-gpu-sharing-operator"):
        assert {"key": PLAN_TAINT["key"], "operator": "Exists", "effect": PLAN_TAINT["effect"]} in found[name]
        assert {"key": DCM_TAINT["key"], "operator": "Exists"} in found[name]


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "0" * 64
    images = {
        container["image"]
        for item in rendered("--set", f"image.digest={digest}")
        if item["kind"] in ("DaemonSet", "Deployment")
        for container in item["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"aim-gpu-sharing/aimgpu@{digest}"}


def test_labelled_namespaces_are_an_option_with_policies_that_warn_of_the_others() -> None:
    for scope in AdmittedNamespaces:
        found = rendered("--set", f"admission.namespaces={scope.value}")
        (hooks,) = (item["webhooks"] for item in found if item["kind"] == "MutatingWebhookConfiguration")
        wanted = mutating_configuration(NAMESPACE, "aim-gpu-sharing-admission", scope=scope)["webhooks"]
        assert [hook["namespaceSelector"] for hook in hooks] == [hook["namespaceSelector"] for hook in wanted]
        policies = [item for item in found if item["kind"].startswith("ValidatingAdmissionPolicy")]
        names = [item["metadata"]["name"] for item in warning_policies()] if scope is AdmittedNamespaces.LABELLED else []
        assert sorted(item["metadata"]["name"] for item in policies) == sorted(names)


def test_callers_outside_the_cluster_get_a_port_of_every_node() -> None:
    values = "--set=gateway.service.type=NodePort,gateway.service.nodePort=30080"
    (service,) = (item for item in rendered(values) if item["kind"] == "Service" and item["spec"].get("type") == "NodePort")
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "nodePort": 30080}]


def test_dashboards_and_alerts_are_those_of_the_project() -> None:
    found = rendered("--set=serviceMonitor.enabled=true,alerts.enabled=true,dashboards.enabled=true")
    rules = next(item for item in found if item["kind"] == "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "aimgpu.rules.yml").read_text())
    boards = {name: text for item in found if item["kind"] == "ConfigMap" for name, text in item["data"].items()}
    assert boards == {path.name: path.read_text() for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    ports = [end["port"] for item in found if item["kind"] == "ServiceMonitor" for end in item["spec"]["endpoints"]]
    assert ports == ["internal"]
