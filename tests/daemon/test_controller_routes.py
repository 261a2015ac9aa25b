"""The route table follows the controller; a change of one model makes no other route again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.world import FakeStore, Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.daemon.controller_routes import ControllerRoutes, RouteSources
from aimgpu.gateway.routes import Arrival, RouteTable, ServedModel

ARRIVAL = Arrival(slots=1, seconds=3.0)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path))
    yield controller
    controller.close()


@pytest.fixture
def table() -> RouteTable:
    return RouteTable()


@pytest.fixture
def routes(controller: Controller, table: RouteTable) -> ControllerRoutes:
    made = controller._dependencies
    sources = RouteSources(controller=controller, engines=made.engines, models=FakeStore(), runs=made.runs)
    return ControllerRoutes(sources, table, lambda _deployment, _instances: ARRIVAL)


def find(table: RouteTable, name: str) -> ServedModel:
    found = table.find(name)
    assert found is not None
    return found


def test_only_the_route_of_the_changed_model_is_made_again(
    controller: Controller, table: RouteTable, routes: ControllerRoutes
) -> None:
    controller.apply([deployment("chat"), deployment("code", keep_seconds=60)])
    routes.refresh()
    chat, code = find(table, "chat"), find(table, "code")
    controller.sleep("code")
    routes.refresh()
    assert find(table, "chat") is chat
    asleep = find(table, "code")
    assert (asleep.state, asleep.backends, asleep.arrival) == ("sleeping", (), ARRIVAL)
    controller.wake("code")
    routes.refresh()
    assert len(find(table, "code").backends) == len(code.backends) == 1
    assert find(table, "code").arrival is None


def test_a_released_model_is_not_found_any_more(controller: Controller, table: RouteTable, routes: ControllerRoutes) -> None:
    controller.apply([deployment("chat"), deployment("code")])
    routes.refresh()
    controller.release(["chat"])
    routes.refresh()
    assert [model.name for model in table.list()] == ["code"]


def test_a_model_that_is_being_prepared_is_known_and_its_callers_are_held(
    controller: Controller, table: RouteTable, routes: ControllerRoutes
) -> None:
    chat, code = replace(deployment("chat"), aliases=("gpt",)), deployment("code")
    controller.apply([code])
    with routes.expect([chat, code]):
        routes.refresh()
        coming = find(table, "gpt")
        assert (coming.name, coming.state, coming.reason, coming.backends) == ("chat", "queued", "it is being prepared", ())
        assert coming.arrival == Arrival(slots=1, seconds=None)
        assert find(table, "code").backends
        controller.apply([chat, code])
        routes.refresh()
        assert find(table, "chat").backends
        controller.release(["chat"])
    routes.refresh()
    assert table.find("chat") is None
