"""What came back for an HTTP request, whichever way it was sent."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Those of a stream, without its end."""
        found = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(data) for data in found if data != "[DONE]"]
