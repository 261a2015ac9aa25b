"""What the chart's templates render, for which values, and which values are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes.chart import CHART, NAMESPACE, RELEASE, ROOT, helm

from aimgpu.hardware.simulated import known_products
from aimgpu.kubernetes.cluster.admission.account_policies import gateway_policy, node_policy
from aimgpu.kubernetes.cluster.admission.warning_policies import changed_pod_warning, warning_policies
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, placement_conditions
from aimgpu.kubernetes.cluster.definitions import definition_rules
from aimgpu.kubernetes.cluster.operator.access_rules import namespaced_rules as operator_rules
from aimgpu.kubernetes.cluster.operator.access_rules import placement_rules
from aimgpu.kubernetes.cluster.operator.config_manager import DCM_TAINT
from aimgpu.kubernetes.cluster.operator.options import parse_options as parse_operator_options
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import PLAN_TAINT
from aimgpu.kubernetes.cluster.placer.policy import placement_policy
from aimgpu.kubernetes.models.gateway.access_rules import namespaced_rules as gateway_rules
from aimgpu.kubernetes.models.gateway.options import parse_options as parse_gateway_options
from aimgpu.kubernetes.node.agent.options import parse_options
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.vocabulary.names import PLACER_LEASE
from aimgpu.kubernetes.vocabulary.namespaces import AdmittedNamespaces


def rendered(*options: str, version: str = "1.36.4", repository: str = "registry.example/aimgpu") -> list[dict[str, Any]]:
    command = ("template", RELEASE, str(CHART), f"--kube-version={version}", f"--namespace={NAMESPACE}")
    text = helm(*command, f"--set=image.repository={repository}", *options)
    return [item for item in yaml.safe_load_all(text) if item]


def test_generated_files_of_the_chart_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "generate_chart.py"), "--check"], check=True)


def test_the_chart_lints() -> None:
    assert "0 chart(s) failed" in helm("lint", str(CHART), "--set=image.repository=registry.example/aimgpu")


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


def test_replicas_are_on_different_nodes_where_that_is_possible() -> None:
    found = [item["spec"] for item in rendered() if item["kind"] == "Deployment" and item["spec"]["replicas"] > 1]
    assert len(found) == 3
    for spec in found:
        (rule,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert rule["labelSelector"] == spec["selector"]
        assert rule["whenUnsatisfiable"] == "ScheduleAnyway"


def test_the_page_denies_what_comes_in_and_no_policy_lets_every_namespace_measure() -> None:
    items = rendered()
    policies = {one["metadata"]["name"]: one["spec"] for one in items if one["kind"] == "NetworkPolicy"}
    assert "ingress" not in policies["aim-gpu-sharing-web"]
    for name in ("aim-gpu-sharing-agent", "aim-gpu-sharing-operator", "aim-gpu-sharing-gateway"):
        senders = [one for rule in policies[name]["ingress"] for one in rule.get("from", ())]
        assert senders
        assert {"namespaceSelector": {}} not in senders
    (page,) = [one for one in items if one["kind"] == "Deployment" and one["metadata"]["name"] == "aim-gpu-sharing-web"]
    (container,) = page["spec"]["template"]["spec"]["containers"]
    assert "--host=127.0.0.1" in container["args"]
    assert "exec" in container["readinessProbe"]


def test_short_names_are_those_of_the_releases_namespace_unless_others_are_listed() -> None:
    def arguments(*options: str) -> list[str]:
        (found,) = [
            one
            for one in rendered(*options)
            if one["kind"] == "Deployment" and one["metadata"]["name"] == "aim-gpu-sharing-gateway"
        ]
        return list(found["spec"]["template"]["spec"]["containers"][0]["args"])

    assert f"--short-names={NAMESPACE}" in arguments()
    assert "--short-names=team,*" in arguments("--set=gateway.shortNames={team,*}")


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
        "gateway.service.type=Foo",
        "gateway.service.nodePort=80",
        "gateway.service.port=0",
        "gateway.autoscaling.cpuPercent=101",
        "gateway.keysSecret=",
        "agent.defaultShare=lots",
        "agent.metricsPort=99999",
        "agent.layouts=all",
        "agent.stateFolder=var/lib",
        "agent.resources.limits.memory=lots",
        "agent.resources.limits.memory=-1",
        "agent.resources.limit.memory=1Gi",
        "agent.defaultShare=24GiB",  # a part is meant: GPUs differ
        "agent.simulated=MI300X:0",
        "agent.pod.tolerations=all",
        "commonLabels.cost=1",
        "image.repository=registry.example/aimgpu:1",
        "imagePullSecrets={mine}",
        "operator.watchNamespaces={Team_A}",
        "placement.waiting=1.2.3s",
        "serviceMonitor.interval=often",
    ],
)
def test_wrong_values_are_refused(wrong: str) -> None:
    with pytest.raises(RuntimeError, match="values don't meet"):
        rendered("--set-string" if "maybe" in wrong else "--set", wrong)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("agent.simulated=FOO:1", 'there is no GPU "FOO"'),
        ("gateway.httpRoute.enabled=true", r"httpRoute\.parentRefs"),
        ("gateway.autoscaling.enabled=true,gateway.replicas=5", "maxReplicas=4 is less than"),
        ("gateway.tls.secretName=mine,gateway.service.port=443", "are the same"),
        ("placement.enabled=true,operator.enabled=false", r"operator\.enabled"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        rendered("--set", values)


def test_every_gpu_that_can_be_simulated_is_taken() -> None:
    names = ",".join(f"{product.name}:1" for product in known_products())
    (agent,) = (item for item in rendered("--set-json", f'agent.simulated="{names},h200"') if item["kind"] == "DaemonSet")
    assert f"--simulated={names},h200" in agent["spec"]["template"]["spec"]["containers"][0]["args"]


def test_it_can_be_a_part_of_another_chart(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(CHART, whole / "charts" / CHART.name)
    (whole / "Chart.yaml").write_text("apiVersion: v2\nname: whole\nversion: 0.0.1\n")
    values = ("--set=aim-gpu-sharing.image.repository=registry.example/aimgpu", "--set=global.team=ml")
    assert "aim-gpu-sharing-agent" in helm("template", RELEASE, str(whole), "--kube-version=1.36.4", *values)


@pytest.mark.parametrize("layouts", ["none", "compute", "memory"])
def test_openshift_gets_constraints_with_the_agents_rights_and_gives_the_others_their_users(layouts: str) -> None:
    items = rendered(f"--set=agent.layouts={layouts}", "--api-versions=security.openshift.io/v1")
    (constraints,) = (item for item in items if item["kind"] == "SecurityContextConstraints")
    for item in items:
        if item["kind"] not in ("DaemonSet", "Deployment", "Job"):
            continue
        (container,) = item["spec"]["template"]["spec"]["containers"]
        context = container["securityContext"]
        if item["kind"] == "DaemonSet":
            assert constraints["allowedCapabilities"] == context["capabilities"]["add"]
            assert constraints["seLinuxContext"]["seLinuxOptions"] == context["seLinuxOptions"] == {"type": "spc_t"}
        else:
            assert context["runAsNonRoot"]
            assert "runAsUser" not in context
    assert constraints["users"] == [f"system:serviceaccount:{NAMESPACE}:aim-gpu-sharing-agent"]
    assert not any(item["kind"] == "SecurityContextConstraints" for item in rendered())


def test_placement_comes_with_its_policy_its_rights_and_its_webhook() -> None:
    chosen = ("--set=placement.enabled=true", "--set=placement.pods=all", "--set=placement.waiting=never")
    items = rendered(*chosen)
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in items}
    for wanted in placement_policy(NAMESPACE):
        assert by_name[wanted["kind"], wanted["metadata"]["name"]]["spec"] == wanted["spec"]
    assert by_name["ClusterRole", "aim-gpu-sharing-operator-placement"]["rules"] == placement_rules()
    (operator,) = (item for item in items if item["kind"] == "Deployment" and item["metadata"]["name"].endswith("operator"))
    options = parse_operator_options(operator["spec"]["template"]["spec"]["containers"][0]["args"])
    assert (options.placement, options.waiting_seconds) == ("hint", None)
    for items_, placed in ((items, "all"), (rendered("--set=placement.enabled=true"), "gpu"), (rendered(), "none")):
        (webhooks,) = (item for item in items_ if item["kind"] == "MutatingWebhookConfiguration")
        assert webhooks["webhooks"][2]["matchConditions"] == placement_conditions(placed)
    assert not any("placement" in item["metadata"]["name"] for item in rendered())
    with pytest.raises(RuntimeError, match=r"needs admission\.enabled"):
        rendered(*chosen, "--set=admission.enabled=false")


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
    # The Certificate has the server's name; its own Secret as before.
    assert named == {secret, server["metadata"]["name"], PLACER_LEASE}
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
        for item in rendered("--set-json", f"agent.pod.tolerations={values}")
        if item["kind"] in ("DaemonSet", "Deployment")
    }
    for name in ("aim-gpu-sharing-agent", "aim-gpu-sharing-operator"):
        assert {"key": PLAN_TAINT["key"], "operator": "Exists", "effect": PLAN_TAINT["effect"]} in found[name]
        assert {"key": DCM_TAINT["key"], "operator": "Exists"} in found[name]


@pytest.mark.parametrize("scope", ["all", "labelled"])
def test_with_the_device_plugin_alone_kubernetes_1_29_gets_nothing_that_it_does_not_know(scope: str) -> None:
    options = ("--set=agent.devicePlugin=true", f"--set=admission.namespaces={scope}")
    old, new = (rendered(*options, version=version) for version in ("1.29.0", "1.36.4"))
    versions = {item["apiVersion"] for item in old}
    assert not {one for one in versions if one.startswith("resource.k8s.io/")}
    names = {(item["kind"], item["metadata"]["name"]) for item in old}
    missing = {(item["kind"], item["metadata"]["name"]) for item in new} - names
    policies = [
        *node_policy(NAMESPACE),
        *gateway_policy(NAMESPACE),
        *changed_pod_warning(),
        *(warning_policies() if scope == "labelled" else ()),
    ]
    warnings = {(item["kind"], item["metadata"]["name"]) for item in policies}
    assert missing == warnings | {(item["kind"], item["metadata"]["name"]) for item in device_classes()}
    pods = [item["spec"]["template"]["spec"] for item in old if item["kind"] in ("DaemonSet", "Deployment", "Job")]
    hooks = [handler for pod in pods for one in pod["containers"] for handler in (one.get("lifecycle") or {}).values()]
    assert hooks
    assert all(set(handler) == {"exec"} for handler in hooks)  # 1.29 drops `sleep`, and refuses a handler without action


@pytest.mark.parametrize(
    ("version", "values", "words"),
    [
        ("1.28.9", "agent.devicePlugin=true", "requires kubeVersion: >=1.29.0-0"),
        ("1.33.4", "agent.devicePlugin=false", "the DRA driver needs Kubernetes 1.34 or newer, and this is v1.33.4"),
        ("v1.33.4-eks-3ae1b2c", "agent.devicePlugin=true,agent.kai=true", "agent.kai needs Kubernetes 1.34"),
    ],
)
def test_a_version_that_is_too_old_for_what_is_asked_is_refused_with_what_it_can_run(
    version: str, values: str, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        rendered(f"--set={values}", version=version)
    rendered("--set=agent.devicePlugin=true", version="v1.29.15-eks-3ae1b2c")
    rendered("--set=agent.enabled=false", version="1.33.4")


def test_shares_can_be_read_by_who_may_view_edit_or_administrate_a_namespace() -> None:
    (role,) = [one for one in rendered() if one["kind"] == "ClusterRole" and one["metadata"]["name"] == "aim-gpu-sharing-view"]
    marks = role["metadata"]["labels"]
    assert all(marks[f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true" for name in ("view", "edit", "admin"))
    assert role["rules"] == [{"apiGroups": ["aim.amd.com"], "resources": ["gpushares"], "verbs": ["get", "list", "watch"]}]


def test_a_new_agent_has_to_be_ready_before_the_old_one_goes() -> None:
    (agent,) = [one for one in rendered() if one["kind"] == "DaemonSet"]
    assert agent["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert not any("hostPort" in port for port in container["ports"])  # else two would not fit on a node


@pytest.mark.parametrize(
    ("layouts", "capabilities", "mounts"),
    [
        ("none", set(), set()),
        ("vendor", set(), set()),
        ("compute", {"SYS_ADMIN"}, {"/host/sys"}),
        ("memory", {"SYS_ADMIN", "SYS_MODULE"}, {"/host/sys", "/lib/modules"}),
    ],
)
def test_the_agent_gets_the_rights_for_the_layouts_that_it_may_change_and_no_others(
    layouts: str, capabilities: set[str], mounts: set[str]
) -> None:
    (agent,) = [item for item in rendered(f"--set=agent.layouts={layouts}") if item["kind"] == "DaemonSet"]
    pod = agent["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    always = {"SYS_PTRACE", "DAC_OVERRIDE", "FOWNER", "CHOWN"}
    assert set(container["securityContext"]["capabilities"]["add"]) == always | capabilities
    assert {one["mountPath"] for one in container["volumeMounts"]} & {"/sys", "/host/sys", "/lib/modules"} == mounts
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    options = parse_options(container["args"], {"NODE_NAME": "node1"})
    assert options.layouts == layouts
    assert str(options.sysfs) == ("/host/sys" if mounts else "/sys")
    if not mounts:
        with pytest.raises(RuntimeError, match=r"leave agent\.repartition out"):
            rendered(f"--set=agent.layouts={layouts},agent.repartition=true")


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "0" * 64
    images = {
        container["image"]
        for item in rendered("--set", f"image.digest={digest}")
        if item["kind"] in ("DaemonSet", "Deployment")
        for container in item["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"registry.example/aimgpu@{digest}"}


def test_without_a_name_for_the_image_nothing_is_rendered() -> None:
    with pytest.raises(RuntimeError, match=r"image\.repository is not set: no image is published"):
        rendered(repository="")


COMPONENTS = ("agent", "admission", "operator", "gateway", "web")


@pytest.mark.parametrize("component", COMPONENTS)
def test_what_the_values_add_to_a_pod_is_merged_into_it_and_takes_nothing_away(component: str) -> None:
    pod: dict[str, Any] = {
        "annotations": {"team": "ml"},
        "labels": {"cost": "shared"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "mine",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
    }
    container: dict[str, Any] = {
        "env": [{"name": "HTTPS_PROXY", "value": "proxy.example"}],
        "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}},
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    }
    values = json.dumps({"pod": pod, "container": container, "serviceAccount": {"annotations": {"role": "reader"}}})
    plain, changed = (_of_component(component, *options) for options in ((), ("--set-json", f"{component}={values}")))
    assert plain.pop("account") == {}
    assert changed.pop("account") == {"role": "reader"}
    metadata, spec = changed["metadata"], changed["spec"]
    assert metadata["annotations"] == {"team": "ml"}
    assert metadata["labels"] == {**plain["metadata"]["labels"], "cost": "shared"}
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["priorityClassName"] == "mine"
    for key in ("tolerations", "volumes"):
        fixed = [item for item in plain["spec"].get(key, []) if item != {"operator": "Exists"}]  # the default
        assert spec[key] == [*fixed, *pod[key]]
    (before,), (after,) = plain["spec"]["containers"], spec["containers"]
    for key in ("env", "volumeMounts"):
        assert after[key] == [*before.get(key, []), *container[key]]
    assert after["securityContext"] == {**before["securityContext"], "appArmorProfile": {"type": "RuntimeDefault"}}
    assert {key: after[key] for key in ("image", "command", "resources")} == {
        key: before[key] for key in ("image", "command", "resources")
    }


def _of_component(component: str, *options: str) -> dict[str, Any]:
    """The template of its pods, and the annotations of its account."""
    items = rendered(*options)
    name = f"aim-gpu-sharing-{component}"
    (workload,) = (i for i in items if i["kind"] in ("DaemonSet", "Deployment") and i["metadata"]["name"] == name)
    (account,) = (i for i in items if i["kind"] == "ServiceAccount" and i["metadata"]["name"] == name)
    return {**workload["spec"]["template"], "account": account["metadata"].get("annotations", {})}


@pytest.mark.parametrize(("component", "everywhere"), [("gateway", False), ("operator", True)])
def test_watched_namespaces_get_roles_and_no_other_namespace_does(component: str, *, everywhere: bool) -> None:
    name, rules = f"aim-gpu-sharing-{component}", {"gateway": gateway_rules, "operator": operator_rules}[component]()

    def roles(*options: str) -> dict[tuple[str, str], Any]:
        found = [
            item for item in rendered(*options) if item["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
        ]
        named = [item for item in found if item["metadata"]["name"].startswith(name)]
        return {
            (item["kind"], item["metadata"].get("namespace", "")): item for item in named if name in item["metadata"]["name"]
        }

    whole = roles()
    assert all(rule in whole["ClusterRole", ""]["rules"] for rule in rules)
    watched = roles(f"--set={component}.watchNamespaces={{team,lab}}")
    assert (("ClusterRole", "") in watched) is (("ClusterRoleBinding", "") in watched) is everywhere
    if everywhere:
        assert not [rule for rule in rules if rule in watched["ClusterRole", ""]["rules"]]
    for place in ("team", "lab"):
        assert watched["Role", place]["rules"] == rules
        assert watched["RoleBinding", place]["roleRef"]["name"] == watched["Role", place]["metadata"]["name"]
        assert watched["RoleBinding", place]["subjects"][0]["namespace"] == NAMESPACE
    assert {place for kind, place in watched if kind == "Role"} == {"team", "lab", NAMESPACE}


def test_a_common_label_is_on_every_object_that_is_not_generated() -> None:
    items = rendered("--set=commonLabels.team=ml")
    kinds = {item["kind"] for item in items if item["metadata"].get("labels", {}).get("team") != "ml"}
    policies = {item["kind"] for item in changed_pod_warning()}
    assert kinds <= {"DeviceClass", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"} | policies


def test_callers_reach_the_gateway_through_a_load_balancer_an_ingress_or_the_gateway_api() -> None:
    values = {
        "service": {"type": "LoadBalancer", "annotations": {"scheme": "internal"}, "externalTrafficPolicy": "Local"},
        "ingress": {"enabled": True, "className": "nginx", "host": "models.example", "tlsSecret": "models-tls"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["models.example"]},
        "autoscaling": {"enabled": True, "maxReplicas": 6},
    }
    items = rendered("--set-json", f"gateway={json.dumps(values)}")
    named = {item["kind"]: item for item in items if item["metadata"]["name"] == "aim-gpu-sharing-gateway"}
    service = named["Service"]
    assert service["metadata"]["annotations"] == {"scheme": "internal"}
    assert (service["spec"]["type"], service["spec"]["externalTrafficPolicy"]) == ("LoadBalancer", "Local")
    (rule,) = named["Ingress"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    backend = {"name": "aim-gpu-sharing-gateway", "port": {"number": 80}}
    assert (rule["host"], path["backend"]["service"]) == ("models.example", backend)
    assert named["Ingress"]["spec"]["tls"] == [{"hosts": ["models.example"], "secretName": "models-tls"}]
    (route,) = named["HTTPRoute"]["spec"]["rules"]
    assert route["backendRefs"] == [{"name": "aim-gpu-sharing-gateway", "port": 80}]
    scaler = named["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    (gateway,) = (
        i
        for i in rendered("--set-json", f"gateway={json.dumps(values)}")
        if i["kind"] == "Deployment" and i["metadata"]["name"].endswith("gateway")
    )
    assert "replicas" not in gateway["spec"]  # the autoscaler's
    with pytest.raises(RuntimeError, match=r"ingress\.host"):
        rendered("--set=gateway.ingress.enabled=true")


def test_labelled_namespaces_are_an_option_with_policies_that_warn_of_the_others() -> None:
    for scope in AdmittedNamespaces:
        found = rendered("--set", f"admission.namespaces={scope.value}")
        (hooks,) = (item["webhooks"] for item in found if item["kind"] == "MutatingWebhookConfiguration")
        wanted = mutating_configuration(NAMESPACE, "aim-gpu-sharing-admission", scope=scope)["webhooks"]
        assert [hook["namespaceSelector"] for hook in hooks] == [hook["namespaceSelector"] for hook in wanted]
        policies = [item for item in found if item["kind"].startswith("ValidatingAdmissionPolicy")]
        expected = [
            *node_policy(NAMESPACE),
            *gateway_policy(NAMESPACE),
            *changed_pod_warning(),
            *(warning_policies() if scope is AdmittedNamespaces.LABELLED else ()),
        ]
        names = [item["metadata"]["name"] for item in expected]
        assert sorted(item["metadata"]["name"] for item in policies) == sorted(names)


def test_callers_outside_the_cluster_get_a_port_of_every_node() -> None:
    values = "--set=gateway.service.type=NodePort,gateway.service.nodePort=30080"
    (service,) = (item for item in rendered(values) if item["kind"] == "Service" and item["spec"].get("type") == "NodePort")
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http", "nodePort": 30080}]


def _gateway(*options: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in rendered(*options) if one["metadata"]["name"] == "aim-gpu-sharing-gateway"}


def test_the_gateway_serves_tls_with_the_certificate_of_a_secret() -> None:
    found = _gateway("--set=gateway.tls.secretName=gateway-cert")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parse_gateway_options([word for word in container["args"] if word.startswith("--")])
    assert (str(options.tls_cert), str(options.tls_key)) == ("/tls/tls.crt", "/tls/tls.key")
    assert {"name": "tls", "secret": {"secretName": "gateway-cert"}} in pod["volumes"]
    assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container["volumeMounts"]
    assert {"name": "https", "containerPort": options.tls_port} in container["ports"]
    assert {"name": "https", "port": 443, "targetPort": "https"} in found["Service"]["spec"]["ports"]
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    assert {"ports": [{"port": options.tls_port, "protocol": "TCP"}]} in rules
    assert {"ports": [{"port": 8080, "protocol": "TCP"}]} in rules
    strict = _gateway("--set=gateway.tls.secretName=gateway-cert,gateway.tls.withoutPlain=true")
    rules = strict["NetworkPolicy"]["spec"]["ingress"]
    assert {"ports": [{"port": options.tls_port, "protocol": "TCP"}]} in rules
    assert {"ports": [{"port": 8080, "protocol": "TCP"}], "from": [{"podSelector": {}}]} in rules


def test_without_a_secret_the_gateway_has_no_port_of_tls() -> None:
    assert "tls" not in json.dumps(_gateway()).lower()


def test_every_program_is_probed_and_runs_with_the_options_that_it_takes() -> None:
    workloads = [item for item in rendered() if item["kind"] in ("DaemonSet", "Deployment")]
    assert len(workloads) == len(COMPONENTS)
    for item in workloads:
        (container,) = item["spec"]["template"]["spec"]["containers"]
        assert "livenessProbe" in container, item["metadata"]["name"]
        assert {"readinessProbe", "startupProbe"} & container.keys(), item["metadata"]["name"]
    (operator,) = (item for item in workloads if item["metadata"]["name"].endswith("operator"))
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert parse_operator_options(container["args"]).metrics_port == container["ports"][0]["containerPort"]


def test_the_agent_runs_on_nodes_with_a_gpu_unless_its_affinity_or_simulated_gpus_are_set() -> None:
    def affinity(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = _of_component("agent", *options)["spec"].get("affinity", {})
        return found

    required = affinity()["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = [one["key"] for term in required for one in term["matchExpressions"]]
    assert len(labels) == len(required)  # any of them suffices
    assert {"aim.amd.com/gpu-node", "nvidia.com/gpu.present", "feature.node.kubernetes.io/amd-gpu"} <= set(labels)
    assert affinity("--set=agent.gpuNodesOnly=false") == {}
    assert affinity("--set=agent.simulated=MI300X:1") == {}
    own: dict[str, Any] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    assert affinity("--set-json", f"agent.pod.affinity={json.dumps(own)}") == own


def test_an_upgrade_brings_the_definitions_before_anything_else_and_an_installation_has_them() -> None:
    hooks = [one for one in rendered() if one["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-upgrade"]
    (job,) = (one for one in hooks if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "aimgpu.kubernetes.cluster.definitions"
    (role,) = (one for one in hooks if one["kind"] == "ClusterRole")
    assert role["rules"] == definition_rules()
    (operator,) = (one for one in rendered() if one["kind"] == "ClusterRole" and one["metadata"]["name"].endswith("-operator"))
    granted = {verb for rule in operator["rules"] if "customresourcedefinitions" in rule["resources"] for verb in rule["verbs"]}
    assert granted == {"get"}  # an old leader takes nothing back


def test_the_notes_name_the_gateway_keys_page_and_how_a_node_is_found(tmp_path: Path) -> None:
    chart = tmp_path / CHART.name  # helm renders its notes with a cluster only
    shutil.copytree(CHART, chart)
    source = (CHART / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "shown.yaml").write_text(
        f'{{{{ define "notes" }}}}{source}{{{{ end }}}}text: {{{{ include "notes" . | quote }}}}'
    )

    def notes(*options: str) -> str:
        command = ("template", RELEASE, str(chart), "--show-only=templates/shown.yaml", "--set=image.repository=r/a")
        text: str = yaml.safe_load(helm(*command, "--kube-version=1.36.4", *options))["text"]
        return text

    text = notes()
    for words in ("aim.amd.com/gpu-node=true", ".svc:80/v1", "aimgpu keys add", "deployment/aim-gpu-sharing-web 8081"):
        assert words in text
    text = notes("--set=agent.simulated=MI300X:1,gateway.enabled=false,web.enabled=false")
    assert "SIMULATED" in text
    assert not any(words in text for words in ("gpu-node", "/v1", "8081"))
    assert "https://models.example/v1" in notes(
        "--set=gateway.ingress.enabled=true,gateway.ingress.host=models.example,gateway.ingress.tlsSecret=s"
    )


def test_the_gateway_is_told_the_media_domains_and_whether_caches_are_apart() -> None:
    def variables(*options: str) -> dict[str, str]:
        (container,) = _gateway(*options)["Deployment"]["spec"]["template"]["spec"]["containers"]
        return {one["name"]: one["value"] for one in container["env"] if "value" in one}

    assert variables() == {}
    assert variables("--set=gateway.mediaDomains={a.example,b.example},gateway.separateCaches=false") == {
        "AIMGPU_MEDIA_DOMAINS": "a.example,b.example",
        "AIMGPU_SEPARATE_CACHES": "0",
    }


def test_dashboards_and_alerts_are_those_of_the_project() -> None:
    found = rendered("--set=serviceMonitor.enabled=true,alerts.enabled=true,dashboards.enabled=true")
    rules = next(item for item in found if item["kind"] == "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    boards = {name: text for item in found if item["kind"] == "ConfigMap" for name, text in item["data"].items()}
    assert boards == {path.name: path.read_text() for path in (CHART / "files" / "dashboards").glob("*.json")}
    ports = [end["port"] for item in found if item["kind"] == "ServiceMonitor" for end in item["spec"]["endpoints"]]
    assert ports == ["internal"]
    monitors = {
        (item["metadata"]["name"], end["port"]) for item in found for end in item.get("spec", {}).get("podMetricsEndpoints", ())
    }
    assert monitors == {("aim-gpu-sharing-agent", "metrics"), ("aim-gpu-sharing-operator", "metrics")}
