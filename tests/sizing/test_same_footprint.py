"""`size`, `plan`, `explain`, `capacity` and `up` go by one footprint: same engine, same version, same learned corrections."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sizing.sparse_models import Shape, write_model

from aimgpu.cli.main import run_command
from aimgpu.cli.stack_source import read_source
from aimgpu.control.controller import Controller
from aimgpu.control.plan.steps import Start
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis, basis_from_json, basis_to_json
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.engines.llamacpp.engine import installed_llamacpp
from aimgpu.errors import InvalidInput
from aimgpu.home import find_home
from aimgpu.sizing import SizingRequest, built_in, estimate_need, read_rows
from aimgpu.sizing.correction import Measurement
from aimgpu.sizing.surplus import describe_service
from aimgpu.units import GIB
from aimgpu.wiring import choose_hardware, make_dependencies

STACK = "models: {chat: {model: Qwen/Qwen3-8B-GGUF, engine: llamacpp, context: 4096, concurrency: 2}}\n"


def _measured(version: str | None) -> Measurement:
    return Measurement(
        model="Qwen/Qwen3-8B-GGUF",
        engine="llamacpp",
        engine_version=version,
        family="qwen3",
        gpu="MI300X",
        term="activations",
        estimated_bytes=GIB,
        measured_bytes=3 * GIB // 2,
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    (tmp_path / "stack.yaml").write_text(STACK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _learn() -> None:
    MeasurementFile(find_home().measurements_file).add([_measured(installed_llamacpp())])


def _read(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run_command([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _every_total(capsys: pytest.CaptureFixture[str]) -> set[int]:
    """What each command charges for the model."""
    wish = ("--engine", "llamacpp", "--context", "4096", "--concurrency", "2", "--gpu", "MI300X")
    (explained,) = _read(capsys, "explain", "chat", "--gpu", "MI300X")
    counted = [
        _read(capsys, "size", "Qwen/Qwen3-8B-GGUF", *wish)["total_bytes"],
        _read(capsys, "plan", "--gpu", "MI300X")["placements"][0]["slots"][0]["memory_bytes"],
        explained["ask"]["footprint_bytes"],
        _read(capsys, "capacity", "--gpu", "MI300X")["placements"][0]["slots"][0]["memory_bytes"],
    ]
    return {*counted, _total_of_up()}


def _total_of_up() -> int:
    home = find_home()
    home.create()
    controller = Controller(make_dependencies(home, choose_hardware(GpuChoice(simulated="MI300X"), home), lambda _: 0))
    try:
        plan = controller.apply(read_source(Path("stack.yaml")).stack.deployments, dry_run=True).plan
    finally:
        controller.close()
    (step,) = [step for step in plan.steps if isinstance(step, Start)]
    return step.slots[0].memory_bytes


def test_a_plan_promises_what_the_smallest_of_its_parts_can_serve() -> None:
    home = find_home()
    home.create()
    controller = Controller(make_dependencies(home, choose_hardware(GpuChoice(simulated="MI300X"), home), lambda _: 0))
    try:
        plan = controller.apply(read_source(Path("stack.yaml")).stack.deployments, dry_run=True).plan
    finally:
        controller.close()
    (step,) = [step for step in plan.steps if isinstance(step, Start)]
    slot = replace(step.slots[0], memory_bytes=40 * GIB)
    larger = replace(slot, memory_bytes=slot.memory_bytes + 40 * GIB)
    facts = built_in().find("Qwen/Qwen3-8B")
    assert facts is not None
    footprint = estimate_need(SizingRequest(model=facts, engine="vllm"))
    step = replace(step, prepared=replace(step.prepared, footprint=footprint))
    least, most = (str(describe_service(footprint, one.memory_bytes).text) for one in (slot, larger))
    assert least != most
    for slots in ((slot, larger), (larger, slot)):
        text = replace(step, placement=replace(step.placement, slots=slots)).text
        assert f" for {least}" in text
        assert most not in text


def test_every_command_charges_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    (before,) = _every_total(capsys)
    _learn()
    (after,) = _every_total(capsys)
    assert after > before


def test_a_snapshot_carries_what_models_are_sized_by(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _learn()
    assert run_command(["catalogue", "add", "acme/own", "--parameters", "7B"]) == 0
    (folder / "stack.yaml").write_text(f"{STACK}\n".replace("}}", "}, own: {model: acme/own, engine: vllm}}"))
    saved = folder / "s.json"
    saved.write_text(json.dumps(_read(capsys, "snapshot")))
    plan, (explained,) = _read(capsys, "plan"), _read(capsys, "explain", "own")
    monkeypatch.setenv("AIMGPU_HOME", str(folder / "elsewhere"))
    assert _read(capsys, "plan", "--snapshot", str(saved)) == plan
    assert _read(capsys, "explain", "own", "--snapshot", str(saved)) == [explained]


def test_a_damaged_file_of_measurements_is_told_and_stops_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    find_home().create()
    find_home().measurements_file.write_text("no json")
    assert "could not be read" in " ".join(_read(capsys, "plan", "--gpu", "MI300X")["notes"])
    assert "could not be read" in " ".join(_read(capsys, "size", "Qwen/Qwen3-8B-GGUF")["notes"])


def test_a_gguf_file_is_sized_for_the_engine_that_serves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was sized for vLLM, which does not."""
    write_model(folder / "m.gguf", Shape(family="llama"))
    (folder / "stack.yaml").write_text("models: {chat: {model: ./m.gguf, context: 1024}}\n")
    (answer,) = _read(capsys, "explain", "chat", "--gpu", "MI300X")
    sized = _read(capsys, "size", "./m.gguf", "--engine", "llamacpp", "--context", "1024", "--gpu", "MI300X")
    assert answer["ask"]["footprint_bytes"] == sized["total_bytes"]


def test_llamacpp_is_sized_as_the_build_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ("size", "Qwen/Qwen3-8B", "--engine", "llamacpp")
    installed = installed_llamacpp()
    assert installed is not None
    found = _read(capsys, *wish)
    assert found["engine_version"] == installed
    assert found == _read(capsys, *wish, "--engine-version", installed)
    build = next(term["inputs"]["build"] for term in found["terms"] if term["name"] == "activations")
    assert str(build) == installed.rsplit(".", 1)[-1]
    unknown = _read(capsys, *wish, "--engine-version", "2026")
    assert unknown["total_bytes"] > found["total_bytes"]
    assert "which build of llama.cpp will run is not known" in " ".join(unknown["notes"])


def test_what_models_are_sized_by_reads_back_the_same() -> None:
    rows = tuple(read_rows("id,parameters\nacme/own,7B\n"))
    basis = SizingBasis(versions={"vllm": "0.19"}, runnable=("vllm",), measurements=(_measured("0.19"),), models=rows)
    assert basis_from_json(json.loads(json.dumps(basis_to_json(basis)))) == basis
    assert basis_from_json(basis_to_json(SizingBasis())) == SizingBasis()
    assert basis.about(["H200-141"]) == replace(basis, measurements=())


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        {"other": 1},
        {"engines": 3},
        {"engines": {"vllm": 3}},
        {"runnable": "vllm"},
        {"runnable": [3]},
        {"models": 3},
        {"models": "id\nx"},
        {"measurements": {}},
        {"measurements": [{"model": "m"}]},
    ],
)
def test_a_damaged_basis_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput):
        basis_from_json(value)


@pytest.mark.parametrize(
    ("place", "larger"), [("", True), (", place: {vendor: amd}", True), (", place: {vendor: nvidia}", False)]
)
def test_beside_gpus_of_both_vendors_a_model_is_sized_for_those_it_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str, *, larger: bool
) -> None:
    worlds = [_read(capsys, "snapshot", "--gpu", part) for part in ("H200-141", "MI300X")]
    both = worlds[0] | {"nodes": [worlds[0]["nodes"][0], worlds[1]["nodes"][0] | {"name": "other"}]}
    (folder / "s.json").write_text(json.dumps(both))
    (folder / "stack.yaml").write_text(f"models: {{chat: {{model: Qwen/Qwen3-8B, engine: vllm{place}}}}}\n")
    (answer,) = _read(capsys, "explain", "chat", "--snapshot", "s.json")
    on_nvidia = _read(capsys, "size", "Qwen/Qwen3-8B", "--gpu", "H200-141")["total_bytes"]
    assert (answer["ask"]["footprint_bytes"] > on_nvidia) is larger
