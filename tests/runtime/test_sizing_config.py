"""Sizes by name: entered by the user, from the catalogue with what was added to it, never guessed."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.cli.main import cli
from aimgpu.errors import InvalidInput, UnknownModel
from aimgpu.runtime import ModelScheduler, ModelSizingConfig, ROCmPartitioner

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
GB = 10**9


def test_what_was_added_to_the_catalogue_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path))
    with pytest.raises(UnknownModel):
        ModelSizingConfig().get_model_size("acme/seven")
    cli.main(["catalogue", "add", "acme/seven", "--parameters", "7B"], standalone_mode=False)
    assert ModelSizingConfig().get_model_size("acme/seven").parameters == 7 * 10**9


def test_memory_that_was_entered_is_used_for_its_precision() -> None:
    config = ModelSizingConfig()
    config.add_model("acme/seven", "7B", memory_gb=21.5, quantization=["fp16", "int4"], recommended_partition_gb=24.0)
    size = config.get_model_size("acme/seven")
    assert (size.memory_bytes, size.memory_gb, size.precision) == (21_500_000_000, 21.5, "fp16")
    assert size.recommended_partition_gb == 24.0
    assert config.get_model_size("acme/seven", "int4").memory_gb < 21.5
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [24.0, 24.0])
    scheduler = ModelScheduler(partitioner, config)
    assert scheduler.schedule_model("acme/seven")[0]
    assert sum(partition.allocated_gb for partition in scheduler.partitions()) == 21.5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory_gb": 10.0}, "its weights alone have 14 GB"),
        ({"memory_gb": 20.0, "recommended_partition_gb": 16.0}, r"recommended_partition_gb \(16\) is less"),
        ({"memory_gb": -1.0}, "cannot be"),
        ({"memory_gb": float("nan")}, "cannot be"),
        ({"quantization": []}, "must be a list"),
        ({"quantization": ["fp17"]}, "fp17"),
        ({"parameters": "many"}, "many"),
    ],
)
def test_what_cannot_be_true_is_refused_and_changes_nothing(changes: dict[str, object], why: str) -> None:
    config = ModelSizingConfig()
    entry: dict[str, object] = {"model_id": "acme/seven", "parameters": "7B", **changes}
    with pytest.raises(InvalidInput, match=why):
        config.add_model(**entry)  # type: ignore[arg-type]
    with pytest.raises(UnknownModel):
        config.get_model_size("acme/seven")


def test_can_fit_gives_its_reason() -> None:
    config = ModelSizingConfig()
    config.add_model("acme/seven", "7B", memory_gb=21.5)
    small, large = config.can_fit("acme/seven", 20.0), config.can_fit("acme/seven", 24.0)
    assert (bool(small), bool(large)) == (False, True)
    assert small.reason == "acme/seven needs 21.5 GB as fp16; the partition has 20 GB"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models: [", "is not YAML"),
        ("- a", "has no `models:`"),
        ("models: {a: {memory_gb: 1}}", "a lacks parameters"),
        ("models: {a: {parameters: 7B, memory: 1}}", "unknown key 'memory'"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=why):
        ModelSizingConfig(path)
    with pytest.raises(InvalidInput, match="cannot read"):
        ModelSizingConfig(tmp_path / "missing.yaml")


@given(memory_mb=st.integers(14_100, 60_000), more_mb=st.integers(-200, 200))
@settings(max_examples=examples(40))
def test_the_figures_of_a_reason_agree_with_its_answer(memory_mb: int, more_mb: int) -> None:
    config = ModelSizingConfig()
    config.add_model("acme/x", "7B", memory_gb=memory_mb / 1000)
    answer = config.can_fit("acme/x", (memory_mb + more_mb) / 1000)
    figures = re.fullmatch(r"acme/x needs ([\d.]+) GB as fp16; the partition has ([\d.]+) GB", answer.reason)
    assert figures is not None
    needs, has = map(float, figures.groups())
    assert answer.fits == (more_mb >= 0)
    assert needs <= has if answer else needs >= has
