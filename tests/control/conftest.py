"""A machine of two GPUs and its controller; files that need another machine define their own `machine`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.control.world import Machine, boot

from aimgpu.control.controller import Controller


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(root=tmp_path)


@pytest.fixture
def controller(machine: Machine) -> Iterator[Controller]:
    controller = boot(machine)
    yield controller
    controller.close()


@pytest.fixture
def controllers() -> Iterator[list[Controller]]:
    """Those that a test starts itself: closed when it ends."""
    found: list[Controller] = []
    yield found
    for controller in found:
        controller.close()
