"""The gateway tells the gate when an instance begins and ends a request."""

import json
import threading
import urllib.request
from dataclasses import dataclass, field

from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import ScriptedEngine


@dataclass
class KeepingAnnouncer:
    told: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, instance_id: str) -> None:
        with self.lock:
            self.told.append(("begin", instance_id))

    def end(self, instance_id: str) -> None:
        with self.lock:
            self.told.append(("end", instance_id))


def test_every_request_is_announced_once_at_each_end(serve: Serve, engine: ScriptedEngine) -> None:
    served, announcer = serve(), KeepingAnnouncer()
    served.gateway.slots.announcer = announcer
    served.directory.serve("chat", engine)
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}).encode()
    for _ in range(3):
        request = urllib.request.Request(
            f"{served.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
    served.observer.wait_for(3)
    assert announcer.told == [("begin", "chat-0"), ("end", "chat-0")] * 3
