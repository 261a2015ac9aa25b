"""The requests that the gateways of a cluster finished, in one list. Prompts stay in none of them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.qos.slo.activity import ActivityLog, Turn


@dataclass(slots=True, kw_only=True)
class ReportedRequest:
    """A FinishedRequest of another process."""

    model: str
    instance_id: str | None
    caller: str
    priority: str
    status: int
    code: str | None
    streamed: bool
    queued_seconds: float
    first_byte_seconds: float | None
    seconds: float
    output_tokens: int | None
    recalls: int
    prompt: str | None = None


class ClusterActivity(ActivityLog):
    """Written on the event loop by the follower."""

    def __init__(self) -> None:
        super().__init__(time.time)
        self._read: dict[str, int] = {}  # by gateway: the last number that was taken

    def read_up_to(self, gateway: str) -> int:
        """The number of the last request that was taken from it."""
        return self._read.get(gateway, 0)

    def take(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """What each gateway reported last; one that has started again numbers from 1."""
        rows = []
        for gateway, report in reports.items():
            rows += report["requests"]
            self._read[gateway] = int(report["latest"])
        for row in sorted(rows, key=lambda one: float(one["ended"])):
            self.add(_request(row), float(row["ended"]))

    def turns(self, since: float) -> Iterator[Turn]:
        """From the requests themselves: only those that ended are known here."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for entry in self.requests():
            if entry.ended >= since and entry.sent is not None and entry.record.instance_id is not None:
                spans.setdefault(entry.record.instance_id, []).append((entry.sent, entry.ended))
        for instance, found in spans.items():
            yield from (Turn(instance, began, ended) for began, ended in _joined(found))


def _joined(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Stretches of time in which there was at least one."""
    began, until = None, 0.0
    for start, end in sorted(spans):
        if began is not None and start > until:
            yield began, until
            began = None
        began, until = (start, end) if began is None else (began, max(until, end))
    if began is not None:
        yield began, until


def _request(row: Mapping[str, Any]) -> ReportedRequest:
    instance = row.get("instance")
    return ReportedRequest(
        model=str(row["model"]),
        instance_id=str(instance).rpartition("/")[2] if instance else None,  # the page knows a pod by its name
        caller=str(row["caller"]),
        priority=str(row["priority"]),
        status=int(row["status"]),
        code=row.get("code"),
        streamed=bool(row["streamed"]),
        queued_seconds=float(row["queued_seconds"]),
        first_byte_seconds=row.get("first_byte_seconds"),
        seconds=float(row["seconds"]),
        output_tokens=row.get("tokens"),
        recalls=int(row["recalls"]),
    )
