"""The page's view of the daemon: what it reads, and the few changes that it makes itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import ignore
from aimgpu.control.observation import MachineObserver
from aimgpu.control.plan.preparation import are_simulated, prepare, readers
from aimgpu.control.sizing_inputs.model_names import list_candidates
from aimgpu.daemon.activator import Activator
from aimgpu.daemon.status import Addresses, StatusSources, read_notes
from aimgpu.daemon.supervisor import log_event
from aimgpu.domain import Deployment
from aimgpu.errors import Conflict, UnknownDeployment
from aimgpu.qos.slo.activity import ActivityLog
from aimgpu.sizing import built_in
from aimgpu.web.authority import Authority
from aimgpu.web.live import Broadcaster, PageState
from aimgpu.web.routes import Application, PageApplication
from aimgpu.web.sources import Actions, Change, FoundModel, Json, Scores, Sources

_MOST_FOUND = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDependencies:
    """What the page is made from."""

    controller: Controller
    dependencies: Dependencies
    observer: MachineObserver
    activator: Activator
    activity: ActivityLog
    addresses: Addresses
    read_scores: Callable[[], Scores]
    authority: Authority


def make_page(given: PageDependencies, control_api: Application) -> PageApplication:
    """The page with its part of the API; `control_api` answers the rest. Call it on the event loop."""
    live = Broadcaster(PageState(_make_sources(given), given.activity))
    live.start()
    actions = _make_actions(given)
    return PageApplication(live, actions, given.authority, control_api)


def _make_sources(given: PageDependencies) -> Sources:
    controller, dependencies = given.controller, given.dependencies
    status = StatusSources.of(controller, dependencies)
    return Sources(
        version=given.addresses.version,
        url=given.addresses.url,
        look=given.observer.look,
        read_scores=given.read_scores,
        read_residents=given.activator.residents,
        read_waiting=lambda: (
            {item.deployment: item.reason for item in controller.waiting()} | given.activator.waiting_for_room()
        ),
        wait_for_change=lambda seconds: _wait_for_change(controller, seconds),
        read_notes=lambda: read_notes(status),
        take_snapshot=controller.snapshot,
        size=lambda deployment: prepare(dependencies, deployment, ignore, may_fetch=False),
        catalogue=_list_catalogue,
        search=lambda text: _search(dependencies, text),
        engines=lambda: _list_engines(dependencies),
    )


def _wait_for_change(controller: Controller, seconds: float) -> bool:
    seen = controller.changes.version
    return controller.changes.wait(seen, seconds) != seen


def _make_actions(given: PageDependencies) -> Actions:
    controller, activator = given.controller, given.activator
    return Actions(
        sleep=lambda name: _sleep(controller, name),
        wake=lambda name: _wake(controller, activator, name),
        change=lambda name, change: _change(controller, name, change),
    )


def _sleep(controller: Controller, name: str) -> bool:
    _find(controller, name)
    if not controller.sleep(name, emit=log_event):
        raise Conflict(f"{name} is busy or not loaded", hint="Try again when its requests are done.")
    return True


def _wake(controller: Controller, activator: Activator, name: str) -> bool:
    _find(controller, name)
    if activator.wake(name) is None:
        raise Conflict(f"{name} is not asleep", hint="A model that failed is deployed again.")
    return True


def _change(controller: Controller, name: str, change: Change) -> Deployment:
    """In the ledger alone: queueing and unloading follow it at once, and nothing is restarted."""

    def amended(deployment: Deployment) -> Deployment:
        if change.priority is not None:
            deployment = replace(deployment, ask=replace(deployment.ask, priority=change.priority))
        if change.pinned:
            return replace(deployment, keep_seconds=None)
        return deployment if change.keep_seconds is None else replace(deployment, keep_seconds=change.keep_seconds)

    return controller.amend(name, amended)


def _find(controller: Controller, name: str) -> Deployment:
    found = next((one for one in controller.deployments() if one.name == name), None)
    if found is None:
        raise UnknownDeployment.of(name, known=(one.name for one in controller.deployments()))
    return found


def _list_catalogue() -> Sequence[Json]:
    return [{"id": row.facts.name, "parameters": row.facts.parameters} for row in built_in().rows]


def _search(dependencies: Dependencies, text: str) -> Sequence[FoundModel]:
    able = readers(dependencies.engines.values(), simulated=are_simulated(dependencies.hardware.read_devices()))
    found = list_candidates(built_in(), text, able, _MOST_FOUND)
    return [FoundModel(candidate=one, on_disk=dependencies.models.find(one.model) is not None) for one in found]


def _list_engines(dependencies: Dependencies) -> Sequence[Json]:
    found = []
    for name, engine in dependencies.engines.items():
        availability = engine.availability()
        found.append({"name": name, "available": availability.available, "reason": availability.reason})
    return found
