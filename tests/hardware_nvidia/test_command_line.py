"""The command line on NVIDIA GPUs, with the real backend and the real nvidia-ml-py over a fake library."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.hardware_nvidia.conftest import Connect
from tests.hardware_nvidia.fake_nvml import FakeLibrary
from tests.hardware_nvidia.gpus import FakeGpu, h200

from aimgpu.cli import wiring
from aimgpu.cli.main import cli


@pytest.fixture
def gpus(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeGpu]:
    found = [h200(mig_on=True), h200(1)]
    hardware = connect(FakeLibrary(found))
    monkeypatch.setattr(wiring, "real_backends", lambda: (hardware,))
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    return found


def aimgpu(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli, arguments)
    assert outcome.exit_code == 0, outcome
    return outcome.stdout


def read(*arguments: str) -> Any:
    return json.loads(aimgpu(*arguments, "--json"))


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_gpu_with_mig_on_and_no_instance_is_shown(gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setattr("aimgpu.cli.gpus_view.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    shown = aimgpu("gpus")
    assert "gpu0  H200-141  mig-empty" in shown
    assert "gpu1  H200-141  whole" in shown
    assert read("gpus")["gpus"][0]["partitions"] == []


def test_reset_makes_the_gpu_whole_and_not_one_large_instance(gpus: list[FakeGpu]) -> None:
    layouts = {layout["name"]: layout for layout in read("partition", "list", "0")["gpus"][0]["layouts"]}
    (large,), (whole,) = layouts["7g.141gb@0"]["partitions"], layouts["whole"]["partitions"]
    assert large["memory_bytes"] > whole["memory_bytes"]  # as an H200 tells them
    assert read("partition", "apply", "0", "3g.71gb@4")["after"] == "3g.71gb@4"
    assert read("partition", "reset", "0")["after"] == "whole"
    assert gpus[0].mig_on is False
    assert "nothing to do" in aimgpu("partition", "reset", "1")
