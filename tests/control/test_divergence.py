"""What an operation that was given up left otherwise than wanted is placed again, and nothing is left loading for no one."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FAST, Machine, boot, check_ledger, deployment

from aimgpu.control import controller as control
from aimgpu.control.controller import Controller
from aimgpu.control.plan.prepared import revision_of
from aimgpu.control.waiting import find_diverged, still_diverged
from aimgpu.domain import Instance, InstanceState

CHAT = deployment("chat", 10)
BOUND_SECONDS = 60.0


def instance(name: str, replica: int = 0, state: InstanceState = InstanceState.READY, revision: str | None = None) -> Instance:
    return Instance(
        id=name,
        deployment="chat",
        replica=replica,
        model="10gib",
        engine="llamacpp",
        launcher="process",
        state=state,
        revision=revision,
    )


@pytest.mark.parametrize(
    ("instances", "diverged"),
    [
        ([instance("a")], False),
        ([], True),
        ([instance("a"), instance("b")], True),
        ([instance("a", 1)], True),
        ([instance("a", revision="another")], True),
        ([instance("a", revision=revision_of(CHAT))], False),
        ([instance("a", state=InstanceState.FAILED)], True),
        ([instance("a", state=InstanceState.SLEEPING, revision="another")], False),
        ([instance("a"), instance("b", state=InstanceState.LOADING)], False),
        ([instance("a"), instance("b", state=InstanceState.DRAINING)], False),
    ],
)
def test_a_deployment_diverges_where_a_replica_is_missing_twice_or_outdated(
    instances: list[Instance], *, diverged: bool
) -> None:
    assert bool(find_diverged([CHAT], instances)) is diverged


def test_one_that_failed_and_is_tried_again_by_itself_does_not_diverge() -> None:
    failed = [instance("a", state=InstanceState.FAILED)]
    assert not find_diverged([CHAT], failed, recorded={"chat"})
    assert find_diverged([CHAT], failed, recorded={"code"})


def test_only_what_did_not_change_between_two_looks_is_placed_again() -> None:
    assert still_diverged({"a": ("x",), "b": ("y",)}, {"a": ("x",), "b": ("z",), "c": ()}) == ["a"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path, gpus=1)


@pytest.fixture
def controller(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(control, "_DIVERGED_SECONDS", 0.0)
    controller = boot(machine, timing=replace(FAST, load_timeout_seconds=BOUND_SECONDS))
    yield controller
    controller.close()


def test_a_change_that_was_given_up_for_one_that_is_refused_is_made_after_all(machine: Machine, controller: Controller) -> None:
    controller.apply([CHAT])
    machine.behaviours["chat"] = "never"
    changing = threading.Thread(target=controller.apply, args=([deployment("chat", 20)],))
    changing.start()
    until = time.monotonic() + BOUND_SECONDS
    while not any(one.state is InstanceState.LOADING and one.process for one in controller.instances()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert controller.apply([deployment("chat", 500)]).plan.refusals
    changing.join(BOUND_SECONDS)
    assert [one.state for one in controller.instances()] == [InstanceState.READY]  # the one of before serves on
    check_ledger(machine, controller)
    machine.behaviours["chat"] = "ready"
    for _ in range(2):
        controller.supervise(wait=True)
    (now,) = controller.instances()
    assert (now.model, now.state) == ("20gib", InstanceState.READY)
    check_ledger(machine, controller, names=["chat"])


def test_what_stands_twice_is_ended(machine: Machine, controller: Controller) -> None:
    controller.apply([CHAT])
    controller.apply([deployment("code", 10)])
    ledger = controller._dependencies.ledger
    (code,) = [one for one in controller.instances() if one.deployment == "code"]
    ledger.unwant("code")
    ledger.update(replace(code, deployment="chat", revision="earlier"))
    for _ in range(2):
        controller.supervise(wait=True)
    assert [one.revision for one in controller.instances()] == [revision_of(CHAT)]
    check_ledger(machine, controller, names=["chat"])
