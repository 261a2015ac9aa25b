"""A model that is applied while the daemon looks after the others starts, at whatever moment of the round it comes."""

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import Machine, boot, check_ledger, deployment

from aimgpu.control.controller import Controller

_HELD_SECONDS = 0.2  # of a read: an apply that can be committed then is; one that waits for the lock is not waited for
_BOUND_SECONDS = 60.0


class Interleaving:
    """Holds a round at its n-th read of what is wanted while an apply is committed, and the apply until the round ended."""

    def __init__(self, controller: Controller, nth: int) -> None:
        self.held = threading.Event()
        self._committed = threading.Event()
        self._round_ended = threading.Event()
        self._nth, self._reads = nth, 0
        self._controller = controller
        ledger: Any = controller._dependencies.ledger
        self._read, self._forget = ledger.deployments, ledger.forget_retries
        ledger.deployments, ledger.forget_retries = self._deployments, self._forget_retries
        self.round = threading.Thread(target=self._supervise, daemon=True)

    def _supervise(self) -> None:
        try:
            self._controller.supervise(wait=True)
        finally:
            self.held.set()  # also where a round reads less often
            self._round_ended.set()

    def _deployments(self) -> Any:
        found = self._read()
        if threading.current_thread() is self.round:
            self._reads += 1
            if self._reads == self._nth:
                self.held.set()
                self._committed.wait(_HELD_SECONDS)
        return found

    def _forget_retries(self, *names: str) -> None:
        self._forget(*names)
        if threading.current_thread() is not self.round:  # the first thing that an apply does after its commit
            self._committed.set()
            assert self._round_ended.wait(_BOUND_SECONDS)


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_round_of_supervision_releases_nothing_that_is_being_applied(tmp_path: Path, nth: int) -> None:
    machine = Machine(root=tmp_path)
    controller = boot(machine)
    controller.apply([deployment("chat", 10)])
    between = Interleaving(controller, nth)
    between.round.start()
    assert between.held.wait(_BOUND_SECONDS)
    result = controller.apply([deployment("code", 20)])
    between.round.join(_BOUND_SECONDS)
    assert [(one.deployment, one.state.value, one.reason) for one in result.instances] == [("code", "ready", None)]
    check_ledger(machine, controller, names=["chat", "code"])
    controller.close()
