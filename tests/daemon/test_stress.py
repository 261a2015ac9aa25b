"""The real daemon under random operations, callers and kills: what `ps` shows, ledger, processes and devices agree afterwards.

`make test` runs a few rounds. AIMGPU_STRESS_KILLS=1000 goes on until so many engines were killed, and -s shows how far it is;
AIMGPU_STRESS_KILLS_PER_ROUND=1 compares all views after each kill; AIMGPU_STRESS_SEED repeats the choices of a run.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.cheap_engines import CheapDaemon
from tests.daemon.running import PATIENCE_SECONDS, TestDaemon
from tests.daemon.stress import STEADY, Stress, find_difference, make_stack

KILLS = int(os.environ.get("AIMGPU_STRESS_KILLS", "20"))
SEED = int(os.environ.get("AIMGPU_STRESS_SEED", "14"))
KILLS_PER_ROUND = int(os.environ.get("AIMGPU_STRESS_KILLS_PER_ROUND", str(max(5, KILLS // 80))))
OPERATIONS_PER_THREAD = 3 if KILLS_PER_ROUND > 1 else 1
TIMING = {
    "poll_seconds": 0.02,
    "drain_seconds": 2.0,
    "grace_seconds": 1.0,
    "quiet_seconds": 0.05,
    "least_residency_seconds": 0.0,
    "restart_delay_seconds": 0.2,
    "restart_longest_seconds": 1.0,  # everything is killed more often here than any model should be
    "restart_limit": 1_000_000,
    "room_retry_seconds": 0.5,
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CheapDaemon]:
    daemon = CheapDaemon(tmp_path, **TIMING)
    yield daemon
    daemon.stop()


def wait_until_views_agree(daemon: TestDaemon) -> None:
    client = daemon.wait_until_it_answers()
    until = time.monotonic() + PATIENCE_SECONDS
    difference: str | None = "not looked at"
    while time.monotonic() < until:
        difference = find_difference(daemon, client)
        if difference is None:
            return
        time.sleep(0.1)
    pytest.fail(f"does not settle: {difference}\n{daemon.log.read_text()[-3000:]}")


def test_all_views_agree_after_random_operations_and_kills(daemon: CheapDaemon) -> None:
    client = daemon.start()
    list(client.apply(make_stack(STEADY), "/"))
    stress = Stress(daemon, SEED)
    number = 0
    while stress.tally.kills < KILLS:
        stress.run_round(number, operations=OPERATIONS_PER_THREAD, kills=KILLS_PER_ROUND, daemon_dies=number % 3 == 2)
        wait_until_views_agree(daemon)
        assert stress.tally.failures == [], f"round {number}"
        stress.check_requests(daemon.record)
        number += 1
        sys.stdout.write(f"{number} rounds, {stress.tally.describe()}\n")
    assert stress.tally.answered
    client = daemon.wait_until_it_answers()
    client.stop()
    assert daemon.process is not None
    daemon.process.wait(PATIENCE_SECONDS)
    assert daemon.launcher.find_started() == {}
    assert daemon.books() == ((), ())
