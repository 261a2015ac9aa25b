"""How many replicas, the ConfigMap, and what changes around a device plugin."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.cli.main import run_command
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.cluster.timeslicing.node_replicas import node_replicas
from aimgpu.kubernetes.cluster.timeslicing.plugin_setup import (
    AIM,
    NVIDIA,
    PluginSetup,
    needs_restart,
    show_difference,
    with_sharing,
)
from aimgpu.kubernetes.cluster.timeslicing.recommendation import CLASSES, SizedModel, recommend
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import SharingSettings, plugin_config
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config
from aimgpu.units import GIB

BILLION = 1_000_000_000
QWEN = "Qwen/Qwen2.5-7B-Instruct"


def sized(billions: float, gib: float, name: str = "model") -> SizedModel:
    return SizedModel(name=name, parameters=int(billions * BILLION), memory_bytes=int(gib * GIB))


@pytest.mark.parametrize(
    ("models", "gpu_gib", "replicas"),
    [
        ([sized(7, 6)], 80, 4),  # memory would hold 13
        ([sized(7, 30)], 80, 2),
        ([sized(70, 45)], 80, None),  # two do not fit
        ([sized(3, 4)], 80, 8),
        ([sized(1, 15)], 80, 5),
        ([sized(0.5, 1)], 80, 16),
        ([sized(0.5, 1)], 10, 10),
        ([sized(0.5, 1), sized(8, 9)], 80, 4),  # the largest decides
        ([sized(3, 40)], 80, 2),  # fewer than usual
    ],
)
def test_replicas_follow_the_size_of_the_models_and_the_memory(
    models: list[SizedModel], gpu_gib: int, replicas: int | None
) -> None:
    found = recommend(models, gpu_gib * GIB)
    assert found.replicas == replicas
    assert found.reasons


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.2, 60)), min_size=1, max_size=6),
    st.integers(min_value=8, max_value=288),
)
def test_a_recommended_replica_always_holds_the_largest_model(rows: list[tuple[float, float]], gpu_gib: int) -> None:
    models = [sized(billions, gib) for billions, gib in rows]
    found = recommend(models, gpu_gib * GIB)
    largest = max(each.memory_bytes for each in models)
    if found.replicas is None:
        assert 2 * largest > gpu_gib * GIB
    else:
        assert found.replica_memory_bytes is not None
        assert found.replica_memory_bytes >= largest
        assert 2 <= found.replicas <= found.usual[1] <= max(each.most for each in CLASSES)
    assert 1 <= found.max_loaded_models <= len(models)


@pytest.mark.parametrize(
    ("models", "gpu_gib", "words"),
    [
        ([sized(70, 140)], 80, "not even one copy fits: take a GPU of 140GiB or more"),
        ([sized(7, 50)], 80, "give it a whole GPU"),
        ([sized(7, 20), sized(1, 4)], 80, "one copy of each of the 2 needs 24GiB: together they fit"),
        ([sized(7, 50), sized(7, 40)], 80, "one copy of each of the 2 needs 90GiB: together they do not fit"),
    ],
)
def test_the_reasons_say_what_a_gpu_can_hold(models: list[SizedModel], gpu_gib: int, words: str) -> None:
    found = recommend(models, gpu_gib * GIB)
    assert any(words in reason for reason in found.reasons), found.reasons
    assert not (words.startswith("not even") and any("give it a whole GPU" in reason for reason in found.reasons))


def test_no_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no model"):
        recommend([], 80 * GIB)


def test_the_rendered_configuration_is_read_back_as_it_was_meant() -> None:
    text = plugin_config(SharingSettings(resource="amd.com/gpu", replicas=3, rename=True, enforced=True))
    config = parse_config(text)
    assert config.replicated[0].advertised == "amd.com/gpu.shared"
    assert config.replicated[0].replicas == 3
    assert config.fail_requests_greater_than_one
    assert config.isolation.value == "enforced"
    with pytest.raises(InvalidInput, match="replicas must be >= 2"):
        plugin_config(SharingSettings(resource="amd.com/gpu", replicas=1))


EMPTY = PluginSetup(config=None, labels={"n1": None}, policy={"name": "", "default": ""})


def test_a_plugin_is_restarted_only_where_the_text_it_has_read_changed() -> None:
    first = with_sharing(EMPTY, "share4", "four", "time-slicing-config")
    assert first.policy == {"name": "time-slicing-config", "default": ""}
    assert first.labels == {"n1": "share4"}
    assert not needs_restart(NVIDIA, EMPTY, first)  # the operator restarts it for the ClusterPolicy
    other_key = with_sharing(first, "share8", "eight", "time-slicing-config")
    assert other_key.config == {"share4": "four", "share8": "eight"}
    assert not needs_restart(NVIDIA, first, other_key)
    changed = with_sharing(first, "share4", "five", "time-slicing-config")
    assert needs_restart(NVIDIA, first, changed)
    assert not needs_restart(AIM, first, changed)
    assert with_sharing(EMPTY, "k", "t", "m", default=True).policy == {"name": "m", "default": "k"}


def test_the_difference_names_what_changes_and_nothing_else() -> None:
    first = with_sharing(EMPTY, "share4", "version: v1\nsharing: {}\n", "time-slicing-config")
    text = "\n".join(show_difference(NVIDIA, "gpu-operator", EMPTY, first))
    assert "+nvidia.com/device-plugin.config: share4" in text
    assert "+  version: v1" in text
    assert "+name: time-slicing-config" in text
    assert show_difference(NVIDIA, "gpu-operator", first, first) == []
    assert PluginSetup.from_text(first.to_text()) == first
    with pytest.raises(InvalidInput, match="cannot be read"):
        PluginSetup.from_text("{}")


def test_expected_replicas_need_the_number_of_gpus() -> None:
    text = plugin_config(SharingSettings(resource="nvidia.com/gpu", replicas=4))
    node = {
        "metadata": {"name": "n1", "labels": {"nvidia.com/gpu.count": "2"}},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}},
    }
    assert node_replicas(node, text, NVIDIA).right
    node["status"] = {"allocatable": {"nvidia.com/gpu": "2"}}
    assert not node_replicas(node, text, NVIDIA).right
    unlabelled = {"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "12"}}}
    assert node_replicas(unlabelled, text, NVIDIA).expected is None
    assert node_replicas(unlabelled, text, NVIDIA).right


def test_partitions_of_an_amd_gpu_count_as_gpus_of_our_plugin() -> None:
    text = plugin_config(SharingSettings(resource="amd.com/gpu", replicas=4))
    modes = {"CPX_NPS4": True, "SPX_NPS1": False}
    for mode, right in modes.items():
        labels = {"aim.amd.com/gpu.count": "1", "amd.com/gpu.compute-memory-partition": mode}
        node = {"metadata": {"name": "n1", "labels": labels}, "status": {"allocatable": {"amd.com/gpu": "32"}}}
        assert node_replicas(node, text, AIM).right == right
        node["status"] = {"allocatable": {"amd.com/gpu": "4"}}
        assert node_replicas(node, text, AIM).right


SPX = {"amd.com/gpu.compute-memory-partition": "spx_nps1"}


@pytest.mark.parametrize(
    ("labels", "extra", "allocatable", "expected"),
    [
        (SPX | {"aim.amd.com/gpu.count": "3", "nvidia.com/gpu.count": "1"}, "", 8, 8),  # two of AMD's beside one of NVIDIA's
        (SPX | {"aim.amd.com/gpu.count": "2"}, "", 8, 8),
        ({"aim.amd.com/gpu.count": "1", "amd.com/gpu.compute-memory-partition": "cpx_nps1"}, "", 32, None),
        (SPX | {"aim.amd.com/gpu.count": "2"}, ", devices: [0]", 5, None),  # one GPU in four, the other whole
    ],
)
def test_replicas_are_expected_of_the_gpus_that_the_resource_is_of(
    labels: dict[str, str], extra: str, allocatable: int, expected: int | None
) -> None:
    text = f"sharing: {{timeSlicing: {{resources: [{{name: amd.com/gpu, replicas: 4{extra}}}]}}}}"
    node = {"metadata": {"name": "n1", "labels": labels}, "status": {"allocatable": {"amd.com/gpu": str(allocatable)}}}
    found = node_replicas(node, text, AIM)
    assert (found.expected, found.right) == (expected, True)
    node["status"] = {"allocatable": {"amd.com/gpu": "0"}}
    assert not node_replicas(node, text, AIM).right


def test_recommend_and_render_need_no_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path))
    assert run_command(["timeslicing", "recommend", QWEN, "--memory", "80GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replicas"] == 4
    assert "isolates nothing" in found["isolation"]
    assert run_command(["timeslicing", "recommend", QWEN, "--memory", "80GiB"]) == 0
    assert "isolates nothing" in capsys.readouterr().out
    assert run_command(["timeslicing", "render", QWEN, "--memory", "80GiB"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert parse_config(made["data"]["share4"]).replicated[0].replicas == 4
    assert run_command(["timeslicing", "render"]) != 0
    assert "--replicas" in capsys.readouterr().err
    assert run_command(["timeslicing", "render", QWEN, "--memory", "8GiB"]) != 0
    assert "not recommended" in capsys.readouterr().err
