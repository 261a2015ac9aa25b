"""The real daemon over a driver that is not there: tenants that are held, those that are not, and what is done about them."""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for
from tests.native.conftest import SOFTWARE_GPU, Toolchain

from aimgpu.cli.client import DaemonClient
from aimgpu.errors import Conflict, NotAllowed, ShareInUse, UnknownDeployment
from aimgpu.hardware.software.state import DriverState
from aimgpu.isolation.interposer import region_path, regions_directory
from aimgpu.isolation.region import Region, TenantUse
from aimgpu.units import GIB, MIB

PARTITION = "gpu0/whole-0"
STATIC = """
#include "gpu.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void)
{
    int file = open(getenv("AIMGPU_SOFTWARE_GPU"), O_RDWR);
    struct state *state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (state->processes[i].pid == 0) {
            state->processes[i].used = state->processes[i].used_on[0] = 5ull << 30;
            state->processes[i].pid = (uint64_t)getpid();
            break;
        }
    return getchar();
}
"""


class HeldDaemon(TestDaemon):
    program = "tests.programs.held_daemon"


class Stage:
    """A driver, its programs, and a daemon over it, in a folder that other users may enter."""

    def __init__(self, folder: Path) -> None:
        self.tools = Toolchain(folder, "plain")
        self.hammer = self.tools.program("hammer", link=("libcuda.so.1",))
        self.state = folder / "driver.state"
        self.state.write_bytes(bytes(ctypes.sizeof(DriverState)))
        self.state.chmod(0o666)
        with self.state.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.driver = DriverState.from_buffer(self._map)
        self.daemons: list[TestDaemon] = []

    def clear(self) -> None:
        ctypes.memset(ctypes.addressof(self.driver), 0, ctypes.sizeof(self.driver))
        self.driver.device_bytes = 80 * GIB

    def daemon(self, home: Path, beside: str) -> TestDaemon:
        driver = {"state": str(self.state), "libraries": str(self.tools.folder)}
        made = HeldDaemon(home, engines={"chat": ("--beside", beside)})
        made.set(AIMGPU_TEST_DRIVER=json.dumps(driver), AIMGPU_INTERPOSER=str(self.tools.interposer))
        self.daemons.append(made)
        return made

    def users(self) -> list[Any]:
        return [one for one in self.driver.processes if one.pid and one.used]


@pytest.fixture(scope="module")
def built() -> Iterator[Stage]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    with tempfile.TemporaryDirectory(prefix="aimgpu-held") as folder:
        Path(folder).chmod(0o755)
        yield Stage(Path(folder))


@pytest.fixture
def stage(built: Stage) -> Iterator[Stage]:
    built.clear()
    yield built
    for daemon in built.daemons:
        daemon.stop()
    built.daemons.clear()


def start(daemon: TestDaemon, **fields: Any) -> DaemonClient:
    client = daemon.start()
    events = apply(client, stack(chat={"gpu": {"memory": "2GiB"}, **fields}))
    assert events[-1]["event"] == "done", events
    return client


def instance(client: DaemonClient) -> dict[str, Any] | None:
    found = client.read_status()["instances"]
    assert len(found) <= 1
    return found[0] if found else None


def tenant(daemon: TestDaemon, name: str) -> TenantUse:
    region = Region.open(region_path(regions_directory(daemon.home.path), PARTITION))
    try:
        return next(use for use in region.read_use() if use.name == name)
    finally:
        region.close()


def greedy(stage: Stage, unit: int = 64 * MIB) -> str:
    return f"{stage.hammer} greedy 1 {unit}"


def run_command(daemon: TestDaemon, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "AIMGPU_HOME": str(daemon.home.path)}
    command = [sys.executable, "-m", "aimgpu.cli.main", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


def test_what_holds_a_grant_is_told_everywhere(stage: Stage, tmp_path: Path) -> None:
    daemon = stage.daemon(tmp_path / "home", greedy(stage))
    client = start(daemon, isolation="enforced")
    wait_for(stage.users, "the tenant took memory")
    found = instance(client)
    assert found is not None
    assert (found["level"], found["mechanism"]) == ("runtime", "interposer")
    assert [(grant["level"], grant["mechanism"]) for grant in found["grants"]] == [("runtime", "interposer")]
    shown = run_command(daemon, "ps", "--wide").stdout
    assert "MECHANISM" in shown
    assert "interposer" in shown
    record = daemon.home.read_daemon()
    assert record is not None

    def is_exported() -> bool:  # a scrape may be up to a second old
        with urllib.request.urlopen(f"{record.url}/metrics") as answer:
            return 'level="runtime",mechanism="interposer"' in answer.read().decode()

    wait_for(is_exported, "the metrics name level and mechanism")
    _, grants = daemon.books()
    assert [grant.mechanism for grant in grants] == ["interposer"]


def test_a_running_model_gets_more_and_less(stage: Stage, tmp_path: Path) -> None:
    """Books, region and what the program can take agree, also after the daemon was killed."""
    daemon = stage.daemon(tmp_path / "home", greedy(stage))
    client = start(daemon)
    found = instance(client)
    assert found is not None
    wait_for(lambda: tenant(daemon, found["id"]).denied, "the tenant took all it may")
    used = tenant(daemon, found["id"]).used_bytes
    assert 2 * GIB - 64 * MIB < used <= 2 * GIB
    assert client.resize("chat", 3 * GIB, dry_run=True)["changes"][0]["used_bytes"] == used
    assert tenant(daemon, found["id"]).cap_bytes == 2 * GIB
    done = run_command(daemon, "resize", "chat", "--memory", "3GiB")
    assert done.returncode == 0, done.stderr
    assert "has 3GiB of gpu0/whole-0 (before 2GiB" in done.stdout
    with pytest.raises(ShareInUse, match=r"uses 1.9GiB of its 3GiB .* cannot fall to 1GiB"):
        client.resize("chat", 1 * GIB, dry_run=False)
    with pytest.raises(Conflict, match=r"80GiB for .*included; 81GiB were asked for"):
        client.resize("chat", 81 * GIB, dry_run=False)
    with pytest.raises(UnknownDeployment):
        client.resize("nobody", 1 * GIB, dry_run=False)
    daemon.kill()
    client = daemon.start()
    wait_for(lambda: client.read_status()["reconciled"], "the daemon is back")
    assert [grant.memory_bytes for grant in daemon.books()[1]] == [3 * GIB]
    assert tenant(daemon, found["id"]).cap_bytes == 3 * GIB
    answer = json.loads(run_command(daemon, "resize", "chat", "--memory", "2GiB", "--json").stdout)
    assert answer["changes"][0]["after_bytes"] == 2 * GIB
    assert tenant(daemon, found["id"]).cap_bytes == daemon.books()[1][0].memory_bytes == 2 * GIB


def test_what_no_mechanism_can_change_is_refused(stage: Stage, tmp_path: Path) -> None:
    daemon = stage.daemon(tmp_path / "home", "cat")
    client = start(daemon, gpu={"whole": 1})
    with pytest.raises(NotAllowed, match="has the partition for itself"):
        client.resize("chat", 1 * GIB, dry_run=True)


def drops_the_variable(stage: Stage) -> str:
    return f"env -u LD_PRELOAD {greedy(stage, 5 * GIB)}"


def is_static(stage: Stage) -> str:
    source, program = stage.tools.folder / "static.c", stage.tools.folder / "static"
    source.write_text(STATIC)
    built = subprocess.run(["cc", "-static", f"-I{SOFTWARE_GPU}", "-o", program, source], capture_output=True, check=False)
    if built.returncode != 0:
        pytest.skip("no static C library here")
    return str(program)


def is_setuid(stage: Stage) -> str:
    """Another user's program with the set-uid bit: the loader ignores what is to be preloaded."""
    if os.getuid() != 0:
        pytest.skip("only root can give a program another owner")
    program = stage.tools.folder / "setuid"
    shutil.copy(stage.hammer, program)
    os.chown(program, 65534, 65534)
    program.chmod(0o4755)
    return f"{program} greedy 1 {5 * GIB}"


UNHELD = [drops_the_variable, is_static, is_setuid]


@pytest.mark.parametrize("how", UNHELD)
def test_the_level_of_a_tenant_that_is_not_held_falls(stage: Stage, tmp_path: Path, how: Callable[[Stage], str]) -> None:
    daemon = stage.daemon(tmp_path / "home", how(stage))
    client = start(daemon)

    def fallen() -> bool:
        found = instance(client)
        return found is not None and found["level"] == "advisory"

    wait_for(fallen, "the Level is what is true")
    found = instance(client)
    assert found is not None
    assert (found["state"], found["mechanism"]) == ("ready", "engine flag")
    assert "uses gpu0 without the library" in daemon.log.read_text()


@pytest.mark.parametrize("how", UNHELD)
def test_a_tenant_that_must_be_held_and_is_not_is_stopped(stage: Stage, tmp_path: Path, how: Callable[[Stage], str]) -> None:
    daemon = stage.daemon(tmp_path / "home", how(stage))
    client = start(daemon, isolation="enforced")
    wait_for(lambda: instance(client) is None, "it is stopped")
    assert daemon.books() == ((), ())
    assert daemon.launcher.find_started() == {}


def take_too_much(stage: Stage, daemon: TestDaemon, name: str) -> None:
    """The driver measures 20 GiB more than the library counted, as for memory that went past it."""
    wait_for(lambda: tenant(daemon, name).denied, "the tenant took all it may: it does not count while we do")
    stage.users()[0].used += 20 * GIB


@pytest.mark.parametrize("policy", ["warn", "throttle", "restart", "stop"])
def test_the_policy_of_the_deployment_decides_about_excess(stage: Stage, tmp_path: Path, policy: str) -> None:
    daemon = stage.daemon(tmp_path / "home", greedy(stage))
    client = start(daemon, watchdog=policy)
    before = instance(client)
    assert before is not None
    take_too_much(stage, daemon, before["id"])
    wait_for(lambda: "watchdog.over" in daemon.log.read_text(), "the excess is noticed")
    if policy == "stop":
        wait_for(lambda: instance(client) is None, "it is stopped")
        return
    if policy == "restart":
        wait_for(lambda: (now := instance(client)) and now["id"] != before["id"] and now["state"] == "ready", "a new one runs")
        return
    if policy == "throttle":
        wait_for(lambda: tenant(daemon, before["id"]).compute_ppm == 100_000, "it is slowed")
    now = instance(client)
    assert now is not None
    assert (now["id"], now["state"]) == (before["id"], "ready")


def test_strangers_are_named_and_left_alone(stage: Stage, tmp_path: Path) -> None:
    daemon = stage.daemon(tmp_path / "home", greedy(stage))
    client = start(daemon, watchdog="stop")
    stranger = subprocess.Popen(
        [stage.hammer, "greedy", "1", str(30 * GIB)],
        env={"AIMGPU_SOFTWARE_GPU": str(stage.state), "LD_LIBRARY_PATH": str(stage.tools.folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        wait_for(lambda: f"pid {stranger.pid} (unknown) is not ours" in daemon.log.read_text(), "it is named")
        assert stranger.poll() is None
        assert instance(client) is not None
    finally:
        stranger.communicate(b"\n")
