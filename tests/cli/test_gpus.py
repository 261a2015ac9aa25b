"""`aimgpu gpus` and `aimgpu partition`, on simulated GPUs: without a daemon, and with one that serves models."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled

from aimgpu.cli.main import cli
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import AimGpuError, Conflict, DriverReloadNeeded, LedgerOwned, PartitionBusy, UnknownDevice, UnknownLayout
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home
from aimgpu.ledger import Owner

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def daemon(home: Home) -> Iterator[TestDaemon]:
    found = TestDaemon(home.path)
    yield found
    found.stop()


def aimgpu(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    if isinstance(result.exception, AimGpuError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def read(*arguments: str) -> Any:
    return json.loads(aimgpu(*arguments, "--json").stdout)


def put_strangers(home: Home, *strangers: dict[str, Any]) -> None:
    home.create()
    (home.path / "simulated-gpus.json").write_text(json.dumps({"foreign": list(strangers)}))


def test_a_simulated_gpu_is_shown_as_one_first() -> None:
    lines = aimgpu("gpus").stdout.splitlines()
    assert lines[0].startswith("SIMULATED GPU (1 x MI300X)")
    assert "SPX/NPS1" in lines[2]
    shown = read("gpus")
    assert shown["simulated"] is True
    assert shown["daemon"] is False
    (gpu,) = shown["gpus"]
    assert gpu["partitions"][0]["free_bytes"] == gpu["memory_bytes"] == 206141652992
    assert gpu["partitions"][0]["granted_bytes"] is None


def test_a_part_that_is_not_here_can_be_looked_at() -> None:
    (gpu,) = read("gpus", "--simulated", "amd instinct mi355x")["gpus"]
    assert gpu["product"] == "MI355X"
    names = [layout["name"] for layout in read("partition", "list", "--simulated", "MI300A")["gpus"][0]["layouts"]]
    assert names == ["SPX/NPS1", "TPX/NPS1", "CPX/NPS1"]


def test_layouts_that_differ_only_in_where_they_begin_are_shown_once() -> None:
    short = aimgpu("partition", "list", "--simulated", "H200-141").stdout
    long = aimgpu("partition", "list", "--simulated", "H200-141", "--all").stdout
    assert "--all" in short
    assert len(long.splitlines()) > len(short.splitlines())
    assert "132 SM" in short


def test_a_layout_is_applied_read_back_and_reset() -> None:
    assert "CPX/NPS1" in aimgpu("partition", "plan", "0", "cpx").stdout
    assert read("partition", "apply", "0", "cpx", "--dry-run")["after"] == "CPX/NPS1"
    assert read("gpus")["gpus"][0]["layout"] == "SPX/NPS1"
    assert read("partition", "apply", "gpu0", "cpx")["after"] == "CPX/NPS1"
    assert len(read("gpus")["gpus"][0]["partitions"]) == 8
    assert "SPX/NPS1, as read back" in aimgpu("partition", "reset", "sim-mi300x-0").stdout
    assert "Nothing to do" in aimgpu("partition", "plan", "0", "SPX").stdout


def test_a_mig_layout_need_not_be_full(home: Home) -> None:
    machine = SimulatedHardware([("H200-141", 1)])
    (device,) = machine.read_devices()
    for wanted, name in (("3g.71gb@4", "3g.71gb@4"), ("1g.18gb@6+3g.71gb@0", "3g.71gb@0+1g.18gb@6")):
        layout = find_layout(device, wanted)
        assert layout.name == name
        assert machine.apply_layout(device.id, wanted).layout.partitions == layout.partitions
    for wrong in ("3g.71gb@1", "3g.71gb@4+3g.71gb@4", "4g.71gb@0+2g.35gb@2", "@"):
        with pytest.raises(UnknownLayout):
            find_layout(device, wrong)


def test_a_memory_mode_says_that_it_needs_a_reload() -> None:
    assert "--reload-driver" in aimgpu("partition", "plan", "0", "CPX/NPS4").stdout
    with pytest.raises(DriverReloadNeeded):
        aimgpu("partition", "apply", "0", "CPX/NPS4")
    assert read("partition", "apply", "0", "CPX/NPS4", "--reload-driver")["after"] == "CPX/NPS4"


def test_strangers_are_counted_and_named(home: Home) -> None:
    put_strangers(home, {"device": "sim-mi300x-0", "pid": 4242, "name": "train", "memory_bytes": 1 << 30, "partition": None})
    (gpu,) = read("gpus")["gpus"]
    assert gpu["partitions"][0]["foreign_bytes"] == 1 << 30
    assert gpu["partitions"][0]["free_bytes"] == gpu["memory_bytes"] - (1 << 30)
    assert "foreign" in aimgpu("gpus").stdout
    assert "pid 4242 (train)" in aimgpu("partition", "plan", "0", "CPX").stdout
    with pytest.raises(PartitionBusy, match="4242"):
        aimgpu("partition", "apply", "0", "CPX")


def test_watching_shows_a_change_and_ends_with_ctrl_c(home: Home) -> None:
    program = "from aimgpu.cli.main import main; main()"
    command = [sys.executable, "-c", program, "gpus", "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["gpus"][0]["layout"] == "SPX/NPS1"
        aimgpu("partition", "apply", "0", "CPX")
        assert json.loads(process.stdout.readline())["gpus"][0]["layout"] == "CPX/NPS1"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_watching_outlives_what_cannot_be_read_for_a_while(home: Home) -> None:
    program = "from aimgpu.cli.main import main; main()"
    command = [sys.executable, "-c", program, "gpus", "--watch", "--json", "--interval", "0.1"]
    state = home.path / "simulated-gpus.json"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["gpus"]
        home.create()
        (home.path / "broken").write_text("{")
        (home.path / "broken").replace(state)  # an empty file in between would be another error
        assert "error" in json.loads(process.stdout.readline())
        state.unlink()
        assert json.loads(process.stdout.readline())["gpus"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_a_narrow_terminal_shows_every_column_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.cli.views.gpus.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = aimgpu("gpus", "--simulated", "MI300X").stdout.splitlines()
    assert shown[1].startswith("gpu0  MI300X (sim)  SPX/NPS1  level: ")
    assert shown[2].split() == ["PARTITION", "UNITS", "MEMORY", "GRANTED", "MEASURED", "FOREIGN", "FREE"]
    assert max(map(len, shown[:4])) <= 80


def test_a_plan_tells_the_partitions_that_go_and_come() -> None:
    planned = read("partition", "plan", "0", "QPX", "--simulated", "MI300X")
    assert planned["partitions_before"]["what"] == "1 x 191.9GiB 304 CU"
    assert [part["compute_units"] for part in planned["partitions_after"]["partitions"]] == [76] * 4
    assert planned["simulated"] is True
    assert "Creates: 4 x 47.9GiB 76 CU." in aimgpu("partition", "plan", "0", "QPX", "--simulated", "MI300X").stdout


def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(UnknownDevice) as device:
        aimgpu("partition", "plan", "7", "CPX")
    assert "sim-mi300x-0" in str(device.value.hint)
    with pytest.raises(UnknownLayout):
        aimgpu("partition", "apply", "0", "TPX")
    with pytest.raises(UnknownLayout):
        aimgpu("partition", "plan", "0", "TPX")


def test_no_layout_changes_while_another_owns_the_machine(home: Home) -> None:
    home.create()
    owner = Owner.acquire(home.path)
    try:
        with pytest.raises(LedgerOwned, match=str(os.getpid())):
            aimgpu("partition", "apply", "0", "CPX")
    finally:
        owner.release()


def test_with_a_daemon_grants_and_owners_are_shown_and_models_move(daemon: TestDaemon) -> None:
    client = daemon.start()
    apply(client, stack(chat={}))
    wait_until_settled(client)
    shown = read("gpus")
    (gpu,) = shown["gpus"]
    assert shown["daemon"] is True
    assert gpu["partitions"][0]["granted_bytes"] > 0
    assert gpu["partitions"][0]["foreign_bytes"] == 0
    supposed = aimgpu("gpus", "--gpu", "MI355X").stdout
    assert "MI355X (sim)" in supposed
    assert "No daemon runs" not in supposed
    assert {str(process["instance"]).partition("-")[0] for process in gpu["processes"]} == {"chat"}
    planned = read("partition", "plan", "0", "CPX")
    assert len(planned["stops"]) == len(planned["returns"]) == 1
    assert planned["in_the_way"] == []
    with pytest.raises(Conflict, match="stops 1 running model") as refused:
        aimgpu("partition", "apply", "0", "CPX")  # the runner is no terminal
    assert "--yes" in str(refused.value.hint)
    assert read("partition", "apply", "0", "CPX", "--dry-run")["stops"] == planned["stops"]
    assert read("gpus")["gpus"][0]["layout"] == "SPX/NPS1"
    told = aimgpu("partition", "apply", "0", "CPX", "--yes").stdout
    assert "stop chat-0" in told
    assert "SPX/NPS1 -> CPX/NPS1, as read back" in told
    (instance,) = wait_until_settled(client)
    assert instance["state"] == "ready"
    assert instance["partition"].startswith("cpx-")


def test_a_change_that_is_sure_to_be_refused_stops_nothing(daemon: TestDaemon, home: Home) -> None:
    client = daemon.start()
    apply(client, stack(chat={}))
    before = wait_until_settled(client)
    with pytest.raises(DriverReloadNeeded):
        aimgpu("partition", "apply", "0", "CPX/NPS4")
    put_strangers(home, {"device": "sim-mi300x-0", "pid": 4242, "name": "train", "memory_bytes": 1 << 30, "partition": None})
    with pytest.raises(PartitionBusy, match=r"pid 4242 \(train\)"):
        aimgpu("partition", "apply", "0", "CPX")
    assert wait_until_settled(client) == before
