"""`ps`, `slo`, `resize` and `logs`: what the table shows is what `--json` has, for every state that a model can be in."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.canned import Answer, CannedDaemon, canned_daemon

from aimgpu.cli.main import run_command
from aimgpu.domain import InstanceState
from aimgpu.errors import EngineFailed, InvalidInput, UnknownDeployment
from aimgpu.home import Home
from aimgpu.units import GIB, format_bytes

GPU = {"id": "gpu-a", "index": 0, "product": "MI300X", "simulated": False}


def instance(name: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    return {
        "id": f"{name}-0-abc",
        "name": name,
        "model": "org/model",
        "engine": "vllm",
        "device": "gpu-a",
        "partition": "gpu-a/spx-0",
        "memory_bytes": 17 * GIB,
        "level": "runtime",
        "mechanism": "interposer",
        "state": state,
        "percent": None,
        "replica": 0,
        **more,
    }


def status(*instances: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "simulated": False,
        "gpus": [GPU],
        "instances": list(instances),
        "models_url": "http://127.0.0.1:1/v1",
        "page_url": "http://127.0.0.1:1/",
        **more,
    }


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert run_command(list(arguments)) == 0
    return capsys.readouterr()


def rows(text: str) -> list[list[str]]:
    """Cells of a plain table; two spaces divide them."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


@pytest.mark.parametrize("state", InstanceState)
def test_a_model_is_shown_with_its_state_in_the_table_and_in_json(
    daemon: CannedDaemon, state: InstanceState, capsys: pytest.CaptureFixture[str]
) -> None:
    now = status(instance("chat", state.value, reason="because", last_lines=["the end"]))
    daemon.answer("GET /status", now)
    assert json.loads(shown(capsys, "ps", "--json")[0]) == now
    out, err = shown(capsys, "ps", "--wide")
    header, row = rows(out)[:2]
    cells = dict(zip(header, row, strict=True))
    assert (cells["NAME"], cells["MODEL"], cells["ENGINE"], cells["STATE"]) == ("chat", "model", "vllm", state.value)
    assert (cells["MEMORY"], cells["GPU"], cells["LEVEL"]) == ("17GiB", "gpu0/spx-0", "runtime")
    assert (cells["ENDPOINT"] == "-") == (state not in (InstanceState.READY, InstanceState.SLEEPING))
    assert ("because" in err) == (state in (InstanceState.FAILED, InstanceState.QUEUED))
    assert ("the end" in err) == (state is InstanceState.FAILED)


@pytest.mark.parametrize(
    ("change", "cell", "text"),
    [
        ({"state": "loading", "percent": 40}, "STATE", "loading 40%"),
        ({"state": "loading", "percent": 0, "stage": "loading weights"}, "STATE", "loading 0% (loading weights)"),
        ({"memory_bytes": None}, "MEMORY", "-"),
        ({"memory_bytes": 19_005_230_284}, "MEMORY", "17.7GiB"),
        ({"engine": None}, "ENGINE", "-"),
        ({"mechanism": "none"}, "MECHANISM", "-"),
        ({"mechanism": None}, "MECHANISM", "-"),
        ({"concurrency": 8}, "REQUESTS", "8"),
        ({"compute": "91 of 304 CUs (30%)"}, "COMPUTE", "91 of 304 CUs (30%)"),
        ({"replica": 2}, "NAME", "chat#2"),
        ({"device": "gone"}, "GPU", "gone"),
        ({"model": "/models/a.gguf"}, "MODEL", "a.gguf"),
        ({"endpoint": "http://other/v1"}, "ENDPOINT", "http://other/v1"),
    ],
)
def test_a_cell_shows_what_is_known(
    daemon: CannedDaemon, change: dict[str, Any], cell: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET /status", status(instance("chat", **change)))
    header, row = rows(shown(capsys, "ps", "--wide")[0])[:2]
    assert dict(zip(header, row, strict=True))[cell] == text


def test_among_several_gpus_each_has_its_number(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [GPU, {**GPU, "id": "gpu-b", "index": 1, "simulated": True}]
    daemon.answer("GET /status", status(instance("a"), instance("b", device="gpu-b", partition="gpu-b/cpx-3"), gpus=gpus))
    out, _ = shown(capsys, "ps")
    assert "gpu0/spx-0" in out
    assert "gpu1/cpx-3" in out


def test_what_waits_for_room_is_listed_with_what_runs(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [{"name": "late", "model": "m", "reason": "no room"}]
    daemon.answer("GET /status", status(waiting=waiting, notes=["the disk is nearly full"]))
    out, err = shown(capsys, "ps")
    assert [cell for cell in rows(out)[1] if cell in {"late", "queued"}] == ["late", "queued"]
    assert "late waits for room: no room" in err
    assert "note: the disk is nearly full" in err


def test_a_terminal_of_80_columns_shows_every_cell_whole(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    model = instance("chat", model="HuggingFaceTB/SmolLM2-135M-Instruct", compute="91 of 304 CUs (30%)", concurrency=2)
    daemon.answer("GET /status", status(model, gpus=[{**GPU, "simulated": True}]))
    out, _ = shown(capsys, "ps")
    row = next(line for line in out.splitlines() if line.startswith("chat"))
    for cell in ("SmolLM2-135M-Instruct", "gpu0/spx-0", "17GiB", "ready"):
        assert cell in row
    assert "Not shown on a terminal this narrow" not in out


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_switches_colours_off(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    daemon.answer("GET /status", status(simulated=True))
    out, _ = shown(capsys, "ps")
    assert ("\x1b[33m" in out) == (not no_color)


def test_nothing_that_runs_is_said_in_words(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET /status", status())
    assert shown(capsys, "ps")[0].startswith("Nothing runs.\n")


def test_what_a_grant_is_good_for_is_shown_below_the_table(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    served: dict[str, Any] = {
        "concurrency": 8,
        "context_tokens": 8192,
        "kv_cache_bytes": 2 * GIB,
        "grants": [{"memory_bytes": 20 * GIB}],
    }
    daemon.answer(
        "GET /status",
        status(
            instance("chat", **served, kv_tokens=578_675, service=["8 requests at once, a KV cache of 578,675 tokens (2GiB)"]),
            instance("small", **{**served, "engine": "llamacpp"}, kv_tokens=None, service=[]),
        ),
    )
    out, _ = shown(capsys, "ps")
    assert "\nchat: 8 requests at once, a KV cache of 578,675 tokens (2GiB)\n" in out
    out, _ = shown(capsys, "ps", "--wide")
    assert re.search(r"\nchat .* 8 +runtime", out)
    assert re.search(r"\nsmall .* 8 x 8192 +runtime", out)
    assert "\nsmall: " not in out


def test_only_models_that_let_others_work_are_said_to_share(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    sharing = {
        "alone": {"sharing": "strict", "share": 0.0},
        "fair": {"sharing": "fair", "share": 1.0},
        "kept": {"sharing": "promise", "share": 0.25, "promise": "ttft_p95 500ms", "promise_used": 0.4, "cost": 0.08},
        "bare": {"sharing": "promise", "share": 0.0, "gate": False},
        "worth": {"sharing": "promise", "share": 0.25, "promise": None, "promise_used": None, "cost": None, "yielded": 0.18},
    }
    daemon.answer("GET /status", status(instance("alone"), sharing=sharing))
    out, _ = shown(capsys, "ps")
    assert "alone shares" not in out
    assert "fair shares by fair: others may use 100% while it works (no gate, so what they use is not measured)\n" in out
    assert "bare shares by promise: there is no gate on its GPU, so others are not held back\n" in out
    assert "worth shares by promise: others may use 25% while it works and used 18% of the GPU's time\n" in out
    assert "kept shares by promise: others may use 25% while it works, 40% of ttft_p95 500ms used, 8% slower for it\n" in out


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_resize_shows_sizes_that_can_be_typed_and_says_whether_it_was_done(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], *, dry_run: bool
) -> None:
    change = {"instance": "chat-0", "partition": "gpu-a/spx-0", "before_bytes": GIB, "after_bytes": 12 * GIB, "used_bytes": 5}
    answer = {"deployment": "chat", "changes": [change], "note": "vLLM uses it after a restart"}
    daemon.answer("POST /resize", answer)
    flag = ["--dry-run"] if dry_run else []
    assert json.loads(shown(capsys, "resize", "chat", "--memory", "12GiB", "--json", *flag)[0]) == answer
    out, _ = shown(capsys, "resize", "chat", "--memory", "12GiB", *flag)
    verb = "would have" if dry_run else "has"
    assert out == (
        f"chat-0 {verb} 12GiB of gpu-a/spx-0 (before 1GiB, in use {format_bytes(5)})\nVLLM uses it after a restart.\n"
    )
    assert [(asked.body, asked.query) for asked in daemon.asked] == [
        ({"model": "chat", "memory_bytes": 12 * GIB}, f"dry_run={int(dry_run)}")
    ] * 2


@pytest.mark.parametrize("size", ["12", "-1GiB", "lots", "", "12 apples"])
def test_a_size_that_is_none_is_refused_before_the_daemon_is_asked(
    daemon: CannedDaemon, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["resize", "chat", "--memory", size]) == InvalidInput.exit_status
    assert "such as 24GiB" in capsys.readouterr().err
    assert daemon.asked == []


def target(name: str, attainment: float | None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "promise": f"{name} within 500ms",
        "judged": 3 if attainment is None else 20,
        "attainment": attainment,
        "target_part": 0.95,
        "budget_left": None if attainment is None else 0.4,
        "fast_burn": None if attainment is None else 1.5,
        "slow_burn": None,
        **more,
    }


def test_promises_are_shown_as_they_were_kept(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"own": True, "targets": [target("latency_p95", None)]}
    scores = {
        "models": {
            "chat": {"targets": [target("ttft_p95", 0.987)], "classes": {"low": own}},
            "code": {"targets": [], "classes": {}},
        },
        "pressure": {"gpu-a": {"reason": "chat breaks its promise"}},
        "queue": {
            "longest_wait_seconds": {"high": 30.0, "low": 0.5},
            "most_queued": {"high": 5, "low": 6},
            "running": {"gpu-a": 3},
            "per_gpu": 64,
        },
    }
    daemon.answer("GET /slo", scores)
    assert json.loads(shown(capsys, "slo", "--json")[0]) == scores
    out, _ = shown(capsys, "slo")
    table = rows(out)
    assert table[1] == ["chat", "others", "ttft_p95 within 500ms", "98.70%", "40%", "1.5x", "-"]
    assert table[2] == ["low", "latency_p95 within 500ms", "too few: 3", "-", "-", "-"]
    assert "gpu-a: chat breaks its promise" in out
    assert "high 30s, low 500ms" in out
    assert "at once on a GPU: 64 (now gpu-a 3)" in out
    only, _ = shown(capsys, "slo", "code")
    assert only.startswith("Nothing was promised")


def test_the_log_of_several_replicas_is_divided_and_one_can_be_followed(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET /status", status(instance("chat", id="chat-0-a"), instance("chat", id="chat-1-b", replica=1)))
    daemon.answers["GET /instances/chat-0-a/log"] = Answer(b"first\n")
    daemon.answers["GET /instances/chat-1-b/log"] = Answer(b"")
    out, err = shown(capsys, "logs", "chat")
    assert out == "==> chat-0-a\nfirst\n==> chat-1-b\n"
    assert err == "chat-1-b printed nothing.\n"
    assert run_command(["logs", "chat", "-f"]) == InvalidInput.exit_status
    assert "chat-0-a, chat-1-b" in capsys.readouterr().err
    out, _ = shown(capsys, "logs", "chat-0-a", "-f", "--json")
    assert json.loads(out) == {"instance": "chat-0-a", "line": "first"}


def test_a_model_that_does_not_run_has_the_log_of_its_last_failed_start(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    log = home.failed_log("chat")
    log.parent.mkdir(parents=True)
    log.write_bytes(b"one\ntwo \xff\nthree\n")
    out, err = shown(capsys, "logs", "chat", "-n", "2")
    assert out == "two �\nthree\n"
    assert str(log) in err
    out, _ = shown(capsys, "logs", "chat", "-n", "1", "--json")
    assert json.loads(out) == {"instance": "chat", "line": "three"}
    assert shown(capsys, "logs", "chat", "-n", "0")[0] == ""
    with canned_daemon(home) as daemon:
        daemon.answer("GET /status", status(instance("code")))
        assert shown(capsys, "logs", "chat", "-n", "1")[0] == "three\n"
        assert run_command(["logs", "cod"]) == UnknownDeployment.exit_status
        assert "Did you mean `aimgpu logs code`?" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_up_shows_why_a_start_failed_that_the_status_no_longer_lists(
    daemon: CannedDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    (tmp_path / "stack.yaml").write_text("models: {chat: {model: org/m}}")
    daemon.answer("GET /status", status(instance("other")))
    failed = instance("chat", "failed", reason="it was released meanwhile", last_lines=["loading", "the last line"])
    daemon.stream(
        "POST /apply",
        {"event": "plan", "steps": [], "unchanged": []},
        {"event": "state", "deployment": "chat", "instance": failed["id"], **failed},
        {"event": "done"},
    )
    options = ["--json"] if as_json else []
    code = run_command(["up", "--attach", "--file", str(tmp_path / "stack.yaml"), *options])
    assert code == EngineFailed.exit_status
    err = capsys.readouterr().err
    assert "chat failed: it was released meanwhile" in err
    assert "the last line" in err


def test_run_beside_other_models_names_the_one_to_stop(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET /status", status(instance("other"), deployments=[{"name": "other"}]))
    ready = {"event": "state", "deployment": "smollm2", "state": "ready"}
    daemon.stream("POST /apply", {"event": "plan", "steps": []}, ready, {"event": "done"})
    chunk = {"choices": [{"delta": {"content": "Hi."}}]}
    daemon.answers["POST /v1/chat/completions"] = Answer(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    out, err = shown(capsys, "run", "smollm2", "Say hi")
    assert out == "Hi.\n"
    assert err.endswith("Stop it with: aimgpu down smollm2\n")
