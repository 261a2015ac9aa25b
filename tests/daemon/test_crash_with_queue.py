"""A daemon that crashed comes back with its own stack: what ran is adopted, what was queued stays queued."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for, wait_until_settled

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.main import cli
from aimgpu.errors import DaemonUnreachable, PlacementRefused
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home

STACK = stack(large={"gpu": {"memory": "100GiB"}}, small={"gpu": {"memory": "4GiB"}})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(tmp_path / "home", grace_seconds=1.0, drain_seconds=0.1)
    yield daemon
    daemon.stop()


def shown(client: DaemonClient) -> dict[str, str]:
    status = client.read_status()
    running = {item["name"]: item["state"] for item in status["instances"]}
    return {item["name"]: "queued" for item in status.get("waiting", ())} | running


def test_the_same_stack_after_a_kill_is_no_refusal(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, STACK)
    wait_until_settled(client)
    list(client.partition("sim-mi300x-0", "CPX/NPS1", reload_driver=False))
    expected = {"large": "queued", "small": "ready"}
    wait_for(lambda: shown(client) == expected, "the large model waits")
    before = daemon.launcher.find_started()
    daemon.kill()
    client = daemon.start()
    wait_for(lambda: shown(client) == expected, "the same after the crash")
    assert daemon.launcher.find_started() == before
    events = apply(client, STACK)
    plan = next(event for event in events if event["event"] == "plan")
    assert plan["refusals"] == []
    assert not [event for event in events if event["event"] in {"refused", "error"}]
    assert shown(client) == expected
    assert daemon.launcher.find_started() == before


def test_room_is_made_among_its_own_models_after_a_kill(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, STACK)
    wait_until_settled(client)
    list(client.partition("sim-mi300x-0", "CPX/NPS1", reload_driver=False))
    wait_for(lambda: shown(client).get("large") == "queued", "the large model waits")
    daemon.kill()
    client = daemon.start()
    wait_for(lambda: shown(client) == {"large": "queued", "small": "ready"}, "the same after the crash")
    events = list(client.apply(STACK, "/", make_room=True))
    assert not [event for event in events if event["event"] in {"refused", "error"}], events
    wait_for(lambda: shown(client) == {"large": "ready", "small": "ready"}, "both run on the whole GPU")


def test_without_a_daemon_commands_name_what_still_runs(daemon: TestDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(daemon.home.path))
    client = daemon.start()
    apply(client, stack(chat={"gpu": {"memory": "4GiB"}}))
    wait_until_settled(client)
    daemon.kill()
    for command in ("ps", "slo", "top", "logs chat", "down chat", "resize chat --memory 5GiB"):
        with pytest.raises(DaemonUnreachable, match=r"these models still do: chat-0-\w+") as caught:
            cli.main(command.split(), standalone_mode=False)
        assert "aimgpu down" in (caught.value.hint or "")
    with pytest.raises(DaemonUnreachable, match=r"these models still do: chat-0-\w+") as caught:
        cli.main(["up", "smollm2", "--dry-run"], standalone_mode=False)  # a plan that leaves them out would not be true
    assert "aimgpu plan" in (caught.value.hint or "")


def test_a_dry_run_without_a_daemon_plans_on_the_layout_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.create()
    SimulatedHardware([("MI300X", 1)], home.simulated_file).apply_layout("sim-mi300x-0", "CPX/NPS1")
    file = tmp_path / "stack.yaml"
    model = "{model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, gpu: {memory: 100GiB}}"
    file.write_text(f"gpus: {{simulated: MI300X}}\nmodels:\n  large: {model}\n")
    monkeypatch.setenv("AIMGPU_HOME", str(home.path))
    with pytest.raises(PlacementRefused, match=r"a cpx partition has 23\.9GiB"):
        cli.main(["up", "-f", str(file), "--dry-run", "--api-key", "not-kept"], standalone_mode=False)
    assert not home.keys_file.exists()
