"""kill -9 of the daemon at random moments: the next start repairs, no process is orphaned, no grant leaks."""

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack, wait_for, wait_until_settled
from tests.examples import examples

from aimgpu.cli.client import DaemonClient
from aimgpu.errors import AimGpuError

KILLS = examples(20)  # each with a start of the daemon
NAMES = ("a", "b", "c")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    daemon = TestDaemon(tmp_path / "home", grace_seconds=1.0, drain_seconds=0.1)
    yield daemon
    daemon.stop()


def test_after_each_kill_the_next_start_makes_the_books_equal_the_truth(daemon: TestDaemon) -> None:
    chance = random.Random(20260)
    client = daemon.start()
    for number in range(KILLS):
        work = threading.Thread(target=do_something, args=(client, chance.randrange(4), chance.choice(NAMES), number))
        work.start()
        work.join(chance.uniform(0.0, 0.6))
        daemon.kill()
        work.join()
        client = daemon.start()
        # A replica of an earlier revision serves, ready and alone, until the daemon begins to replace it.
        wait_for(daemon.runs_what_is_wanted, "every replica has the wanted revision")
        wait_until_settled(client)
        check(daemon, number)
    client.release([item["name"] for item in client.read_status()["deployments"]])
    assert daemon.launcher.find_started() == {}
    assert daemon.books() == ((), ())


def do_something(client: DaemonClient, choice: int, name: str, number: int) -> None:
    with contextlib.suppress(AimGpuError):  # the daemon dies under us
        if choice == 0:
            client.release([name])
        elif choice == 1:
            apply(client, stack(**{each: {} for each in NAMES}))
        else:
            apply(client, stack(**{name: {"gpu": {"memory": f"{number % 20 + 1}GiB"}}}))


def check(daemon: TestDaemon, number: int) -> None:
    instances, grants = daemon.books()
    held = {grant.instance_id for grant in grants}
    running = daemon.launcher.find_started()
    assert set(running) == held, f"after kill {number}"
    assert {instance.id for instance in instances if instance.state.value == "ready"} == held
    assert all(instance.process == running[instance.id] for instance in instances if instance.id in held)
    assert len({(instance.deployment, instance.replica) for instance in instances}) == len(instances)
