"""Commands and a daemon whose answers are errors, cut short, of another program, or not what they should be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.canned import TOKEN, Answer, CannedDaemon, canned_daemon

from aimgpu.cli.client import DaemonClient, connect, error_from_json
from aimgpu.cli.main import run_command
from aimgpu.errors import AimGpuError, DaemonUnreachable, NotAllowed, UnknownDeployment, all_errors
from aimgpu.home import Home

CALLS: dict[str, tuple[str, Callable[[DaemonClient], object]]] = {
    "status": ("GET /status", lambda it: it.read_status()),
    "slo": ("GET /slo", lambda it: it.read_scores()),
    "state": ("GET /state", lambda it: it.read_state()),
    "snapshot": ("GET /snapshot", lambda it: it.read_snapshot()),
    "plan a partition": ("POST /partition", lambda it: it.plan_partition("0", "CPX")),
    "resize": ("POST /resize", lambda it: it.resize("chat", 5, dry_run=False)),
    "release": ("POST /release", lambda it: it.release(["chat"])),
    "stop": ("POST /stop", lambda it: it.stop()),
}
STREAMS: dict[str, tuple[str, Callable[[DaemonClient], object]]] = {
    "apply": ("POST /apply", lambda it: list(it.apply("models: {}", "/"))),
    "partition": ("POST /partition", lambda it: list(it.partition("0", "CPX", reload_driver=False))),
}
EVERY = CALLS | STREAMS


@pytest.mark.parametrize("name", EVERY)
def test_every_call_sends_the_token_of_its_home(daemon: CannedDaemon, home: Home, name: str) -> None:
    route, call = EVERY[name]
    daemon.stream(route, {"event": "done"})
    call(connect(home))
    (asked,) = daemon.asked
    assert asked.token == TOKEN
    assert f"{asked.method} {asked.path}" == route


@pytest.mark.parametrize("name", EVERY)
def test_an_answer_of_another_program_is_an_error_that_says_so(daemon: CannedDaemon, home: Home, name: str) -> None:
    route, call = EVERY[name]
    for answer, words in (
        (Answer(b"<html>It works!</html>"), "not JSON"),
        (Answer(b"[1, 2]"), "not a JSON object"),
        (Answer(b"5"), "not a JSON object"),
        (Answer(b"<html>no</html>", 404), "answered 404"),
        (Answer(b"", 500), "answered 500"),
        (Answer(b"{}", 502), "answered 502"),
        (Answer(b'{"error": "busy"}', 503), "answered 503"),
        (Answer(b'{"error": null}', 503), "answered 503"),
        (Answer(b"\xff\xfe", 500), "answered 500"),
    ):
        daemon.answers[route] = answer
        with pytest.raises(AimGpuError, match=words):
            call(connect(home))


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_is_cut_short_is_a_daemon_that_does_not_answer(daemon: CannedDaemon, home: Home, name: str) -> None:
    route, call = CALLS[name]
    daemon.answers[route] = Answer(b'{"a": 1', cut=True)
    with pytest.raises(DaemonUnreachable, match="does not answer"):
        call(connect(home))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("events", [[], [{"event": "step", "text": "half"}], [{"event": "plan", "steps": []}, {"text": "x"}]])
def test_a_stream_that_ends_before_it_is_done_is_no_success(
    daemon: CannedDaemon, home: Home, name: str, events: list[object]
) -> None:
    route, call = STREAMS[name]
    for cut in (False, True):
        daemon.stream(route, *events, cut=cut)
        with pytest.raises(DaemonUnreachable):
            call(connect(home))


@pytest.mark.parametrize("last", ["done", "error", "refused"])
def test_a_stream_with_its_last_event_is_whole(daemon: CannedDaemon, home: Home, last: str) -> None:
    daemon.stream("POST /apply", {"event": "step"}, {"event": last})
    assert [event["event"] for event in connect(home).apply("models: {}", "/")] == ["step", last]


@pytest.mark.parametrize("error", list(all_errors()), ids=lambda error: error.code)
def test_every_error_of_the_daemon_arrives_as_itself_with_its_exit_status(
    daemon: CannedDaemon, home: Home, error: type[AimGpuError], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.error("GET /status", error.code, "as told", status=error.http_status, hint="do this")
    assert run_command(["ps"]) == error.exit_status
    assert capsys.readouterr().err == "error: as told\nhint: do this\n"
    assert run_command(["ps", "--json"]) == error.exit_status
    found = capsys.readouterr()
    assert found.out == ""
    assert json.loads(found.err) == {"error": {"code": error.code, "message": "as told", "hint": "do this"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [({}, "unknown error"), ({"code": 5, "text": "t"}, "t"), ({"message": "", "text": "t"}, "t"), ({"message": 7}, "7")],
)
def test_an_error_with_less_than_it_should_have_is_one_all_the_same(body: dict[str, object], message: str) -> None:
    found = error_from_json(body)
    assert type(found) is AimGpuError
    assert found.message == message


def test_the_flags_of_an_apply_are_sent(daemon: CannedDaemon, home: Home) -> None:
    daemon.stream("POST /apply", {"event": "done"})
    list(connect(home).apply("models: {}", "/here", dry_run=True, prune=True, launcher="docker"))
    (asked,) = daemon.asked
    assert asked.body == {"stack": "models: {}", "base_directory": "/here"}
    assert sorted(asked.query.split("&")) == ["dry_run=1", "launcher=docker", "make_room=0", "prune=1"]


def test_a_log_is_read_line_by_line_whatever_is_in_it(daemon: CannedDaemon, home: Home) -> None:
    daemon.answers["GET /instances/a-0/log"] = Answer(b"one\n\n\xff\xfe\nno end")
    assert list(connect(home).read_log("a-0", follow=False, lines=7)) == ["one", "", "��", "no end"]
    assert daemon.asked[0].query == "follow=0&lines=7"


def test_without_a_token_file_the_daemon_decides(daemon: CannedDaemon, home: Home) -> None:
    home.token_file.unlink()
    daemon.error("GET /status", "not_allowed", "no token", status=403)
    with pytest.raises(NotAllowed):
        connect(home).read_status()
    assert daemon.asked[0].token is None


def test_a_daemon_that_went_away_between_two_calls_is_unreachable(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_daemon(home):
        pass  # its record stays, and its process runs: nothing listens
    assert run_command(["ps"]) == DaemonUnreachable.exit_status
    assert "aimgpu up" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["down", "nope"], ["resize", "nope", "--memory", "1GiB"]], ids=lambda arguments: arguments[0]
)
def test_a_name_that_the_daemon_does_not_know_keeps_its_hint(
    daemon: CannedDaemon, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for route in ("POST /release", "POST /resize"):
        daemon.error(route, "unknown_deployment", "no deployment nope", status=404, hint="Running: chat.")
    assert run_command(arguments) == UnknownDeployment.exit_status
    assert capsys.readouterr().err == "error: no deployment nope\nhint: Running: chat.\n"


def test_a_program_is_not_run_without_its_grant(daemon: CannedDaemon, home: Home, tmp_path: Path) -> None:
    assert home.path
    daemon.stream("POST /exec", {"event": "granted", "deployment": "a", "instance": "a-0", "environment": {}})
    assert run_command(["exec", "--memory", "1GiB", "--", "touch", str(tmp_path / "ran")]) != 0
    assert not (tmp_path / "ran").exists()
