"""The list of the drivers' entry points is whole, agrees with what is wrapped, and with bindings that are installed."""

import subprocess
from pathlib import Path

import pytest
from tools import entry_points

ROOT = Path(__file__).parents[2]
BINDINGS = ("cuda-bindings==12.*", "cuda-bindings", "hip-python==6.*", "hip-python==7.*")  # without a version: the newest


def test_every_entry_point_has_a_treatment_that_is_explained() -> None:
    points = entry_points.read_list()
    assert len(points) > 1000
    assert len({(point.api, point.name) for point in points}) == len(points)
    assert {point.treatment for point in points} <= {*entry_points.TREATMENTS, "neutral"}


def test_no_function_is_both_wrapped_and_left_as_it_is() -> None:
    wrapped = {name for point in entry_points.read_list() if point.treatment == "wrapped" for name in point.symbols}
    left = {point.name for point in entry_points.read_list() if point.treatment != "wrapped"}
    assert len(wrapped) > 200
    assert wrapped & left == set()


@pytest.mark.parametrize("api", ["CUDA", "HIP"])
def test_names_that_allocate_or_launch_are_never_neutral(api: str) -> None:
    """By their name: whatever is called an allocation or a launch is wrapped, or its consequence is stated."""
    words = ("MemAlloc", "Malloc", "LaunchKernel", "LaunchCooperative", "GraphLaunch", "MemCreate", "ArrayCreate", "CtxCreate")
    points = [point for point in entry_points.read_list() if point.api == api and any(word in point.name for word in words)]
    assert points
    assert [point.name for point in points if point.treatment == "neutral"] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", BINDINGS)
def test_the_newest_bindings_have_no_function_that_the_list_lacks(package: str, tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "uv.sh"), "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), package]
    if subprocess.run(command, check=False, capture_output=True, cwd=ROOT).returncode != 0:
        pytest.skip(f"{package} cannot be downloaded here")
    names = entry_points.read_bindings(tmp_path)
    assert len(names) > 400
    assert sorted(names - entry_points.known_names()) == []
