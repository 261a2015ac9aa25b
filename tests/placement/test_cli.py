"""`aimgpu plan`, `explain`, `capacity` and `snapshot`: the same answers live, offline and as JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled
from tests.placement.worlds import mi300x, state_of, world

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.main import cli
from aimgpu.domain import Ask, Memory, Spread
from aimgpu.errors import AimGpuError, InvalidInput, PlacementRefused, UnknownDeployment, UnknownPartition
from aimgpu.placement import snapshot_to_json
from aimgpu.placement.session import PlacementSession

NINE = "models:\n  small: {model: acme/x, gpu: {memory: 12GB}, replicas: 9}\n"
THREE = "models:\n  large: {model: acme/x, gpu: {memory: 165GB}, replicas: 3}\n"
ALONE = """
models:
  wall: {model: acme/x, gpu: {memory: 12GB}, replicas: 6, isolation: hardware}
  chat: {model: Qwen/Qwen2.5-7B-Instruct, context: 8192, concurrency: 4}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def text(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def read(*arguments: str) -> Any:
    return json.loads(text(*arguments, "--json"))


def write(folder: Path, content: str) -> str:
    path = folder / "stack.yaml"
    path.write_text(content)
    return str(path)


def test_why_a_model_goes_there_is_said_in_plain_words(folder: Path) -> None:
    two = "models: {small: {model: acme/x, gpu: {memory: 12GB}}, large: {model: acme/x, gpu: {memory: 50GB}}}"
    for placement in read("plan", "-f", write(folder, two), "--gpu", "mi300x")["placements"]:
        assert placement["because"].startswith("the place that leaves the most room for more of what is deployed: ")
    alike = read("plan", "-f", write(folder, NINE), "--gpu", "mi300x")["placements"]
    assert alike[0]["because"].startswith("the tightest fit: ")


def test_nine_small_models_on_one_device_are_a_plan(folder: Path) -> None:
    plan = read("plan", "-f", write(folder, NINE), "--gpu", "mi300x", "--dry-run")
    assert plan["fits"]
    assert plan["simulated"]
    assert len(plan["placements"]) == 9
    assert sum(slot["memory_bytes"] for each in plan["placements"] for slot in each["slots"]) == 9 * 12 * 10**9


def test_three_large_models_are_refused_with_the_numbers(folder: Path) -> None:
    result = run("plan", "-f", write(folder, THREE), "--gpu", "MI300X")
    assert isinstance(result.exception, PlacementRefused)
    assert "short by 115.4GiB" in result.stdout
    found = json.loads(run("plan", "-f", write(folder, THREE), "--gpu", "MI300X", "--json").stdout)
    assert not found["fits"]
    assert [refusal["ask"] for refusal in found["refusals"]] == ["large-1", "large-2"]
    assert found["refusals"][0]["reasons"][0]["short_bytes"] == 2 * 165 * 10**9 - 206141652992


def test_a_plan_finds_the_layout_that_isolation_needs(folder: Path) -> None:
    stack = write(folder, ALONE)
    plan = read("plan", "-f", stack, "--gpu", "MI300X")
    assert [(step["kind"], step["layout"]) for step in plan["steps"][:1]] == [("layout", "CPX/NPS1")]
    assert "repartition gpu0 as CPX/NPS1" in text("plan", "-f", stack, "--gpu", "MI300X")
    refused = run("plan", "-f", stack, "--gpu", "MI300X", "--no-layouts")
    assert isinstance(refused.exception, PlacementRefused)


def test_a_snapshot_gives_the_same_answer_offline(folder: Path) -> None:
    stack = write(folder, NINE)
    saved = folder / "s.json"
    saved.write_text(text("snapshot"))
    live, offline = read("plan", "-f", stack), read("plan", "-f", stack, "--snapshot", str(saved))
    assert live == offline
    assert read("explain", "small", "-f", stack) == read("explain", "small", "-f", stack, "--snapshot", str(saved))
    assert text("snapshot", "--snapshot", str(saved)) == saved.read_text()


def test_explain_shows_every_device_and_the_chosen_one(folder: Path) -> None:
    stack = write(folder, ALONE)
    (answer,) = read("explain", "chat", "-f", stack, "--gpu", "MI300X", "--count", "2")
    assert answer["decision"]["placed"]
    assert sorted(device["verdict"] for device in answer["devices"]) == ["chosen", "would do"]
    shown = text("explain", "chat", "-f", stack, "--gpu", "MI300X", "--count", "2")
    assert "chosen" in shown
    assert "LOSS" in shown
    refused = text("explain", "wall", "-f", write(folder, ALONE.replace("7B-Instruct", "7B-Instruct-GGUF")))
    assert "hardware is required" in refused


def test_explain_of_what_nobody_knows_is_an_error(folder: Path) -> None:
    result = run("explain", "nobody", "-f", write(folder, NINE), "--gpu", "MI300X")
    assert isinstance(result.exception, UnknownDeployment)


def test_capacity_counts_devices_and_says_how_close_that_is(folder: Path) -> None:
    stack = write(folder, THREE)
    found = read("capacity", "-f", stack, "--gpu", "MI300X")
    assert (found["devices"], found["bound"], found["proven_best"]) == (3, 3, True)
    assert "none can do with fewer" in text("capacity", "-f", stack)
    huge = write(folder, "models:\n  huge: {model: acme/x, gpu: {memory: 300GB}}\n")
    assert isinstance(run("capacity", "-f", huge).exception, PlacementRefused)


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"version": 2}', '{"version": 1, "nodes": 3}'])
def test_a_file_that_is_no_snapshot_is_refused(folder: Path, content: str) -> None:
    saved = folder / "s.json"
    saved.write_text(content)
    result = run("plan", "-f", write(folder, NINE), "--snapshot", str(saved))
    assert isinstance(result.exception, AimGpuError), result.output
    assert result.exception.hint


def test_a_snapshot_and_a_part_exclude_each_other(folder: Path) -> None:
    result = run("plan", "-f", write(folder, NINE), "--snapshot", "s.json", "--gpu", "MI300X")
    assert isinstance(result.exception, InvalidInput)


def test_with_a_daemon_what_runs_is_explained_and_not_planned_again(folder: Path) -> None:
    daemon = TestDaemon(folder / "home")
    try:
        client = daemon.start()
        apply(client, stack(chat={"gpu": {"memory": "20GB"}}))
        wait_until_settled(client)
        path = write(folder, "models:\n  chat: {model: a/model, gpu: {memory: 20GB}, replicas: 2}\n")
        plan = read("plan", "-f", path)
        assert len(plan["placements"]) == 1
        runs, missing = read("explain", "chat", "-f", path)
        assert runs["decision"]["placed"]
        assert missing["decision"]["slots"] == plan["placements"][0]["slots"]
        saved = folder / "s.json"
        saved.write_text(text("snapshot"))
        assert read("plan", "-f", path, "--snapshot", str(saved)) == plan
        assert read("explain", "chat", "-f", path, "--snapshot", str(saved)) == [runs, missing]
    finally:
        daemon.stop()


def test_moves_that_free_whole_devices_are_shown(folder: Path) -> None:
    devices = [state_of(mi300x(f"g{number}")) for number in range(2)]
    engine = PlacementSession(world(*devices))
    for name, spread in (("a", Spread.PACK), ("b", Spread.SPREAD)):
        engine.place(Ask(name=name, want=Memory(memory_bytes=10**10), spread=spread))
    saved = folder / "s.json"
    saved.write_text(json.dumps(snapshot_to_json(engine.snapshot)))
    shown = text("plan", "--free", "1", "--snapshot", str(saved))
    assert "move " in shown
    assert len(read("plan", "--free", "1", "--snapshot", str(saved))["steps"]) == 1
    assert "Nothing to do." in text("plan", "--free", "1", "--gpu", "MI300X")
    assert isinstance(run("plan", "--free", "2", "--snapshot", str(saved)).exception, PlacementRefused)


def test_room_is_made_through_the_daemon_as_the_plan_said(folder: Path) -> None:
    daemon = TestDaemon(folder / "home")
    urgent = stack(urgent={"gpu": {"memory": "150GB"}, "priority": "high"})
    try:
        client = daemon.start()
        apply(client, stack(batch={"gpu": {"memory": "150GB"}, "priority": "low"}))
        wait_until_settled(client)
        assert [step["kind"] for step in read("plan", "-f", write(folder, urgent))["steps"]] == ["stop", "place"]
        assert "Stop batch" in json.dumps(list(client.apply(urgent, "/")))
        list(client.apply(urgent, "/", make_room=True, dry_run=True))
        assert states(client) == {"batch": "ready"}
        list(client.apply(urgent, "/", make_room=True))
        wait_until_settled(client)
        assert states(client) == {"batch": "sleeping", "urgent": "ready"}
        assert read("snapshot")["recent_preemptions"] == 1
    finally:
        daemon.stop()


def states(client: DaemonClient) -> dict[str, str]:
    return {instance["name"]: instance["state"] for instance in client.read_status()["instances"]}


def test_where_a_model_may_run_is_planned_from_the_stack_file(folder: Path) -> None:
    path = write(
        folder,
        """
models:
  b: {model: acme/x, gpu: {memory: 20GB}, place: {with: a}}
  a: {model: acme/x, gpu: {memory: 20GB}, place: {products: [MI300X], not_with: [c]}}
  c: {model: acme/x, gpu: {memory: 20GB}, place: {partition: sim-mi300x-1/spx-0, pinned: true}}
  two: {model: acme/x, gpu: {fraction: 0.25, devices: 2}, compute: 30%}
""",
    )
    plan = read("plan", "-f", path, "--gpu", "MI300X", "--count", "3")
    where = {each["ask"]: [slot["device_id"] for slot in each["slots"]] for each in plan["placements"]}
    assert where["c-0"] == ["sim-mi300x-1"]
    assert where["a-0"] == where["b-0"] != where["c-0"]
    assert len(set(where["two-0"])) == 2
    two = next(each for each in plan["placements"] if each["ask"] == "two-0")
    assert {slot["compute"]["text"] for slot in two["slots"]} == {"91 of 304 CUs (30%)"}
    assert "91 of 304 CUs (30%)" in text("plan", "-f", path, "--gpu", "MI300X", "--count", "3")
    wrong = write(folder, "models: {a: {model: acme/x, gpu: {memory: 20GB}, place: {partition: nowhere/spx-0}}}\n")
    assert isinstance(run("plan", "-f", wrong, "--gpu", "MI300X").exception, UnknownPartition)


def test_what_a_simulated_gpu_cannot_enforce_is_refused_with_what_it_can(folder: Path) -> None:
    path = write(folder, "models: {wall: {model: acme/x, gpu: {memory: 10GB}, isolation: hardware}}\n")
    result = run("plan", "-f", path)
    assert isinstance(result.exception, PlacementRefused)
    assert "Would fit: Accept isolation: none; gpu0 fits." in result.stdout
    assert "Nothing to do" not in result.stdout


@pytest.mark.parametrize("content", [NINE, THREE, ALONE])
def test_explain_gives_the_answer_of_the_plan_for_the_whole_stack(folder: Path, content: str) -> None:
    path, world_of = write(folder, content), ("--gpu", "MI300X")
    plan = json.loads(run("plan", "-f", path, *world_of, "--json").stdout)
    for each in plan["placements"]:
        del each["service"]  # of the plan alone
    placed = {each["ask"]: each for each in plan["placements"]}
    refused = {each["ask"]: each for each in plan["refusals"]}
    names = {name.rsplit("-", 1)[0] for name in (*placed, *refused)}
    answers = {each["ask"]["name"]: each for name in names for each in read("explain", name, "-f", path, *world_of)}
    assert answers.keys() == placed.keys() | refused.keys()
    changes = [step["text"] for step in plan["steps"] if step["kind"] != "place"]
    for name, answer in answers.items():
        told = dict(answer["decision"])
        assert told.pop("placed") == (name in placed)
        assert told == placed[name] if name in placed else {"placed": False, **told} == refused[name]
        assert answer["first"] == (changes if name in placed else [])
        chosen = [device["text"] for device in answer["devices"] if device["verdict"] == "chosen"]
        slots = told.get("slots", [])
        assert len(chosen) == len(slots)
        assert all(text.startswith(slot["partition_id"]) for text, slot in zip(chosen, slots, strict=True))


def test_explain_may_do_as_little_as_the_plan(folder: Path) -> None:
    path = write(folder, ALONE)
    (*_, last) = read("explain", "wall", "-f", path, "--gpu", "MI300X", "--no-layouts")
    assert not last["decision"]["placed"]
    assert "repartition gpu0 as CPX/NPS1" in text("explain", "wall", "-f", path, "--gpu", "MI300X")


def test_a_stack_with_simulated_gpus_is_judged_as_up_would(folder: Path) -> None:
    """What real ones would do is asked for with --gpu."""
    path = write(folder, "gpus: {simulated: MI300X}\nmodels: {a: {model: acme/x, gpu: {memory: 1GB}, isolation: hardware}}\n")
    assert isinstance(run("plan", "-f", path).exception, PlacementRefused)
    assert read("plan", "-f", path, "--gpu", "MI300X")["fits"]
    assert "memory is accounted for, models run on the CPU" in run("plan", "-f", path).stdout
    assert "planned as for real GPUs of this product" in text("plan", "-f", path, "--gpu", "MI300X")


def test_refusals_with_the_same_reasons_are_shown_once(folder: Path) -> None:
    path = write(
        folder, "models:\n  m: {model: acme/x, gpu: {memory: 100GB}, replicas: 40}\n  n: {model: a/x, gpu: {memory: 300GB}}\n"
    )
    result = run("plan", "-f", path, "--gpu", "MI300X")
    assert isinstance(result.exception, PlacementRefused)
    assert result.stdout.count("short by") == 2
    assert "The same holds for " in result.stdout
    assert " and 29 more." in result.stdout
    found = json.loads(run("plan", "-f", path, "--gpu", "MI300X", "--json").stdout)["refusals"]
    assert len(found) == 39
    assert all(each["summary"].startswith(f"{each['ask']} does not fit on sim-mi300x-0: ") for each in found)
    assert len({json.dumps(each["reasons"]) for each in found}) == 2
    assert [each["ask"] for each in found] == [f"m-{number}" for number in range(2, 40)] + ["n-0"]


def test_a_share_of_compute_survives_another_layout_or_is_refused(folder: Path) -> None:
    """Two models at 60 % of one GPU are not given 12.5 % each by laying it out in eight."""
    path = write(folder, "models:\n  a: {model: acme/x, gpu: {memory: 10GB}, compute: 60%, replicas: 2}\n")
    found = json.loads(run("plan", "-f", path, "--gpu", "MI300X", "--json").stdout)
    assert [slot["compute"]["units"] for each in found["placements"] for slot in each["slots"]] == [182]
    (refusal,) = found["refusals"]
    assert refusal["summary"] == (
        "a-1 does not fit on sim-mi300x-0: has 121 of 304 CUs (40%) free; needs 60% of the GPU's compute (182 CUs)"
    )


def test_a_model_too_large_for_a_kind_of_partition_is_refused_for_its_size(folder: Path) -> None:
    path = write(folder, "models: {a: {model: meta-llama/Llama-3.1-70B-Instruct, engine: vllm, gpu: {partition: cpx}}}\n")
    found = json.loads(run("plan", "-f", path, "--gpu", "MI300X", "--json").stdout)
    (reason,) = found["refusals"][0]["reasons"]
    assert reason["code"] == "memory"
    assert re.fullmatch(r"needs 13\d\.\dGiB; a cpx partition has 24GiB", reason["text"])


@pytest.mark.parametrize(
    ("gpu", "kind", "compute", "text"),
    [
        ("MI300X", "cpx", "13%", "needs 13% of the GPU's compute (39 CUs); a cpx partition has 38 of 304 CUs (12.5%)"),
        (
            "H200-141",
            "1g.18gb",
            "20%",
            "needs 20% of the GPU's compute (26 SMs); a 1g.18gb partition has 16 of 132 SMs (12.1%)",
        ),
    ],
)
def test_compute_that_a_kind_of_partition_never_has_is_the_reason_and_not_the_layout(
    folder: Path, gpu: str, kind: str, compute: str, text: str
) -> None:
    path = write(folder, f"models: {{a: {{model: acme/x, gpu: {{partition: {kind}}}, compute: {compute}}}}}\n")
    found = json.loads(run("plan", "-f", path, "--gpu", gpu, "--json").stdout)
    (reason,) = found["refusals"][0]["reasons"]
    assert (reason["code"], reason["text"]) == ("compute", text)


def test_a_plan_quotes_the_partition_that_a_model_ends_up_on(folder: Path) -> None:
    """The GPU is laid out in eight for the second model, after the first had been given a place on the whole."""
    path = write(folder, "models:\n  a: {model: a/x, gpu: {memory: 10GB}}\n  b: {model: a/x, gpu: {partition: cpx}}\n")
    plan = read("plan", "-f", path, "--gpu", "MI300X")
    why = {each["ask"]: each["because"] for each in plan["placements"]}
    assert why["a-0"].endswith("14.6GiB of the partition stays free")


OVERSUBSCRIBED = "models:\n" + "".join(
    f"  m{number}: {{model: Qwen/Qwen2.5-7B-Instruct, engine: vllm, context: 8192, concurrency: 4}}\n" for number in range(6)
)


def test_plan_replays_arrivals_on_a_gpu_that_is_too_small_for_all(folder: Path) -> None:
    stack_file = write(folder, OVERSUBSCRIBED)
    requests = [f"{second},m{second // 7 % 6}" for second in range(0, 4200, 7)]
    (folder / "log.csv").write_text("\n".join(["seconds,model", *requests]))
    arguments = ("plan", "-f", stack_file, "--gpu", "L40S", "--arrivals", "log.csv")
    found = read(*arguments)
    assert found["models"] == 6
    assert 1 <= found["awake_together"] < 6
    assert found["requests"] == 600
    assert 0 <= found["late"] < 600
    assert f"any {found['awake_together']} of 6 models fit awake together" in text(*arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seconds,model\n1,nobody\n", "no model 'nobody'"),
        ("when,model\n1,m0\n", "expected the columns"),
        ("seconds,model\nx,m0\n", "line 2"),
    ],
)
def test_plan_names_the_line_of_arrivals_that_it_cannot_use(folder: Path, content: str, said: str) -> None:
    stack_file = write(folder, OVERSUBSCRIBED)
    (folder / "log.csv").write_text(content)
    result = run("plan", "-f", stack_file, "--gpu", "L40S", "--arrivals", "log.csv")
    assert isinstance(result.exception, InvalidInput)
    assert said in result.exception.message
