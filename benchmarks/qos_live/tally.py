"""What became of the requests of a block, and the figures of all blocks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aimgpu.domain import Priority
from benchmarks.qos.trace import Arrival


@dataclass(slots=True, kw_only=True)
class LiveTally:
    began: float
    judged_from: float  # seconds of the block, as those of arrivals
    judged_until: float
    offered: int = 0  # came in the judged time
    refused: int = 0  # by the queue
    failed: int = 0
    recalls: int = 0
    tokens: int = 0  # of requests that ended in the judged time
    longest_wait: float = 0.0  # until it started for good, of those that ended
    ttfts: list[float] = field(default_factory=list)  # of those who came in the judged time

    def note_arrival(self, arrival: Arrival) -> None:
        self.offered += self.judged_from <= arrival.seconds < self.judged_until

    def note_first_token(self, arrival: Arrival, seconds: float) -> None:
        if self.judged_from <= arrival.seconds < self.judged_until:
            self.ttfts.append(seconds)

    def note_refusal(self, status: int) -> None:
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.refused += 1
        else:
            self.failed += 1

    def note_done(self, tokens: int, recalls: int, waited: float) -> None:
        self.longest_wait = max(self.longest_wait, waited)
        if self.judged_from <= time.monotonic() - self.began < self.judged_until:
            self.tokens += tokens
            self.recalls += recalls


def summarise(policy: str, tallies: Mapping[Priority, LiveTally], promise: float) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy}
    for priority, tally in tallies.items():
        row[priority.value] = {
            "offered": tally.offered,
            "kept": sum(ttft <= promise for ttft in tally.ttfts),
            "refused": tally.refused,
            "failed": tally.failed,
            "recalls": tally.recalls,
            "tokens": tally.tokens,
            "longest_ttft_seconds": round(max(tally.ttfts, default=0.0), 2),
            "longest_wait_seconds": round(tally.longest_wait, 2),
        }
    return row


def make_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All rounds of a policy together; goodput against the FIFO blocks of the same rounds."""
    fifo = {row["round"]: row for row in rows if row["policy"] == "fifo"}
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(row["policy"] for row in rows):
        found = [row for row in rows if row["policy"] == name]
        offered = sum(row["high"]["offered"] for row in found)
        fifo_tokens = sum(fifo[row["round"]]["low"]["tokens"] for row in found)
        figures[name] = {
            "high_attainment": round(sum(row["high"]["kept"] for row in found) / max(offered, 1), 4),
            "high_judged": offered,
            "batch_goodput_x_fifo": round(sum(row["low"]["tokens"] for row in found) / max(fifo_tokens, 1), 3),
            "longest_low_wait_seconds": max(row["low"]["longest_wait_seconds"] for row in found),
            "recalls": sum(row["low"]["recalls"] for row in found),
        }
    figures["full_ttft_seconds"] = [row["full_ttft_seconds"] for row in rows if row["policy"] == "fifo"]
    return figures
