"""`ps`, `slo`, `resize` and `logs`: what the table shows is what `--json` has, for every state that a model can be in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.canned import Answer, CannedDaemon, canned_daemon

from aimgpu.cli.main import run_command
from aimgpu.domain import InstanceState
from aimgpu.errors import InvalidInput, UnknownDeployment
from aimgpu.home import Home
from aimgpu.units import GIB, format_bytes

GPU = {"id": "gpu-a", "index": 0, "product": "MI300X", "simulated": False}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


@pytest.fixture
def daemon(home: Home) -> Iterator[CannedDaemon]:
    with canned_daemon(home) as found:
        yield found


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
    out, err = shown(capsys, "ps")
    header, row = rows(out)[:2]
    cells = dict(zip(header, row, strict=True))
    assert (cells["NAME"], cells["MODEL"], cells["ENGINE"], cells["STATE"]) == ("chat", "model", "vllm", state.value)
    assert (cells["MEMORY"], cells["GPU/PARTITION"], cells["LEVEL"]) == ("17GiB", "MI300X/spx-0", "runtime")
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
        ({"device": "gone"}, "GPU/PARTITION", "gone"),
        ({"model": "/models/a.gguf"}, "MODEL", "a.gguf"),
        ({"endpoint": "http://other/v1"}, "ENDPOINT", "http://other/v1"),
    ],
)
def test_a_cell_shows_what_is_known(
    daemon: CannedDaemon, change: dict[str, Any], cell: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET /status", status(instance("chat", **change)))
    header, row = rows(shown(capsys, "ps")[0])[:2]
    assert dict(zip(header, row, strict=True))[cell] == text


def test_among_several_gpus_each_has_its_number(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [GPU, {**GPU, "id": "gpu-b", "index": 1, "simulated": True}]
    daemon.answer("GET /status", status(instance("a"), instance("b", device="gpu-b", partition="gpu-b/cpx-3"), gpus=gpus))
    out, _ = shown(capsys, "ps")
    assert "gpu0 MI300X/spx-0" in out
    assert "gpu1 sim MI300X/cpx-3" in out


def test_what_waits_for_room_is_listed_with_what_runs(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [{"name": "late", "model": "m", "reason": "no room"}]
    daemon.answer("GET /status", status(waiting=waiting, notes=["the disk is nearly full"]))
    out, err = shown(capsys, "ps")
    assert [cell for cell in rows(out)[1] if cell in {"late", "queued"}] == ["late", "queued"]
    assert "late waits for room: no room" in err
    assert "note: the disk is nearly full" in err


def test_nothing_that_runs_is_said_in_words(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET /status", status())
    assert shown(capsys, "ps")[0].startswith("No model runs.\n")


def test_only_models_that_let_others_work_are_said_to_share(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    sharing = {
        "alone": {"sharing": "strict", "share": 0.0},
        "fair": {"sharing": "fair", "share": 0.5},
        "kept": {"sharing": "promise", "share": 0.25, "promise": "ttft_p95 500ms", "promise_used": 0.4},
    }
    daemon.answer("GET /status", status(instance("alone"), sharing=sharing))
    out, _ = shown(capsys, "ps")
    assert "alone shares" not in out
    assert "fair shares by fair: others may use 50% while it works\n" in out
    assert "kept shares by promise: others may use 25% while it works, 40% of ttft_p95 500ms used\n" in out


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
    assert table[2] == ["low", "latency_p95 within 500ms", "-", "-", "-", "-"]
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
        assert "Did you mean 'code'?" in capsys.readouterr().err
