"""The gateway signals where an instance begins and ends a request."""

import threading
from dataclasses import dataclass, field

from tests.gateway import scripted_engine as scripts
from tests.gateway.calling import chat, open_chat
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import ScriptedEngine


@dataclass
class KeepingSignal:
    events: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self) -> None:
        self._keep("begin")

    def end(self) -> None:
        self._keep("end")

    def wait_for(self, events: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.events == events, timeout=30), self.events

    def _keep(self, event: str) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()


def test_every_request_is_signalled_once_at_each_end(serve: Serve, engine: ScriptedEngine) -> None:
    served, signal = serve(), KeepingSignal()
    served.routes.serve("chat", engine, signals=(signal,))
    for _ in range(3):
        assert chat(served.port).status == 200
    signal.wait_for(["begin", "end"] * 3)


def test_a_caller_who_leaves_ends_the_signal(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = scripts.silent_until_gone
    served, signal = serve(), KeepingSignal()
    served.routes.serve("chat", engine, signals=(signal,))
    with open_chat(served.port):
        signal.wait_for(["begin"])
    signal.wait_for(["begin", "end"])
