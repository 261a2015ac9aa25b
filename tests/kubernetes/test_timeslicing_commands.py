"""The commands of time-slicing against an API server: which cluster they talk to, what they find wrong, what they undo."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, kubeconfig, serving_commands

from aimgpu.cli.main import run_command
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import AIM, NVIDIA
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import SharingSettings, plugin_config

NODES, POLICIES = "/api/v1/nodes", "/apis/nvidia.com/v1/clusterpolicies"
OPERATOR = "gpu-operator"
DAEMON_SET = f"/apis/apps/v1/namespaces/{OPERATOR}/daemonsets"
CONFIG = f"/api/v1/namespaces/{OPERATOR}/configmaps/{NVIDIA.config_map}"
PODS = "/api/v1/namespaces/team/pods"
FOUR = plugin_config(SharingSettings(resource="nvidia.com/gpu", replicas=4))


MISPLACED = """
version: v1
flags: {migStrategy: none, renameByDefault: true}
sharing:
  timeSlicing:
    failRequestGreaterThanOne: true
    resources: [{name: nvidia.com/gpu, replicas: 4, replica: 4}]
"""


@dataclass
class Commands:
    api: ApiServer
    other: ApiServer  # a second cluster, of the context "other"
    run: Callable[..., Any]

    def node(self, name: str = "n1") -> dict[str, Any]:
        found = self.api.find(f"{NODES}/{name}")
        assert found is not None
        return found


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    with serving_commands() as (api, url), serving_commands() as (other, other_url):
        path = tmp_path / "config"
        path.write_text(kubeconfig(here=url, other=other_url))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
        monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))

        def run(*words: str, status: int = 0, where: tuple[str, ...] = ("--kubeconfig", str(path))) -> Any:
            capsys.readouterr()
            found = run_command(["timeslicing", *words, *where, "--json"])
            printed = capsys.readouterr()
            assert found == status, printed.err + printed.out
            return json.loads(printed.out or printed.err)

        yield Commands(api, other, run)


def install(api: ApiServer, *, ready: int = 1, gpus: int = 2, allocatable: int | None = None, policy: bool = True) -> None:
    """NVIDIA's plugin on one node, by its operator."""
    labels = {"app": "plugin"}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}}}
    status = {"numberReady": ready, "desiredNumberScheduled": 1}
    api.put(DAEMON_SET, {"metadata": {"name": NVIDIA.daemon_set}, "spec": spec, "status": status})
    metadata = {"name": "n1", "labels": {"nvidia.com/gpu.count": str(gpus)}}
    api.put(NODES, {"metadata": metadata, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": str(allocatable or gpus)}}})
    plugin = {"metadata": {"name": "plugin-1", "labels": labels}, "spec": {"containers": [{"name": "plugin"}]}}
    api.put(f"/api/v1/namespaces/{OPERATOR}/pods", plugin)
    if policy:
        api.absent.discard("nvidia.com/v1")
        api.put(
            POLICIES,
            {"metadata": {"name": "cluster-policy"}, "spec": {"devicePlugin": {"config": {"name": "", "default": ""}}}},
        )


def problems(found: list[dict[str, str]]) -> dict[str, str]:
    return {each["check"]: each["text"] for each in found if each["health"] == "problem"}


def warnings(found: list[dict[str, str]]) -> dict[str, str]:
    return {each["check"]: each["text"] for each in found if each["health"] == "warning"}


@pytest.mark.parametrize(
    "words", [("apply", "--replicas", "4", "--dry-run"), ("doctor",), ("verify", "--no-pod", "--timeout", "0")]
)
def test_every_command_of_a_cluster_takes_its_kubeconfig_and_context(
    commands: Commands, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = str(tmp_path / "config")
    install(commands.api)
    missing = commands.run(*words, where=("--kubeconfig", path, "--kube-context", "other"), status=2)
    assert f"no DaemonSet {NVIDIA.daemon_set}" in missing["error"]["message"]
    install(commands.other)
    commands.other.put(CONFIG.rpartition("/")[0], {"metadata": {"name": NVIDIA.config_map}, "data": {"share4": FOUR}})
    commands.other.patch(f"{NODES}/n1", {"metadata": {"labels": {NVIDIA.label: "share4"}}})
    status = {"apply": 0, "doctor": 1, "verify": 1}[words[0]]
    commands.run(*words, where=("--kubeconfig", path, "--kube-context", "other"), status=status)
    unknown = commands.run(*words, where=("--kubeconfig", path, "--kube-context", "nowhere"), status=1)
    assert "nowhere" in unknown["error"]["message"]
    absent = commands.run(*words, where=("--kubeconfig", str(tmp_path / "none")), status=1)
    assert "none" in absent["error"]["message"]


def test_apply_writes_what_differs_and_undo_puts_all_of_it_back(commands: Commands) -> None:
    install(commands.api)
    before = {place: {**item, "metadata": None} for place, item in commands.api.store.objects.items()}
    first = commands.run("apply", "--replicas", "4", "--yes")
    assert first["changed"]
    assert not first["restarted"]  # the operator restarts it for the ClusterPolicy
    assert commands.node()["metadata"]["labels"][NVIDIA.label] == "share4"
    config = commands.api.find(CONFIG)
    assert config is not None
    assert config["data"] == {"share4": FOUR}
    versions = commands.api.versions()
    assert commands.run("apply", "--replicas", "4", "--yes")["changed"] is False
    assert commands.api.versions() == versions
    second = commands.run("apply", "--replicas", "2", "--key", "share4", "--yes")
    assert second["restarted"]  # the text of a key that the plugin has read
    undone = commands.run("apply", "--undo")
    assert undone["restarted"]
    config = commands.api.find(CONFIG)
    assert config is not None
    assert config["data"] == {"share4": FOUR}
    assert "nothing to undo" in commands.run("apply", "--undo", status=2)["error"]["message"]
    commands.api.patch(CONFIG, {"metadata": {"annotations": {"aim.amd.com/time-slicing-undo": "{}"}}})
    assert "cannot be read" in commands.run("apply", "--undo", status=2)["error"]["message"]
    assert before[("clusterpolicies", "", "cluster-policy")]["spec"]["devicePlugin"]["config"] == {"name": "", "default": ""}


def test_undoing_the_first_change_leaves_nothing_of_it(commands: Commands) -> None:
    install(commands.api)
    commands.run("apply", "--replicas", "4", "--default", "--yes")
    policy = commands.api.find(f"{POLICIES}/cluster-policy")
    assert policy is not None
    assert policy["spec"]["devicePlugin"]["config"] == {"name": NVIDIA.config_map, "default": "share4"}
    commands.run("apply", "--undo")
    assert commands.api.find(CONFIG) is None
    assert NVIDIA.label not in commands.node()["metadata"]["labels"]
    policy = commands.api.find(f"{POLICIES}/cluster-policy")
    assert policy is not None
    assert policy["spec"]["devicePlugin"]["config"] == {"name": "", "default": ""}


def test_keys_of_others_in_the_config_map_stay(commands: Commands) -> None:
    install(commands.api, policy=False)
    commands.api.put(CONFIG.rpartition("/")[0], {"metadata": {"name": NVIDIA.config_map}, "data": {"mine": "version: v1\n"}})
    commands.run("apply", "--replicas", "4", "--yes")
    commands.run("apply", "--undo")
    config = commands.api.find(CONFIG)
    assert config is not None
    assert config["data"] == {"mine": "version: v1\n"}


def set_up(commands: Commands, text: str = FOUR, key: str = "share4") -> None:
    commands.api.put(CONFIG.rpartition("/")[0], {"metadata": {"name": NVIDIA.config_map}, "data": {"share4": text}})
    commands.api.patch(f"{NODES}/n1", {"metadata": {"labels": {NVIDIA.label: key}}})
    if commands.api.find(f"{POLICIES}/cluster-policy"):
        commands.api.patch(f"{POLICIES}/cluster-policy", {"spec": {"devicePlugin": {"config": {"name": NVIDIA.config_map}}}})


def test_a_cluster_that_is_set_up_has_no_problem_and_is_warned_that_nothing_isolates(commands: Commands) -> None:
    install(commands.api, allocatable=8)
    set_up(commands)
    found = commands.run("doctor")
    assert problems(found) == {}
    assert "nothing isolates" in warnings(found)["isolation"]
    commands.api.patch(f"{NODES}/n1", {"metadata": {"labels": {"aim.amd.com/gpu-sharing.managed": "true"}}})
    assert "isolation" not in warnings(commands.run("doctor"))


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ("not ready", "plugin", "0 of 1 pods are ready"),
        ("old text", "allocatable", "advertises 2 nvidia.com/gpu, expected 8"),
        ("bad text", "configmap", "key share4"),
        ("no config", "configmap", "there is no configmap"),
        ("other key", "node label", "share9 is not a key"),
        ("no label", "node label", "has no label"),
        ("other policy", "clusterpolicy", "names configmap mine"),
        ("pending", "pending pods", "team/wants is pending: 0/1 nodes: Insufficient nvidia.com/gpu"),
    ],
)
def test_each_thing_that_can_be_wrong_is_found_by_its_own_check(
    commands: Commands, change: str, check: str, words: str
) -> None:
    install(commands.api, ready=0 if change == "not ready" else 1, allocatable=2 if change == "old text" else 8)
    set_up(commands, "sharing: [" if change == "bad text" else FOUR, "share9" if change == "other key" else "share4")
    if change == "no config":
        commands.api.remove(CONFIG)
    elif change == "no label":
        commands.api.patch(f"{NODES}/n1", {"metadata": {"labels": {NVIDIA.label: None}}})
    elif change == "other policy":
        commands.api.patch(f"{POLICIES}/cluster-policy", {"spec": {"devicePlugin": {"config": {"name": "mine"}}}})
    elif change == "pending":
        condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient nvidia.com/gpu"}
        containers = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
        status = {"phase": "Pending", "conditions": [condition]}
        commands.api.put(PODS, {"metadata": {"name": "wants"}, "spec": {"containers": containers}, "status": status})
    found = problems(commands.run("doctor", status=1))
    assert words in found[check]
    assert set(found) <= {check, "node label"}  # a key that is missing makes its label wrong too


def test_too_many_sharers_and_complaints_of_the_plugin_are_warnings(commands: Commands) -> None:
    install(commands.api, allocatable=64)
    set_up(commands, plugin_config(SharingSettings(resource="nvidia.com/gpu", replicas=32)))
    commands.api.logs["plugin-1"] = "starting\nE1 failed to initialize NVML: Driver Not Loaded\nI2 fine\n"
    found = warnings(commands.run("doctor"))
    assert "32 replicas of each" in found["sharers"]
    assert "Driver Not Loaded" in found["plugin logs"]
    assert "I2 fine" not in found["plugin logs"]


def test_sharers_of_a_former_configuration_are_counted_by_their_replicas(commands: Commands) -> None:
    install(commands.api, allocatable=8)
    set_up(commands)
    for number in range(3):
        containers = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "3"}}}]
        pod = {"metadata": {"name": f"old-{number}"}, "spec": {"nodeName": "n1", "containers": containers}}
        commands.api.put(PODS, {**pod, "status": {"phase": "Running"}})
    text = warnings(commands.run("doctor"))["sharers"]
    assert "n1: 3 pods on 2 GPUs, 4 replicas of each; they hold 9 replicas" in text
    commands.api.remove(f"{PODS}/old-0")
    assert "sharers" not in warnings(commands.run("doctor"))


def test_doctor_quotes_why_our_own_plugin_offers_nothing(commands: Commands) -> None:
    commands.api.put(
        "/apis/apps/v1/namespaces/aim-gpu-sharing/daemonsets",
        {"metadata": {"name": AIM.daemon_set}, "spec": {}, "status": {"numberReady": 1, "desiredNumberScheduled": 1}},
    )
    commands.api.put(NODES, {"metadata": {"name": "n1", "labels": {"aim.amd.com/gpu.count": "2"}}, "spec": {}, "status": {}})
    mixed = "GPUs have different partitions (CPX/NPS1, SPX/NPS1)"
    conditions = [
        {"type": "ResourcesOffered", "status": "False", "message": mixed},
        {"type": "OfferedHereOnly", "status": "True", "message": ""},
    ]
    commands.api.put("/apis/aim.amd.com/v1alpha1/gpunodes", {"metadata": {"name": "n1"}, "status": {"conditions": conditions}})
    found = commands.run("doctor", "--plugin", "aim", status=1)
    assert problems(found)["gpu node"] == f"n1: {mixed}"


def test_the_default_of_the_cluster_policy_stands_for_a_label(commands: Commands) -> None:
    install(commands.api, allocatable=8)
    set_up(commands)
    commands.api.patch(f"{NODES}/n1", {"metadata": {"labels": {NVIDIA.label: None}}})
    commands.api.patch(f"{POLICIES}/cluster-policy", {"spec": {"devicePlugin": {"config": {"default": "share4"}}}})
    assert problems(commands.run("doctor")) == {}


def test_verify_runs_a_pod_where_the_replicas_are_there_and_takes_it_away(commands: Commands) -> None:
    install(commands.api, allocatable=8)
    set_up(commands)
    seen: list[str] = []

    def run_it(method: str, path: str) -> None:
        """The kubelet's part: what was made runs when it is looked at."""
        if method == "GET" and "/pods/aimgpu-timeslicing" in path:
            seen.append(path)
            commands.api.patch(path, {"status": {"phase": "Running"}})

    commands.api.fault = run_it
    (found,) = commands.run("verify", "--pod-namespace", "team")
    assert found["good"]
    assert found["pod_ran"]
    assert seen
    assert not [place for place in commands.api.versions() if place[2].startswith("aimgpu-timeslicing")]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Failed", "message": "OOMKilled"}, "OOMKilled"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}],
            },
            "ErrImagePull: no such image",
        ),
    ],
)
def test_a_pod_that_does_not_run_is_explained_and_taken_away(commands: Commands, status: dict[str, Any], words: str) -> None:
    install(commands.api, allocatable=8)
    set_up(commands)

    def fail_it(method: str, path: str) -> None:
        if method == "GET" and "/pods/aimgpu-timeslicing" in path:
            commands.api.patch(path, {"status": status})

    commands.api.fault = fail_it
    (found,) = commands.run("verify", "--pod-namespace", "team", status=1)
    assert words in found["pod"]
    assert not [place for place in commands.api.versions() if place[2].startswith("aimgpu-timeslicing")]


def test_nodes_without_gpus_or_a_configuration_are_named(commands: Commands) -> None:
    install(commands.api, gpus=2)
    commands.api.patch(f"{NODES}/n1", {"metadata": {"labels": {"nvidia.com/gpu.count": None}}})
    assert "no node of this cluster has GPUs" in commands.run("doctor", status=2)["error"]["message"]
    assert "chooses no configuration" in commands.run("verify", "--node", "n1", "--no-pod", status=2)["error"]["message"]
    assert "no node n2" in commands.run("doctor", "--node", "n2", status=2)["error"]["message"]


def test_doctor_names_what_a_plugin_overlooks_in_silence(commands: Commands) -> None:
    install(commands.api)
    commands.api.put(CONFIG.rpartition("/")[0], {"metadata": {"name": NVIDIA.config_map}, "data": {"four": MISPLACED}})
    texts = [one["text"] for one in commands.run("doctor", status=1) if one["check"] == "configmap"]
    assert any(
        "flags.renameByDefault is not read there; renameByDefault belongs under sharing.timeSlicing" in one for one in texts
    )
    assert any("failRequestGreaterThanOne is not known: did you mean failRequestsGreaterThanOne?" in one for one in texts)
    assert any("sharing.timeSlicing.resources.replica is not known: did you mean replicas?" in one for one in texts)


def test_doctor_finds_a_config_map_elsewhere_and_a_label_on_a_node_without_a_gpu(commands: Commands) -> None:
    install(commands.api)
    commands.api.put("/api/v1/namespaces/default/configmaps", {"metadata": {"name": NVIDIA.config_map}, "data": {"four": FOUR}})
    commands.api.put(NODES, {"metadata": {"name": "cpu", "labels": {NVIDIA.label: "four"}}, "spec": {}, "status": {}})
    found = commands.run("doctor", status=1)
    assert any("is in namespace default, and the plugin reads that of namespace gpu-operator" in one["text"] for one in found)
    assert f"cpu has the label {NVIDIA.label} and no GPU" in warnings(found)["node label"]


def test_a_default_that_is_no_key_is_found_and_put_right(commands: Commands) -> None:
    install(commands.api)
    policy = {"devicePlugin": {"config": {"name": NVIDIA.config_map, "default": "time-slicing-config"}}}
    commands.api.put(POLICIES, {"metadata": {"name": "cluster-policy"}, "spec": policy})
    commands.api.put(CONFIG.rpartition("/")[0], {"metadata": {"name": NVIDIA.config_map}, "data": {"four": FOUR}})
    text = problems(commands.run("doctor", status=1))["clusterpolicy"]
    assert "the default time-slicing-config, which is not a key of the ConfigMap" in text
    commands.run("apply", "--replicas", "4", "--yes")
    spec = (commands.api.find(f"{POLICIES}/cluster-policy") or {})["spec"]
    config = (commands.api.find(CONFIG) or {})["data"]
    assert spec["devicePlugin"]["config"]["default"] in config
