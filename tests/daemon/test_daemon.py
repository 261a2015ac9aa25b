import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import PATIENCE_SECONDS, ROOT, TestDaemon, apply, stack, wait_for, wait_until_settled
from tools.json_answers import STATUS, check_shape

from aimgpu.errors import AimGpuError, NotAllowed, UnknownDeployment
from aimgpu.keyfile import KeyStore
from aimgpu.procfs import read_start_ticks


@pytest.fixture
def make(tmp_path: Path) -> Iterator[list[TestDaemon]]:
    daemons: list[TestDaemon] = []
    yield daemons
    for daemon in daemons:
        daemon.stop()


BAD_ENGINES = {
    "never-listens": ("--silent",),
    "never-ready": ("--never-ready",),
    "dies": ("--die-at-start", "3", "--say", "error: out of memory"),
    "ignores-sigterm": ("--ignore-sigterm", "--never-ready"),
    "garbage": ("--garbage", "--die-at-start", "1"),
    "nonsense": ("--talk-nonsense",),
    "mute": ("--mute",),
}


def test_every_bad_engine_ends_failed_with_its_last_lines_and_frees_its_grant(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", engines=BAD_ENGINES, load_timeout_seconds=25.0, grace_seconds=0.5)
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(good={}, **{name: {} for name in BAD_ENGINES}))
    status = client.read_status()
    check_shape(status, STATUS)  # as the reference lists it
    instances = {instance["name"]: instance for instance in status["instances"]}
    assert {name for name, found in instances.items() if found["state"] == "failed"} == set(BAD_ENGINES)
    assert instances["good"]["state"] == "ready"
    assert all(instances[name]["reason"] for name in BAD_ENGINES)
    assert any("out of memory" in line for line in instances["dies"]["last_lines"])
    assert all(text.isprintable() for text in instances["garbage"]["last_lines"])
    assert set(daemon.launcher.find_started()) == {instances["good"]["id"]}
    _, grants = daemon.books()
    assert [grant.deployment for grant in grants] == ["good"]


def test_an_engine_that_dies_in_use_is_started_again(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", restart_delay_seconds=0.1)
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    (before,) = wait_until_settled(client)
    daemon.launcher.stop(daemon.launcher.find_started()[before["id"]], grace_seconds=0)

    def look() -> str | None:
        found = [i["id"] for i in client.read_status()["instances"] if i["state"] == "ready" and i["id"] != before["id"]]
        return found[0] if found else None

    after = wait_for(look, "another instance is ready")
    assert set(daemon.launcher.find_started()) == {after}
    assert [grant.instance_id for grant in daemon.books()[1]] == [after]


@pytest.mark.parametrize(
    ("number", "silence_seconds", "reason"),
    [
        pytest.param(signal.SIGUSR1, 4.0, "runs, and has not answered for", id="mute"),
        pytest.param(signal.SIGSTOP, 3600.0, "was stopped by a signal", id="stopped"),  # no need to wait for silence
    ],
)
def test_an_engine_that_hangs_in_use_is_started_again(
    tmp_path: Path, make: list[TestDaemon], number: signal.Signals, silence_seconds: float, reason: str
) -> None:
    home = tmp_path / "home"
    daemon = TestDaemon(home, restart_delay_seconds=0.1, ask_seconds=0.1, silence_seconds=silence_seconds, grace_seconds=0.5)
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    (before,) = wait_until_settled(client)
    hung = daemon.launcher.find_started()[before["id"]]
    os.kill(hung.pid, number)

    def look() -> str | None:
        found = [i["id"] for i in client.read_status()["instances"] if i["state"] == "ready" and i["id"] != before["id"]]
        return found[0] if found else None

    after = wait_for(look, "another instance is ready")
    assert set(daemon.launcher.find_started()) == {after}
    assert not daemon.launcher.is_running(hung)
    assert reason in daemon.log.read_text()
    _, grants = daemon.books()
    assert [grant.instance_id for grant in grants] == [after]


def test_models_answer_again_once_the_devices_can_be_read_again(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    client = daemon.start()
    state = daemon.home.path / "simulated-gpus.json"

    def noticed() -> bool:
        state.write_text("{")  # again and again: the daemon may just have been writing it itself
        return "routes.failed" in daemon.log.read_text()

    wait_for(noticed, "the daemon notices")
    state.unlink()
    apply(client, stack(chat={}))
    record = daemon.home.read_daemon()
    assert record is not None

    def look() -> bool:
        with urllib.request.urlopen(f"{record.url}/v1/models") as answer:
            return [one["state"] for one in json.load(answer)["data"]] == ["ready"]

    wait_for(look, "the model is listed as ready")


def test_engines_outlive_the_daemon_and_answer_again_after_its_restart(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    before = daemon.launcher.find_started()
    daemon.kill()
    assert daemon.launcher.find_started() == before
    client = daemon.start()
    wait_until_settled(client)
    assert daemon.launcher.find_started() == before
    assert ask_chat(client.read_status()["models_url"])["choices"]


def test_a_stream_goes_on_while_another_daemon_takes_over(tmp_path: Path, make: list[TestDaemon]) -> None:
    seen = tmp_path / "seen"
    slow = ("--token-seconds", "0.4", "--tokens", "1000", "--slow-until", str(seen))
    daemon = TestDaemon(tmp_path / "home", engines={"chat": slow})
    daemon.set(AIMGPU_TEST_PATIENCE="600")  # the next one may take more than the usual 30 s to start
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={"concurrency": 2}))
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1000}
    url = f"{client.read_status()['models_url']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as stream:
        first = stream.readline()
        old = daemon.process
        assert old is not None
        old.terminate()
        wait_for(lambda: daemon.home.read_daemon() is None, "the old daemon let go")
        client = daemon.start()
        (adopted,) = wait_until_settled(client)
        assert adopted["state"] == "ready"
        assert old.poll() is None, "it still serves the stream"
        seen.touch()
        rest = stream.read()
    tokens = [line for line in (first + rest).splitlines() if line.startswith(b"data: {")]
    assert len(tokens) >= 1000
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert old.wait(300) == 0
    assert daemon.home.read_daemon() is not None, "the record is that of the new one"


def test_a_daemon_that_is_told_to_end_leaves_what_it_was_starting_to_the_next(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", engines={"slow": ("--load-seconds", "6")})
    make.append(daemon)
    client = daemon.start()
    applying = threading.Thread(target=ignore_errors, args=(lambda: apply(client, stack(slow={})),))
    applying.start()
    wait_for(daemon.launcher.find_started, "the engine runs")
    before = daemon.launcher.find_started()
    old = daemon.process
    assert old is not None
    old.terminate()
    assert old.wait(300) == 0
    applying.join()
    client = daemon.start()
    (ready,) = wait_until_settled(client)
    assert ready["state"] == "ready"
    assert daemon.launcher.find_started() == before, "it was adopted, not started again"


def ignore_errors(work: Callable[[], object]) -> None:
    with contextlib.suppress(AimGpuError):
        work()


def test_a_corrupt_ledger_is_told_kept_and_written_anew_from_what_runs(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    apply(daemon.start(), stack(chat={}, code={}))
    before = daemon.books()
    daemon.kill()
    ledger = daemon.home.path / "ledger.sqlite3"
    ledger.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    ledger.with_name("ledger.sqlite3-wal").unlink(missing_ok=True)  # it may hold every page that was written
    client = daemon.start()
    wait_until_settled(client)
    (note,) = client.read_status()["notes"]
    assert "corrupt" in note
    assert ledger.with_name("ledger.sqlite3.corrupt-1").exists()
    record = daemon.home.read_daemon()
    assert record is not None
    with urllib.request.urlopen(f"{record.url}/api/v1/state") as state:
        assert json.load(state)["page"]["notes"] == [note]
    after = daemon.books()
    assert after[1] == before[1]
    assert {i.id for i in after[0]} == {i.id for i in before[0]} == set(daemon.launcher.find_started())


def test_a_second_daemon_on_the_same_home_is_refused_with_the_pid_of_the_first(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    daemon.start()
    assert daemon.process is not None
    command = [sys.executable, "-m", "tests.programs.daemon", "--home", str(daemon.home.path), "--port", "0"]
    second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert second.returncode == 6
    assert f"pid {daemon.process.pid}" in second.stderr
    assert daemon.home.read_daemon() is not None, "the first one's record is still there"


def test_a_daemon_that_ends_leaves_the_record_of_another(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    daemon.start()
    record = daemon.home.read_daemon()
    assert record is not None
    another = replace(record, pid=os.getpid(), start_ticks=read_start_ticks(os.getpid()) or 0)
    daemon.home.write_daemon(another)
    assert daemon.process is not None
    daemon.process.terminate()
    daemon.process.wait(PATIENCE_SECONDS)
    assert daemon.home.read_daemon() == another


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    daemon.start()
    record = daemon.home.read_daemon()
    assert record is not None
    command = [sys.executable, "-m", "tests.programs.daemon", "--home", str(tmp_path / "other"), "--port", str(record.port)]
    second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert second.returncode == 6
    assert "cannot listen" in second.stderr
    assert "--port" in second.stderr


def test_another_address_than_loopback_needs_a_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.programs.daemon", "--home", str(tmp_path), "--port", "0", "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == NotAllowed.exit_status
    assert "keys add" in refused.stderr


def test_the_control_api_needs_the_token_and_refuses_nonsense(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    client = daemon.start()
    assert daemon.home.token_file.stat().st_mode & 0o077 == 0
    url = client.read_status()["page_url"] + "api/v1/"
    token = daemon.home.read_token() or ""
    assert call(url + "status", token="wrong")[0] == 403
    for path, body in [
        ("apply", b"[]"),
        ("apply", b"{"),
        ("apply", b'{"stack": 1}'),
        ("apply", b'{"stack": "models: [oops]"}'),
        ("apply", rb'{"stack": "models: {a: {model: \"./a\\0.gguf\"}}", "base_directory": "/"}'),
        ("release", b'{"names": "x"}'),
        ("partition", b'{"device": 1}'),
        ("partition?dry_run=1", b'{"device": "0", "layout": "XPX"}'),
    ]:
        status, answer = call(url + path, body, token=token)
        assert status == 400, (path, body, answer)
        assert answer["error"]["code"]
    events = list(client.apply("models: {a: {model: 1gib}}", "/", dry_run=True, launcher="podman"))
    assert events[-1]["event"] == "error"
    assert "no launcher 'podman' here" in events[-1]["message"]
    events = list(client.apply("models: {a: {model: ./a.gguf}}", "/" + "a/" * 3000))
    assert (events[-1]["event"], events[-1]["code"]) == ("error", "invalid_model_file")
    with pytest.raises(UnknownDeployment):
        client.release(["nothing"])
    with pytest.raises(UnknownDeployment):
        list(client.read_log("nothing", follow=False, lines=5))


def test_the_page_and_the_answers_say_that_the_gpu_is_simulated(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    status = client.read_status()
    assert status["simulated"] is True
    with urllib.request.urlopen(status["page_url"]) as page:
        text = page.read().decode()
        assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "/page/app.js" in text

    def look() -> dict[str, Any] | None:  # the page may be a moment behind
        with urllib.request.urlopen(status["page_url"] + "api/v1/state") as state:
            found: dict[str, Any] = json.load(state)
        return found if found["models"] and found["gpus"] else None

    shown = wait_for(look, "the page shows the model")
    assert shown["page"]["simulated"] == ["MI300X"]
    assert all(gpu["simulated"] for gpu in shown["gpus"])
    assert [model["name"] for model in shown["models"]] == ["chat"]
    with urllib.request.urlopen(status["models_url"] + "/models") as models:
        assert models.headers["x-aimgpu-simulated"] == "true"
        assert [model["id"] for model in json.load(models)["data"]] == ["chat"]


def test_a_name_that_is_not_this_machines_is_refused_so_that_no_web_page_gets_in(
    tmp_path: Path, make: list[TestDaemon]
) -> None:
    make.append(TestDaemon(tmp_path / "home"))
    make[0].start()
    record = make[0].home.read_daemon()
    assert record is not None

    def status(path: str, host: str) -> int:
        request = urllib.request.Request(f"{record.url}{path}", headers={"Host": host})
        try:
            with urllib.request.urlopen(request) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for path in ("/", "/metrics", "/v1/models"):
        assert {status(path, host) for host in ("127.0.0.1:1", "localhost", "[::1]:80", "me.localhost:8080")} == {200}
        assert {status(path, host) for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example")} == {403}


def test_the_page_and_the_metrics_are_for_reading_only(tmp_path: Path, make: list[TestDaemon]) -> None:
    make.append(TestDaemon(tmp_path / "home"))
    make[0].start()
    record = make[0].home.read_daemon()
    assert record is not None
    for path in ("/", "/metrics"):
        with urllib.request.urlopen(urllib.request.Request(record.url + path, method="HEAD")) as answer:
            assert (answer.status, answer.read()) == (200, b"")
        for method in ("POST", "TRACE", "DELETE"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(record.url + path, method=method))
            assert (refused.value.code, refused.value.headers["allow"]) == (405, "GET, HEAD")
            refused.value.close()


def test_the_first_key_is_required_soon_after_it_is_made(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    daemon.start()
    record = daemon.home.read_daemon()
    assert record is not None

    def status(headers: dict[str, str]) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{record.url}/v1/models", headers=headers)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    assert status({}) == 200
    key = KeyStore(daemon.home.keys_file).add("alice")
    wait_for(lambda: status({}) == 401, "a key is required")
    assert status({"Authorization": f"Bearer {key}"}) == 200
    said = _aimgpu(daemon, "keys", "remove", "alice").stdout
    wait_for(lambda: status({"Authorization": f"Bearer {key}"}) == 401, "the removed key is refused")
    assert status({}) == 401  # removing the last key opens no door
    way_in = next(line for line in re.findall(r"`aimgpu ([^`]*)`", said) if line.startswith("keys"))
    made = json.loads(_aimgpu(daemon, *way_in.replace("NAME", "bob").split(), "--json").stdout)
    wait_for(lambda: status({"Authorization": f"Bearer {made['key']}"}) == 200, "the way in that was named works")


def _aimgpu(daemon: TestDaemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aimgpu.cli.main", *arguments]
    environment = os.environ | {"AIMGPU_HOME": str(daemon.home.path)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def test_a_layout_change_through_the_api_moves_what_runs(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home")
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    url = client.read_status()["page_url"] + "api/v1/partition"
    token = daemon.home.read_token() or ""
    body = b'{"device": "0", "layout": "CPX"}'
    status, plan = call(url + "?dry_run=1", body, token=token)
    assert (status, plan["after"], len(plan["stops"])) == (200, "CPX/NPS1", 1)
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        events = [json.loads(line) for line in answer]
    assert events[-1]["event"] == "done"
    (instance,) = wait_until_settled(client)
    assert instance["state"] == "ready"
    assert instance["partition"].startswith("cpx-")


def test_following_a_log_ends_when_the_model_is_released(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", engines={"chat": ("--say", "hello from the engine")})
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={}))
    (instance,) = wait_until_settled(client)
    lines = client.read_log(instance["id"], follow=True, lines=10)
    assert "hello from the engine" in next(lines)
    client.release(["chat"])
    list(lines)


def ask_chat(url: str, model: str = "chat") -> dict[str, object]:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def call(url: str, body: bytes | None = None, *, token: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_an_idle_model_is_unloaded_and_a_request_wakes_it_and_waits(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", least_residency_seconds=0.1)
    make.append(daemon)
    client = daemon.start()
    apply(client, stack(chat={"keep": "1s"}))

    def asleep() -> bool:
        return [instance["state"] for instance in client.read_status()["instances"]] == ["sleeping"]

    wait_for(asleep, "the idle model is asleep")
    assert daemon.launcher.find_started() == {}
    assert daemon.books()[1] == ()
    assert ask_chat(client.read_status()["models_url"])["choices"], "held and answered, no 5xx"
    wait_for(asleep, "it falls asleep again")


def test_models_that_do_not_fit_together_take_turns(tmp_path: Path, make: list[TestDaemon]) -> None:
    daemon = TestDaemon(tmp_path / "home", least_residency_seconds=0.0)
    make.append(daemon)
    client = daemon.start()
    large = {"gpu": {"memory": "150GiB"}, "keep": "10m"}
    apply(client, stack(chat=large, code=large))
    url = client.read_status()["models_url"]
    for name in ("chat", "code", "chat"):
        assert ask_chat(url, name)["choices"]
        states = {instance["name"]: instance["state"] for instance in client.read_status()["instances"]}
        assert states[name] == "ready"
        assert sorted(states.values()) == ["ready", "sleeping"]
