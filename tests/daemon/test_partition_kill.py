"""A daemon that is killed while it changes a layout: the next start brings the models back on the layout that is there."""

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_until_settled

from aimgpu.cli.client import DaemonClient
from aimgpu.errors import AimGpuError
from aimgpu.hardware.simulated import SimulatedHardware

KILLS = 8
LAYOUTS = ("CPX/NPS1", "QPX/NPS4", "SPX/NPS1", "CPX/NPS4")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(tmp_path / "home", grace_seconds=1.0, drain_seconds=0.1)
    yield daemon
    daemon.stop()


def test_after_each_kill_models_are_ready_on_partitions_that_exist(daemon: TestDaemon) -> None:
    chance = random.Random(7)
    client = daemon.start()
    apply(client, stack(chat={"gpu": {"memory": "4GiB"}}, code={"gpu": {"memory": "4GiB"}}))
    wait_until_settled(client)
    for number in range(KILLS):
        work = threading.Thread(target=change, args=(client, LAYOUTS[number % len(LAYOUTS)]))
        work.start()
        work.join(chance.uniform(0.0, 0.8))
        daemon.kill()
        work.join()
        client = daemon.start()
        instances = wait_until_settled(client)
        assert {(item["name"], item["state"]) for item in instances} == {("chat", "ready"), ("code", "ready")}, number
        check(daemon, client)


def change(client: DaemonClient, layout: str) -> None:
    with contextlib.suppress(AimGpuError):  # the daemon dies under us
        list(client.partition("sim-mi300x-0", layout, reload_driver=True))


def check(daemon: TestDaemon, client: DaemonClient) -> None:
    (device,) = SimulatedHardware([("MI300X", 1)], daemon.home.path / "simulated-gpus.json").read_devices()
    assert client.read_status()["gpus"][0]["layout"] == device.layout.name
    _, grants = daemon.books()
    assert len(grants) == 2
    assert {grant.partition_id for grant in grants} <= {part.id for part in device.layout.partitions}
    assert set(daemon.launcher.find_started()) == {grant.instance_id for grant in grants}
