"""The command line on NVIDIA GPUs, with the real backend and the real nvidia-ml-py over a fake library."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.hardware_nvidia.conftest import Connect
from tests.hardware_nvidia.fake_nvml import FakeLibrary
from tests.hardware_nvidia.gpus import FakeGpu, h200

from aimgpu import wiring
from aimgpu.cli.main import cli
from aimgpu.errors import UnknownLayout


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
    monkeypatch.setattr("aimgpu.cli.views.gpus.is_terminal", lambda: True)
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


def test_every_profile_that_the_device_has_can_be_asked_for(gpus: list[FakeGpu]) -> None:
    """Media and graphics variants too: the line of the table that the device tells, not ours, decides."""
    gpu = gpus[0]
    graphics = replace(gpu.profiles[0], number=10, id=21, kind="1g.18gb+gfx", most=2, starts=(0, 2))
    everything = replace(gpu.profiles[0], number=11, id=22, kind="1g.18gb+me.all", most=1)
    without = replace(gpu.profiles[0], number=12, id=23, kind="1g.18gb-me", most=7)
    gpu.profiles = (*gpu.profiles, graphics, everything, without)
    for profile in gpu.profiles:
        name = f"{profile.kind}@{profile.starts[-1]}"
        assert read("partition", "plan", "0", name)["after"] == name
        assert read("partition", "plan", "0", profile.kind)["after"] == f"{profile.kind}@{profile.starts[0]}"
        assert read("partition", "apply", "0", name)["after"] == name
        assert [(one.profile.kind, one.start) for one in gpu.instances] == [(profile.kind, profile.starts[-1])]
    assert profile.kind in aimgpu("partition", "list", "0")
    assert {one["kind"] for one in read("partition", "list", "0")["gpus"][0]["profiles"]} == {p.kind for p in gpu.profiles}


def test_a_set_with_variants_and_without_starts_finds_its_places(gpus: list[FakeGpu]) -> None:
    plan = read("partition", "plan", "0", "1g.18gb+me+3g.71gb+2g.35gb@2")
    assert plan["after"] == "1g.18gb+me@0+2g.35gb@2+3g.71gb@4"
    assert [part["kind"] for part in plan["partitions_after"]["partitions"]] == ["1g.18gb+me", "2g.35gb", "3g.71gb"]
    assert read("partition", "apply", "0", "1g.18gb+me+3g.71gb+2g.35gb@2")["after"] == plan["after"]
    assert read("partition", "plan", "0", "3g.71gb")["after"] == "3g.71gb@4", "what is there stays"
    assert read("partition", "apply", "0", "1G.18GB+ME@0 ")["after"] == "1g.18gb+me@0"


@pytest.mark.parametrize(
    ("wanted", "why", "hint"),
    [
        ("1g.5gb@0", "no profile 1g.5gb", "It has: 1g.18gb, 1g.18gb+me, 1g.35gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb."),
        ("1g.18gb+gfx@0", "no profile 1g.18gb+gfx", "1g.18gb+me"),
        ("3g.71gb@1", "cannot start at slice 1", "0, 4"),
        ("1g.18gb+me@0+1g.18gb+me@1", "2 of 1g.18gb+me, at most 1 fit", "partition list"),
        ("3g.71gb+3g.71gb+1g.18gb", "no place", "partition list"),
        ("4g.71gb+4g.71gb", "2 of 4g.71gb, at most 1 fit", "partition list"),
        ("CPX", "cannot have layout", "1g.18gb+me, 1g.35gb"),
        ("3g.71gb@0++3g.71gb@4", "cannot have layout", "kind@start"),
    ],
)
def test_what_the_device_cannot_have_is_refused_with_what_it_can(gpus: list[FakeGpu], wanted: str, why: str, hint: str) -> None:
    for command in ("plan", "apply"):
        outcome = CliRunner().invoke(cli, ["partition", command, "0", wanted])
        assert isinstance(outcome.exception, UnknownLayout)
        assert why in outcome.exception.message
        assert hint in (outcome.exception.hint or "")
    assert gpus[0].instances == []


def test_a_gpu_that_tells_its_places_only_with_mig_on_can_be_switched_on(gpus: list[FakeGpu]) -> None:
    assert "mig-empty" in aimgpu("partition", "list", "1")
    outcome = CliRunner().invoke(cli, ["partition", "apply", "1", "3g.71gb@4"])
    assert isinstance(outcome.exception, UnknownLayout)
    assert "mig-empty" in (outcome.exception.hint or "")
    assert read("partition", "apply", "1", "mig-empty")["after"] == "mig-empty"
    assert read("partition", "apply", "1", "3g.71gb@4")["after"] == "3g.71gb@4"
