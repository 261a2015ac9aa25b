"""Answers of commands that used to fail, or to be wrong at the edges."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from aimgpu.cli.doctor_checks import find_amd_tool
from aimgpu.cli.main import cli
from aimgpu.cli.views.status import print_addresses
from aimgpu.errors import InvalidInput, UnknownModel, UnknownProduct
from aimgpu.hardware.amd.smi import AmdSmi, find_amd_smi


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), standalone_mode=False)


def read(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exception is None, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "llamacpp"])
@pytest.mark.parametrize("prompt", [1, 4095, 4096, 4097, 6144, 8191])
def test_a_suggestion_never_makes_an_answer_fail(engine: str, prompt: int) -> None:
    found = read("size", "Qwen/Qwen3-8B", "--engine", engine, "--context", "8192", "--prompt-tokens", str(prompt))
    shorter = [saving for saving in found["savings"] if saving["change"].startswith("context")]
    assert len(shorter) <= (prompt <= 4096)


def test_no_models_are_an_empty_plan(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("models: {}\n")
    plan = read("plan", "-f", str(path))
    assert (plan["fits"], plan["placements"], plan["steps"]) == (True, [], [])
    assert "Nothing to do." in run("plan", "-f", str(path)).stdout


def test_a_product_is_known_by_the_name_that_tools_print() -> None:
    assert read("gpus", "--simulated", "AMD Instinct MI300X OAM")["gpus"][0]["product"] == "MI300X"
    assert isinstance(run("gpus", "--simulated", "").exception, UnknownProduct)


def test_amd_smi_is_found_under_rocm_path_and_reported_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "amd-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'AMDSMI Tool: 26.0.0 | AMDSMI Library version: 26.0.0 | ROCm version: 7.0.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_amd_smi() == tool
    (check,) = find_amd_tool(AmdSmi())
    assert check.text == f"{tool}, ROCm 7.0"


def test_a_profile_is_shown_by_its_variant_with_what_it_is_meant_for(tmp_path: Path) -> None:
    profile = read("profiles", "show", "Qwen/Qwen3-32B-fp16", "--gpu", "MI300X")
    config = profile["metadata"]["partition_config"]
    assert (config["compute_mode"], config["memory_mode"]) == ("DPX", "NPS1")
    meant = "a dpx partition of MI300X (DPX/NPS1), 103.07 GB"
    assert profile["engine"]["arguments_are_for"] == meant
    shown = run("profiles", "show", "Qwen/Qwen3-32B-FP16", "--gpu", "MI300X").stdout
    assert f"{profile['memory_requirement_gb']:.2f} GB" in shown
    assert meant in shown
    table = run("profiles", "generate", "--gpu", "MI300X", "--model", "Qwen/Qwen3-32B", "--out", str(tmp_path)).stdout
    for path in tmp_path.glob("*.json"):
        assert f"{json.loads(path.read_text())['memory_requirement_gb']:.2f}" in table
    aim = next((tmp_path / "aim").rglob("vllm-mi300x-fp16*.yaml")).read_text()
    assert aim.startswith(f"# engine_args are for {meant}\n")
    assert yaml.safe_load(aim)["engine_args"]["gpu-memory-utilization"] > 0


@pytest.mark.parametrize(("variant", "error"), [("Qwen/Qwen3-32B", InvalidInput), ("acme/unknown-fp16", UnknownModel)])
def test_a_variant_that_is_none_is_refused(variant: str, error: type[Exception]) -> None:
    assert isinstance(run("profiles", "show", variant).exception, error)


def test_the_line_to_try_names_the_most_important_model_that_was_applied(capsys: pytest.CaptureFixture[str]) -> None:
    instances = [
        {"name": name, "state": "ready", "priority": priority}
        for name, priority in (("old", "high"), ("batch", "low"), ("chat", "high"), ("code", "medium"))
    ]
    status = {"instances": instances, "models_url": "http://127.0.0.1:8080/v1"}
    print_addresses(status, page="http://127.0.0.1:8080/link/code", with_key=False, applied=["batch", "code", "chat"])
    shown = capsys.readouterr().out
    assert '"model": "chat"' in shown
    assert "http://127.0.0.1:8080/link/code" in shown
