"""A grant above the need of llama.cpp: instance, gateway and status follow; on a simulated GPU nothing changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import FakeStore, Machine, boot, deployment, memory, status_sources

from aimgpu.control.controller import Controller
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.daemon.activator import Activator
from aimgpu.daemon.controller_routes import ControllerRoutes, RouteSources
from aimgpu.daemon.status import Addresses, describe_status
from aimgpu.domain import Deployment, Device, Footprint, Instance
from aimgpu.engines.protocols import LocalModel
from aimgpu.gateway.routes import Arrival, RouteTable
from aimgpu.gateway.wake_requests import WakeRequests

MODEL = "Qwen/Qwen2.5-7B-Instruct"
BASIS = SizingBasis()
Boot = Callable[..., Controller]


class RealDevices:
    """The simulated GPU, said to be real."""

    def __init__(self, hardware: Any) -> None:
        self._hardware = hardware

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    def read_devices(self) -> tuple[Device, ...]:
        return tuple(replace(device, simulated=False) for device in self._hardware.read_devices())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Boot]:
    machine = Machine(root=tmp_path, gpus=1)
    started: list[Controller] = []

    def start_one(*, real: bool) -> Controller:
        parts = boot(machine)._dependencies
        hardware = RealDevices(machine.hardware) if real else machine.hardware

        def size(deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint:
            del local, vendor
            return BASIS.size(deployment, engine, None, hardware.read_devices()[0])

        started.append(Controller(replace(parts, hardware=hardware, size=size)))
        return started[-1]

    yield start_one
    for controller in started:
        controller.close()


def wanted(**given: Any) -> Deployment:
    return replace(deployment("chat", want=memory(24)), model=MODEL, engine="llamacpp", precision="q4_k_m", **given)


def the_instance(controller: Controller) -> Instance:
    (instance,) = controller.instances()
    return instance


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, (16, 20480)),
        ({"context_tokens": 4096}, (64, 4096)),
        ({"concurrency": 2}, (2, 32768)),
        ({"context_tokens": 4096, "concurrency": 2}, (2, 4096)),
    ],
)
def test_what_was_left_out_is_chosen_by_the_grant_and_the_gateway_follows(
    start: Boot, given: dict[str, int], served: tuple[int, int]
) -> None:
    controller = start(real=True)
    controller.apply([wanted(**given)])
    instance = the_instance(controller)
    assert (instance.concurrency, instance.context_tokens) == served
    assert instance.sized_bytes is not None
    assert instance.sized_bytes <= instance.grants[0].memory_bytes
    assert not instance.in_host_memory
    table, parts = RouteTable(), controller._dependencies
    sources = RouteSources(controller=controller, engines=parts.engines, models=FakeStore(), runs=parts.runs)
    ControllerRoutes(sources, table, lambda *_: Arrival(slots=1, seconds=1.0)).refresh()
    model = table.find("chat")
    assert model is not None
    assert [backend.slots for backend in model.backends] == [served[0]]
    assert model.card.context_tokens == served[1]
    activator = Activator(controller, WakeRequests(), dict, lambda _event: None)
    arrival = activator.find_arrival(wanted(**given), controller.instances())
    activator.close()
    assert arrival is not None
    assert arrival.slots == served[0]


def test_on_a_simulated_gpu_the_need_is_what_is_started(start: Boot) -> None:
    controller = start(real=False)
    controller.apply([wanted()])
    instance = the_instance(controller)
    assert (instance.concurrency, instance.context_tokens, instance.in_host_memory) == (1, 8192, True)
    status = describe_status(status_sources(controller), Addresses(version="1", pid=1, url="http://127.0.0.1:1"))
    (shown,) = status["instances"]
    assert shown["in_host_memory"]
    assert shown["unused_bytes"] > 0
