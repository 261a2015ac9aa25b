"""A model over several GPUs is sized for its part on each, as placement takes it."""

import json
from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.domain import Ask, Deployment, Memory, Whole
from aimgpu.units import GIB


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))


def _command(tmp_path: Path, command: str, gpu: str, *more: str) -> int:
    stack = tmp_path / "stack.yaml"
    stack.write_text(f"models: {{big: {{model: deepseek-ai/DeepSeek-V3, engine: vllm, gpu: {gpu}}}}}\n")
    return run_command([command, "-f", str(stack), "--gpu", "MI300X", *more])


def test_a_model_that_four_gpus_hold_is_a_plan_on_four(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was sized as for one GPU and refused on any number of them."""
    assert _command(tmp_path, "plan", "{whole: 4}", "--count", "4", "--json") == 0
    (placement,) = json.loads(capsys.readouterr().out)["placements"]
    assert len(placement["slots"]) == 4
    assert _command(tmp_path, "capacity", "{whole: 4}") == 0
    assert "4 x MI300X hold 1 model" in capsys.readouterr().out


def test_two_gpus_are_refused_with_what_each_would_have_to_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(tmp_path, "plan", "{whole: 2}", "--count", "2") == 3
    assert "needs 322.9GiB; the GPU has 191.9GiB" in capsys.readouterr().out


def test_devices_that_the_engine_will_refuse_are_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _command(tmp_path, "plan", "{whole: 7}", "--count", "8")
    assert "Note: big: vllm will refuse 7 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ask", [Ask(name="m", want=Whole(count=4)), Ask(name="m", want=Memory(memory_bytes=64 * GIB), devices=4)]
)
def test_a_deployment_is_sized_for_each_of_its_devices(ask: Ask) -> None:
    one, four = (
        SizingBasis().size(
            Deployment(name="m", model="meta-llama/Llama-3.3-70B-Instruct", ask=wish), engine="vllm", local=None, device=None
        )
        for wish in (Ask(name="m", want=Whole()), ask)
    )
    weights = [next(term.memory_bytes for term in each.terms if term.name == "weights") for each in (one, four)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=0.01)
    assert int(four.flags["--kv-cache-memory-bytes"]) == int(one.flags["--kv-cache-memory-bytes"]) // 4


def test_who_asks_for_one_gpu_is_told_over_how_many_to_divide_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(tmp_path, "plan", "auto", "--count", "8") == 3
    told = "Split it over 4 GPUs (gpu: {devices: 4}): localhost has the 163GiB that each then needs."
    assert told in capsys.readouterr().out
    assert _command(tmp_path, "plan", "{devices: 4}", "--count", "8") == 0
    assert _command(tmp_path, "capacity", "auto") == 3
    assert "a node with 4 x MI300X" in capsys.readouterr().err
