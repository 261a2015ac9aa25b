"""The same question as benchmarks.qos on a real engine: requests of three classes at 1.5 times what a running model can do.

Start a stack first (`aimgpu up --detach`), then name the gateway. First all have one class, which is first come first served;
then each has its own. The promise comes from the engine itself, and the rate follows what it completes, so that a machine that
is also busy with other things is still offered 1.5 times what it can do.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.recording import write_result

SHARES = {"high": 0.1, "medium": 0.15, "low": 0.75}
WORDS = ("river", "stone", "cloud", "lamp", "garden", "window", "paper", "bridge")
OVERLOAD = 1.5
PROMISE_X_FULL = 4.0  # the promised TTFT of high work, in times of what it is while every slot is in use and nobody waits
RECENT_SECONDS = 20.0


@dataclass(slots=True)
class Tally:
    ttfts: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    failed: int = 0


class Live:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, tokens: int) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        self._model = model
        self._tokens = tokens
        self._completed: deque[float] = deque()

    async def ask(self, priority: str, tally: Tally) -> None:
        text = f"Write about a {random.choice(WORDS)} and a {random.choice(WORDS)}."  # noqa: S311  # a workload
        body = {
            "model": self._model,
            "stream": True,
            "max_tokens": self._tokens,
            "messages": [{"role": "user", "content": text}],
        }
        began, first = time.monotonic(), False
        async with self._session.post(self._url, json=body, headers={"x-aimgpu-priority": priority}) as answer:
            if answer.status != 200:  # noqa: PLR2004
                await answer.read()
                tally.refused += answer.status in {429, 503}
                tally.failed += answer.status not in {429, 503}
                return
            async for line in answer.content:
                if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    tally.tokens += 1
                    if not first:
                        first = True
                        tally.ttfts.append(time.monotonic() - began)
        self._completed.append(time.monotonic())

    async def fill(self, at_once: int, seconds: float) -> Tally:
        """Closed loop: every slot in use, nobody waits."""
        tally = Tally()
        end = time.monotonic() + seconds

        async def loop() -> None:
            while time.monotonic() < end:
                await self.ask("high", tally)

        await asyncio.gather(*(loop() for _ in range(at_once)))
        return tally

    def recent_rate(self) -> float:
        """Requests a second that the engine completed lately."""
        now = time.monotonic()
        while self._completed and self._completed[0] < now - RECENT_SECONDS:
            self._completed.popleft()
        return max(len(self._completed), 1) / RECENT_SECONDS

    async def offer(self, seconds: float, *, classes: bool) -> dict[str, Tally]:
        """Poisson arrivals; the same order of classes for both runs."""
        source = random.Random(7)  # noqa: S311  # a workload
        tallies = {name: Tally() for name in SHARES}
        tasks = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            [name] = source.choices(list(SHARES), list(SHARES.values()))
            tasks.append(asyncio.create_task(self.ask(name if classes else "medium", tallies[name])))
            await asyncio.sleep(source.expovariate(OVERLOAD * self.recent_rate()))
        await asyncio.gather(*tasks)
        return tallies


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--slots", type=int, default=2, help="the model's `concurrency`")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each run")
    given = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        live = Live(session, given.url, given.model, given.tokens)
        full = await live.fill(given.slots, RECENT_SECONDS)
        promise = PROMISE_X_FULL * statistics.median(full.ttfts)
        figures: dict[str, Any] = {"promised_ttft_seconds": round(promise, 3)}
        rows = []
        for name, classes in (("aimgpu", True), ("fifo", False)):  # what FIFO breaks must not press on the other run
            await live.fill(given.slots, RECENT_SECONDS)
            tallies = await live.offer(given.seconds, classes=classes)
            rows.append(_summarise(name, tallies, promise))
            print(rows[-1], flush=True)
    ours, fifo = rows
    for row in rows:
        figures[row["policy"]] = {"high_attainment": row["high"]["attainment"]}
    figures["aimgpu"]["batch_goodput_x_fifo"] = round(ours["low"]["tokens"] / max(fifo["low"]["tokens"], 1), 3)
    write_result("qos_live", figures, rows, packages=("xllamacpp",))
    print(figures)


def _summarise(policy: str, tallies: dict[str, Tally], promise: float) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy}
    for name, tally in tallies.items():
        offered = len(tally.ttfts) + tally.refused + tally.failed
        kept = sum(ttft <= promise for ttft in tally.ttfts)
        row[name] = {
            "offered": offered,
            "attainment": round(kept / offered, 4) if offered else None,
            "refused": tally.refused,
            "failed": tally.failed,
            "tokens": tally.tokens,
            "longest_ttft_seconds": round(max(tally.ttfts, default=0.0), 2),
        }
    return row


if __name__ == "__main__":
    asyncio.run(main())
