"""Mixed load for half an hour while engines are killed at random: every request answered once, nothing leaked, memory flat."""

import argparse
import asyncio
import collections
import json
import random
import subprocess
import sys
import time
from typing import Any

import aiohttp

from benchmarks.gateway.peers import free_port
from benchmarks.recording import write_result

MODELS = ("chat", "code", "batch")
CLASSES = ("high", "medium", "low")
SETTLE_SECONDS = 60.0


class Engines:
    """Five engine processes; a killed one is started again after a moment."""

    def __init__(self, count: int) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.kills = 0
        self._processes = [self._start(port) for port in self.ports]

    def kill_one(self) -> int:
        index = random.randrange(len(self.ports))  # noqa: S311  # chaos, not a secret
        self._processes[index].kill()
        self._processes[index].wait()
        self.kills += 1
        return index

    def revive(self, index: int) -> None:
        self._processes[index] = self._start(self.ports[index])

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.soak.engine", str(port)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)  # it complains of every caller who leaves


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=24)
    given = parser.parse_args()
    engines = Engines(5)
    port = free_port()
    gateway = subprocess.Popen(  # noqa: ASYNC220  # once, before the load
        [sys.executable, "-m", "benchmarks.soak.gateway", str(port), *map(str, engines.ports)]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await _wait_until_up(session, url)
            rows, outcomes = await _soak(session, url, engines, given)
            await asyncio.sleep(2)
            last = await _look(session, url)
    finally:
        gateway.terminate()
        gateway.wait()
        engines.stop()
    settled = [row["rss_bytes"] for row in rows if row["seconds"] >= min(SETTLE_SECONDS, given.minutes * 30)]
    quarter = max(len(settled) // 4, 1)
    growth = sum(settled[-quarter:]) / quarter - sum(settled[:quarter]) / quarter
    figures = {
        "minutes": given.minutes,
        "requests": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "unanswered": outcomes["unanswered"],
        "engines_killed": engines.kills,
        "recalls": last["recalls"],
        "left_in_flight": sum(last["in_flight"].values()),
        "left_queued": sum(last["queued"].values()),
        "rss_growth_mb": round(growth / 1e6, 2),
        "rss_mb": round(settled[-1] / 1e6, 1),
    }
    write_result("soak", figures, rows, packages=("uvicorn", "uvloop"))
    print(json.dumps(figures, indent=1))


async def _soak(
    session: aiohttp.ClientSession, url: str, engines: Engines, given: argparse.Namespace
) -> tuple[list[dict[str, Any]], collections.Counter[str]]:
    end = time.monotonic() + given.minutes * 60
    began = time.monotonic()
    outcomes: collections.Counter[str] = collections.Counter()
    callers = [asyncio.create_task(_call_until(session, url, end, outcomes)) for _ in range(given.callers)]
    chaos = asyncio.create_task(_kill_until(engines, end))
    rows = []
    while time.monotonic() < end:
        await asyncio.sleep(min(10.0, given.minutes * 6))
        look = await _look(session, url)
        rows.append({"seconds": round(time.monotonic() - began, 1), "rss_bytes": look["rss_bytes"]})
    await asyncio.gather(*callers, chaos)
    return rows, outcomes


async def _call_until(session: aiohttp.ClientSession, url: str, end: float, outcomes: collections.Counter[str]) -> None:
    while time.monotonic() < end:
        outcomes[await _call(session, url)] += 1


async def _call(session: aiohttp.ClientSession, url: str) -> str:
    """One request of a random kind, and what became of it."""
    streamed = random.random() < 0.6  # noqa: S311, PLR2004
    leaves = random.random() < 0.1  # noqa: S311, PLR2004
    body = {
        "model": random.choice(MODELS),  # noqa: S311
        "stream": streamed,
        "messages": [{"role": "user", "content": "x" * random.randint(1, 2000)}],  # noqa: S311
    }
    timeout = aiohttp.ClientTimeout(total=180)
    try:
        headers = {"x-aimgpu-priority": random.choice(CLASSES)}  # noqa: S311
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout) as answer:
            if leaves and streamed:
                await answer.content.readany()
                return "left"
            text = await answer.read()
    except (TimeoutError, aiohttp.ClientError):
        return "unanswered"
    return _judge(answer.status, text, streamed=streamed)


def _judge(status: int, text: bytes, *, streamed: bool) -> str:
    """A stream must end once, with [DONE] or with an error; anything else is not an answer."""
    if status != 200:  # noqa: PLR2004
        return f"refused {status}" if b'"error"' in text else "unanswered"
    if not streamed:
        return "ok" if json.loads(text)["object"] == "chat.completion" else "unanswered"
    if text.endswith(b"data: [DONE]\n\n"):
        return "ok"
    return "honest error" if text.count(b'data: {"error"') == 1 and text.endswith(b"\n\n") else "unanswered"


async def _kill_until(engines: Engines, end: float) -> None:
    while time.monotonic() < end - 5:
        await asyncio.sleep(random.uniform(1, 6))  # noqa: S311
        index = await asyncio.to_thread(engines.kill_one)
        await asyncio.sleep(random.uniform(0.2, 2))  # noqa: S311
        engines.revive(index)


async def _look(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/soak") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def _wait_until_up(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            await _look(session, url)
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
        else:
            return
    raise SystemExit("the gateway did not start")


if __name__ == "__main__":
    asyncio.run(main())
