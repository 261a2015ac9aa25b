"""`--json` of commands that need no daemon: its shape, and that the text shows the same figures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.products import divided_products
from tools.json_answers import ANSWERS, GPUS, PLAN, SIZE, Answer, check_shape

from aimgpu.cli.main import run_command
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.errors import AimGpuError, PlacementRefused, UnknownModel
from aimgpu.units import format_bytes, parse_bytes

PRODUCTS = [product.name for product in divided_products()]
STACK = """
models:
  chat: {model: Qwen/Qwen3-8B, engine: vllm, gpu: {memory: 40GiB}}
  code: {model: Qwen/Qwen3-8B, engine: vllm}
"""
BYTES = re.compile(r"\d+(?:\.\d)?(?:[KMGT]iB|B)")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stack.yaml").write_text(STACK)
    return tmp_path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """Text and parsed JSON of one command line."""

    def both(*arguments: str, status: int = 0) -> tuple[str, Any]:
        assert run_command(list(arguments)) == status
        text = capsys.readouterr().out
        assert run_command([*arguments, "--json"]) == status
        return text, json.loads(capsys.readouterr().out)

    return both


@pytest.mark.parametrize("documented", [one for one in ANSWERS if one.example], ids=lambda one: one.command)
def test_an_answer_has_the_keys_of_the_reference_and_no_others(documented: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    run_command([*str(documented.example).split(), "--json"])
    check_shape(json.loads(capsys.readouterr().out), documented.shape)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_gpus_of_every_product_have_the_shape_and_the_table_their_figures(answer: Any, product: str) -> None:
    text, found = answer("gpus", "--simulated", product)
    check_shape(found, GPUS)
    (gpu,) = found["gpus"]
    assert found["simulated"] is gpu["simulated"] is True
    assert gpu["layout"] in gpu["layouts"]
    shown = {parse_bytes(size) for size in BYTES.findall(text)}
    for partition in gpu["partitions"]:
        assert parse_bytes(format_bytes(partition["memory_bytes"])) in shown
        assert partition["id"].rpartition("/")[2] in text
        assert partition["free_bytes"] <= partition["memory_bytes"] <= gpu["memory_bytes"]
    assert f"{gpu['partitions'][0]['level_alone']} / {gpu['partitions'][0]['level_shared']}" in text


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_layout_that_is_listed_can_be_planned_and_none_has_more_than_the_gpu(answer: Any, product: str) -> None:
    text, found = answer("partition", "list", "--simulated", product, "--all")
    (gpu,) = found["gpus"]
    assert [layout["name"] for layout in gpu["layouts"] if layout["current"]] == [gpu["layout"]]
    for layout in gpu["layouts"]:
        assert layout["name"] in text
        assert layout["what"] in text
        for size in BYTES.findall(layout["what"]):
            assert any(format_bytes(one["memory_bytes"]) == size for one in layout["partitions"])
    last = gpu["layouts"][-1]
    _, change = answer("partition", "plan", "0", last["name"], "--simulated", product)
    assert (change["before"], change["after"]) == (gpu["layout"], last["name"])
    assert change["needs_reload"] == last["needs_reload"]
    assert change["stops"] == change["in_the_way"] == []


def test_a_plan_has_its_shape_and_the_table_its_figures(answer: Any) -> None:
    text, found = answer("plan", "--gpu", "MI300X")
    check_shape(found, PLAN)
    assert found["fits"]
    assert {placement["ask"].rpartition("-")[0] for placement in found["placements"]} == {"chat", "code"}
    for placement in found["placements"]:
        (slot,) = placement["slots"]
        assert placement["ask"] in text
        assert slot["partition_id"].replace("sim-mi300x-", "gpu") in text  # people read positions, programs ids
        assert format_bytes(slot["memory_bytes"], up=True) in text
        assert placement["because"] in text


def test_a_refused_plan_has_reasons_of_every_gpu_in_both(answer: Any, folder: Path) -> None:
    (folder / "stack.yaml").write_text("models: {big: {model: Qwen/Qwen3-8B, engine: vllm, gpu: {memory: 999GiB}}}")
    text, found = answer("plan", "--gpu", "MI300X", "--count", "2", status=PlacementRefused.exit_status)
    check_shape(found, PLAN)
    assert not found["fits"]
    (refusal,) = found["refusals"]
    assert {reason["device_id"] for reason in refusal["reasons"]} == {"sim-mi300x-0", "sim-mi300x-1"}
    assert refusal["summary"].replace("sim-mi300x-", "gpu") in text
    assert "999GiB" in text


def test_an_explanation_agrees_with_the_plan(answer: Any) -> None:
    _, plan = answer("plan", "--gpu", "MI300X")
    text, explained = answer("explain", "chat", "--gpu", "MI300X")
    (one,) = explained
    (planned,) = [placement for placement in plan["placements"] if placement["ask"].startswith("chat")]
    assert one["decision"]["slots"] == planned["slots"]
    assert planned["slots"][0]["partition_id"].rpartition("/")[2] in text


def test_a_capacity_has_placements_for_all_and_its_layouts_are_as_many_as_its_gpus(answer: Any) -> None:
    text, found = answer("capacity", "--gpu", "MI300X")
    assert found["bound"] <= found["devices"] == len(found["layouts"])
    assert len(found["placements"]) == 2
    assert text.startswith(f"{found['devices']} x MI300X hold 2 models")


def test_a_snapshot_is_read_back_and_gives_the_plan_of_the_machine(answer: Any, folder: Path) -> None:
    _, snapshot = answer("snapshot", "--gpu", "H200-141")
    (folder / "s.json").write_text(json.dumps(snapshot))
    _, again = answer("snapshot", "--snapshot", "s.json")
    assert again["nodes"] == snapshot["nodes"]
    _, there = answer("plan", "--snapshot", "s.json")
    _, here = answer("plan", "--gpu", "H200-141")
    assert there["placements"] == here["placements"]


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "transformers"])
def test_a_size_is_the_sum_of_its_terms_and_the_text_shows_each(answer: Any, engine: str) -> None:
    text, found = answer("size", "Qwen/Qwen3-8B", "--engine", engine, "--gpu", "MI300X")
    check_shape(found, SIZE)
    total = found["total_bytes"]
    assert total == sum(term["memory_bytes"] for term in found["terms"])
    assert format_bytes(total, up=True) in text or format_bytes(total) in text
    for term in found["terms"]:
        assert term["name"].replace("_", " ") in text.replace("_", " ")


def test_the_catalogue_lists_what_it_shows(answer: Any) -> None:
    text, found = answer("catalogue", "list", "qwen3-8b")
    names = [model["id"] for model in found["models"]]
    assert "Qwen/Qwen3-8B" in names
    assert all(name in text for name in names)
    shown, one = answer("catalogue", "show", "qwen/qwen3-8b")
    assert one == next(model for model in found["models"] if model["id"] == "Qwen/Qwen3-8B")
    assert str(one["parameters"]) in shown
    assert answer("catalogue", "list", "no such model")[1] == {"models": []}


def test_keys_are_listed_without_their_hashes(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--model", "chat", "--model", "code", "--priority", "low", "--rate", "2.5", "--concurrency", "3"]
    assert run_command(["keys", "add", "bot", *limits, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    expected = {"models": ["chat", "code"], "priority": "low", "requests_per_second": 2.5, "concurrency": 3}
    unset = {"answer_bytes": None, "cache_group": None, "expires": None}
    assert made == {"name": "bot", "key": made["key"], **expected, **unset}
    assert run_command(["keys", "add", "ann"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("aimgpu-")
    assert "only time" in shown.err
    text, found = answer("keys", "list")
    bot, ann = found["keys"]
    assert {name: bot[name] for name in expected} == expected
    assert (bot["name"], ann["name"], ann["models"]) == ("bot", "ann", None)
    assert "sha256" not in bot
    assert re.search(r"bot .* chat, code +low +2\.5/s +3", text)
    assert re.search(r"ann .* all +the model's +- +-", text)
    assert run_command(["keys", "remove", "ann", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": "ann", "left": 1}
    assert run_command(["keys", "remove", "bot"]) == 0
    assert "No key is left" in capsys.readouterr().out


def test_measurements_of_a_machine_that_ran_nothing_are_empty(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text, found = answer("measurements", "list")
    assert found == {"measurements": []} or found["measurements"] in ([], {})
    assert len(text.splitlines()) == 1, "the header alone"
    assert run_command(["measurements", "forget", "Qwen/Qwen3-8B", "--json"]) == UnknownModel.exit_status
    assert "nothing was measured" in capsys.readouterr().err


def test_completion_and_version_are_the_same_in_both(answer: Any) -> None:
    text, found = answer("completion", "zsh")
    assert text == found["script"] + "\n"
    assert found["shell"] == "zsh"
    shown, facts = answer("version")
    assert all(str(value) in shown for value in facts.values())


def test_a_compose_file_has_a_service_for_every_model_with_memory_that_adds_up(answer: Any, folder: Path) -> None:
    (folder / "stack.yaml").write_text("gpus: {simulated: MI300X}\n" + STACK)
    text, found = answer("compose", "--first-port", "9000")
    assert found["compose"] == text
    services = yaml.safe_load(text)["services"]
    assert set(services) == {one.name for one in parse_stack(STACK).deployments}
    ports = [one["command"][one["command"].index("--port") + 1] for one in services.values()]
    assert ports == ["9000", "9001"]
    granted, whole = map(int, re.findall(r"\((\d+) of (\d+) bytes\)", text)[0])
    assert parse_bytes("40GiB") < granted <= whole
    assert str(folder) not in text


def test_what_does_not_fit_at_once_is_no_compose_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = "".join(f"  {name}: {{model: Qwen/Qwen3-8B, engine: vllm, gpu: {{memory: 150GiB}}, keep: 5m}}\n" for name in "ab")
    (folder / "stack.yaml").write_text(f"gpus: {{simulated: MI300X}}\nmodels:\n{both}")
    assert run_command(["compose"]) == PlacementRefused.exit_status
    assert "take turns" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["capacity"], ["explain", "chat"], ["compose"]], ids=lambda words: words[0])
@pytest.mark.parametrize("text", ["models: [", "models: {chat: {model: m, gpu: {memory: 5}}}", ""])
def test_a_wrong_stack_is_refused_by_every_command_that_reads_one(
    command: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "stack.yaml").write_text(text)
    status = run_command([*command, "--json"])
    error = json.loads(capsys.readouterr().err)["error"]
    assert status == AimGpuError.exit_status + 1
    assert error["code"] == "invalid_stack_file"
    assert "stack.yaml" in error["message"]
    assert error["hint"]
