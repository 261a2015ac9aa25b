"""The page's application over a machine in memory, without a server."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.control.world import Machine, boot, size_by_name
from tests.web.calling import Browser

from aimgpu.control.controller import Controller
from aimgpu.control.observation import MachineObserver, ObservedLedger
from aimgpu.control.plan.prepared import Prepared
from aimgpu.control.sizing_inputs.model_names import list_candidates
from aimgpu.domain import Deployment
from aimgpu.gateway.auth import KeyTable
from aimgpu.qos.slo.activity import ActivityLog
from aimgpu.sizing import built_in
from aimgpu.web.authority import Authority
from aimgpu.web.live import Broadcaster, PageState
from aimgpu.web.routes import PageApplication
from aimgpu.web.sources import Actions, Change, FoundModel, Sources

TOKEN = "the-daemons-token"
OWNER, STRANGER = 1000, 54321  # users
READERS = {"llamacpp": frozenset({"gguf"})}


class LocalPage:
    """`browser` opened a link. `owner`: whose a connection is. What the page does is noted in `done`."""

    def __init__(self, controller: Controller, *, prompts: int = 0) -> None:
        made = controller._dependencies
        self.controller = controller
        self.observer = MachineObserver(
            made.hardware,
            ObservedLedger(instances=controller.instances, deployments=controller.deployments),
            node="here",
            patience_seconds=60.0,
        )
        self.activity = ActivityLog(time.time, prompts=prompts)
        self.scores: Mapping[str, Any] = {}
        self.waiting: Mapping[str, str] = {}
        self.residents: Sequence[Any] = ()
        self.notes: Sequence[str] = ()
        self.done: list[tuple[str, str, Change | None]] = []
        self.passed_on: list[dict[str, Any]] = []
        self.state = PageState(self._sources(), self.activity)
        self.live = Broadcaster(self.state)
        self.owner = OWNER
        self.keys = KeyTable(required=False)
        authority = Authority(TOKEN, self.keys, lambda _client, _server: self.owner)
        actions = Actions(sleep=self._note("sleep"), wake=self._note("wake"), change=self._change)
        self.application = PageApplication(self.live, actions, authority, self._control_api)
        self.browser = Browser(self.application).with_link(authority.make_link())

    def _sources(self) -> Sources:
        return Sources(
            version="1.2.3",
            url="http://127.0.0.1:8080",
            look=self.observer.look,
            read_scores=lambda: self.scores,
            read_residents=lambda: self.residents,
            read_waiting=lambda: self.waiting,
            wait_for_change=lambda _seconds: False,
            read_notes=lambda: self.notes,
            take_snapshot=self.controller.snapshot,
            size=_size,
            catalogue=lambda: [{"id": "10gib", "parameters": 5}],
            search=lambda text: [FoundModel(candidate=one) for one in list_candidates(built_in(), text, READERS, 5)],
            engines=lambda: [{"name": "llamacpp", "available": True, "reason": None}],
        )

    def _note(self, what: str) -> Any:
        def act(name: str) -> bool:
            self.done.append((what, name, None))
            return True

        return act

    def _change(self, name: str, change: Change) -> Deployment:
        self.done.append(("change", name, change))
        (found,) = [one for one in self.controller.deployments() if one.name == name]
        priority = change.priority or found.ask.priority
        return replace(found, ask=replace(found.ask, priority=priority), keep_seconds=change.keep_seconds)

    async def _control_api(self, scope: Any, _receive: Any, send: Any) -> None:
        self.passed_on.append(dict(scope))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def _size(wanted: Deployment) -> Prepared:
    sized = wanted if wanted.model.endswith("gib") else replace(wanted, model="10gib")
    return Prepared(deployment=wanted, engine="llamacpp", footprint=size_by_name(sized, "llamacpp", None, "amd"))


@contextmanager
def local_page(root: Path, wanted: Sequence[Deployment] = (), **settings: Any) -> Iterator[LocalPage]:
    controller = boot(Machine(root=root))
    try:
        controller.apply([replace(one, ask=replace(one.ask, deployment=one.name)) for one in wanted])  # as a stack file is read
        yield LocalPage(controller, **settings)
    finally:
        controller.close()
