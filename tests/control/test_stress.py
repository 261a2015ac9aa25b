"""Twelve threads apply, attach, prune, release, resize, partition, sleep and wake at random while engines are killed.

After every round everything settles, and what is shown, the ledger, the processes and the devices must agree.
AIMGPU_STRESS_ROUNDS makes it longer or shorter, AIMGPU_STRESS_SEED repeats the choices of a run.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment, resident, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.waiting import find_abandoned
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Deployment, Priority
from aimgpu.errors import AimGpuError
from aimgpu.units import GIB

ROUNDS = int(os.environ.get("AIMGPU_STRESS_ROUNDS", "9"))
SEED = int(os.environ.get("AIMGPU_STRESS_SEED", "7"))
THREADS = 12
ACTS_PER_THREAD = 6
SETTLE_SECONDS = 300.0
NAMES = [f"m{number}" for number in range(10)]
LAYOUTS = ["SPX/NPS1", "CPX/NPS1", "DPX/NPS1", "QPX/NPS1"]
TIMING = replace(FAST, load_timeout_seconds=5.0, room_retry_seconds=0.05, least_residency_seconds=0.0)
HERE = Addresses(version="1", pid=1, url="http://127.0.0.1:1")
Act = Callable[[Controller, random.Random], object]


def random_item(chance: random.Random) -> Deployment:
    item = deployment(
        chance.choice(NAMES),
        chance.choice([1, 5, 20, 60]),
        replicas=chance.choice([1, 1, 2]),
        keep_seconds=chance.choice([None, 60]),
        engine=chance.choice([None, "sleeper"]),
    )
    return replace(item, ask=replace(item.ask, priority=chance.choice(list(Priority))))


ACTS: dict[str, Act] = {
    "apply": lambda controller, chance: controller.apply([random_item(chance)]),
    "apply making room": lambda controller, chance: controller.apply([random_item(chance)], make_room=True),
    "prune": lambda controller, chance: controller.apply([random_item(chance)], prune=True),
    "release": lambda controller, chance: controller.release([chance.choice(NAMES)]),
    "down": lambda controller, chance: controller.release() if chance.random() < 0.1 else None,
    "resize": lambda controller, chance: controller.resize(chance.choice(NAMES), chance.randint(1, 80) * GIB),
    "partition": lambda controller, chance: controller.change_layout(chance.choice(["0", "1"]), chance.choice(LAYOUTS)),
    "sleep": lambda controller, chance: controller.sleep(chance.choice(NAMES)),
    "wake": lambda controller, chance: controller.wake(
        chance.choice(NAMES), [resident(name) for name in chance.sample(NAMES, 3)]
    ),
    "look": lambda controller, _: describe_status(status_sources(controller), HERE),
    "supervise": lambda controller, _: controller.supervise(),
}


def kill_some(machine: Machine, chance: random.Random) -> int:
    live = list(machine.live().values())
    killed = chance.sample(live, min(len(live), chance.randint(0, 3)))
    for process in killed:
        process.alive = False
    return len(killed)


class Round:
    """One burst of random acts by twelve threads; errors of ours are answers, anything else is a failure."""

    def __init__(self, machine: Machine, controller: Controller, seed: int) -> None:
        self._machine = machine
        self._controller = controller
        self._seed = seed
        self.kills = 0
        self.failures: list[BaseException] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._act, args=(self._seed + number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads), "an operation hangs"

    def _act(self, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(ACTS_PER_THREAD):
            try:
                if chance.random() < 0.15:
                    self.kills += kill_some(self._machine, chance)
                with contextlib.suppress(AimGpuError):
                    ACTS[chance.choice(list(ACTS))](self._controller, chance)
            except BaseException as error:  # noqa: BLE001 - looked at when all have ended
                self.failures.append(error)
                return


def settle(controller: Controller) -> None:
    """Until a whole look finds no death, and nothing was under way before it or is after it."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        before, lost = under_way(controller), controller.supervise(wait=True)
        if not (before or lost or under_way(controller)):
            return
        time.sleep(0.05)
    pytest.fail(f"does not settle: {under_way(controller)}, {controller.instances()}")


def under_way(controller: Controller) -> list[object]:
    """What is being worked on, or is left to the next look at everything."""
    found: list[object] = ["busy"] if controller.is_busy else []  # first: what it starts is seen below
    return [*found, *find_abandoned(controller.instances()), *controller._dependencies.ledger.operations()]


def check_shown(controller: Controller) -> None:
    """What `ps` shows is what the ledger holds."""
    shown = describe_status(status_sources(controller), HERE)
    grants = controller._dependencies.ledger.grants()
    assert sum(gpu["granted_bytes"] for gpu in shown["gpus"]) == sum(grant.memory_bytes for grant in grants)
    assert {item["id"] for item in shown["instances"]} == {one.id for one in controller.instances()}
    assert {item["name"] for item in shown["deployments"]} == {one.name for one in controller.deployments()}


@pytest.mark.slow
def test_after_every_round_of_random_acts_and_kills_all_views_agree(tmp_path: Path) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine, timing=TIMING)
    rounds, kills = 0, 0
    while rounds < ROUNDS:
        current = Round(machine, controller, SEED + 100 * rounds)
        current.run()
        assert current.failures == [], f"round {rounds}"
        settle(controller)
        check_ledger(machine, controller)
        check_shown(controller)
        assert controller._dependencies.ledger.operations() == ()
        rounds, kills = rounds + 1, kills + current.kills
        if rounds % 3 == 0:
            controller.close()
            controller = boot(machine, timing=TIMING)
            controller.reconcile()
            settle(controller)
            check_ledger(machine, controller)
    assert kills > 0
    controller.release()
    check_ledger(machine, controller, names=[])
    assert machine.live() == {}
    controller.close()
