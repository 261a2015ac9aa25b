"""The same question as benchmarks.qos on a real engine: requests of three classes at 1.5 times what a running llama.cpp can do.

Start a model first (`aimgpu up --detach`) and name the folder of its instance (`$AIMGPU_HOME/runs/NAME-0-...`). Each round
gives every policy a block of its own, in another order each time. The engine is measured before every block, because a machine
that is also busy with other things changes its speed: the arrivals of the round's seed are 1.5 times what it does then, and the
promised time to the first token is four times the median of high requests while every slot is in use and nobody waits.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from aimgpu.domain import Priority
from benchmarks.qos_live_gateway import LiveGateway
from benchmarks.qos_live_tally import LiveTally, make_figures, summarise
from benchmarks.qos_replay import BASELINES, OURS, Policy
from benchmarks.qos_trace import Arrival, Lengths, Mix, generate_lengths, make_arrivals, read_lengths
from benchmarks.recording import write_result

OVERLOAD = 1.5
PROMISE_X_FULL = 4.0
WARM_SECONDS = 20.0  # the load is on, nobody is judged
PROMPT_PART, OUTPUT_PART = 200, 8  # lengths of the traces, divided: the engine is a small model on a processor
HIGH = Arrival(seconds=0.0, model="m", priority=Priority.HIGH, prompt_tokens=8, output_tokens=2)
LOW = Arrival(seconds=0.0, model="m", priority=Priority.LOW, prompt_tokens=14, output_tokens=20)
LONG_PROMPT = replace(LOW, prompt_tokens=100, output_tokens=1)
LONG_OUTPUT = replace(LOW, prompt_tokens=4, output_tokens=32)
ALONE = replace(BASELINES[0], name="alone")  # high work with the engine to itself: what no policy can beat
WORDS = ("river", "stone", "cloud", "lamp", "garden", "window", "paper", "bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one token costs when all slots are in use, and how soon a high request gets its first."""

    prompt_token_seconds: float
    output_token_seconds: float
    full_ttft_seconds: float

    def work_seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.prompt_token_seconds + output_tokens * self.output_token_seconds


class Caller:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._key = key

    async def ask(self, arrival: Arrival, headers: dict[str, str], tally: LiveTally | None = None) -> float | None:
        """Seconds to the first token; None where it was refused. Batch work is not streamed."""
        streamed = arrival.priority is not Priority.LOW
        body = {
            "model": "m",
            "stream": streamed,
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "prompt": " ".join(random.choices(WORDS, k=arrival.prompt_tokens)),  # noqa: S311  # a workload
        }
        began, first = time.monotonic(), None
        sent = headers | {"authorization": f"Bearer {self._key}"}
        async with self._session.post(self._url, json=body, headers=sent) as answer:
            if answer.status != 200:  # noqa: PLR2004
                await answer.read()
                if tally is not None:
                    tally.refused += 1
                return None
            async for line in answer.content:
                if first is None and line.strip():
                    first = time.monotonic() - began
                    if tally is not None:
                        tally.note_first_token(began, first)
        if tally is not None:
            waited = int(answer.headers.get("x-aimgpu-waited-ms", 0)) / 1000
            tally.note_done(arrival.output_tokens, int(answer.headers.get("x-aimgpu-recalls", 0)), waited)
        return first


async def measure(caller: Caller, slots: int, seconds: float, lengths: dict[Priority, Lengths]) -> Engine:
    """Straight at the engine: prompts alone, output alone, then high requests one by one while low ones fill the rest."""

    async def loop(arrival: Arrival, end: float, done: list[float], like: Lengths | None = None) -> None:
        while time.monotonic() < end:
            if like is not None:
                _, prompt, output = random.choice(like.rows)  # noqa: S311  # a workload
                arrival = replace(arrival, prompt_tokens=prompt, output_tokens=output)
            first = await caller.ask(arrival, {})
            done.append(first or 0.0)

    async def rate(arrival: Arrival) -> float:
        done: list[float] = []
        began = time.monotonic()
        await asyncio.gather(*(loop(arrival, began + seconds, done) for _ in range(slots)))
        return (time.monotonic() - began) / len(done)

    long_prompt, long_output = await rate(LONG_PROMPT), await rate(LONG_OUTPUT)
    output = long_output / LONG_OUTPUT.output_tokens
    firsts: list[float] = []
    end = time.monotonic() + 2 * seconds
    others = (loop(LOW, end, [], lengths[Priority.LOW]) for _ in range(slots - 1))
    await asyncio.gather(loop(HIGH, end, firsts, lengths[Priority.HIGH]), *others)
    return Engine(
        prompt_token_seconds=max(long_prompt - output, 0.0) / LONG_PROMPT.prompt_tokens,
        output_token_seconds=output,
        full_ttft_seconds=statistics.median(firsts),
    )


def small(lengths: dict[Priority, Lengths]) -> dict[Priority, Lengths]:
    def fit(prompt: int, output: int) -> tuple[int, int]:
        return max(4, prompt // PROMPT_PART), max(1, output // OUTPUT_PART)

    return {
        priority: Lengths(rows=tuple((at, *fit(prompt, output)) for at, prompt, output in found.rows))
        for priority, found in lengths.items()
    }


async def run_block(caller: Caller, policy: Policy, arrivals: list[Arrival], seconds: float, promise: float) -> dict[str, Any]:
    """Everybody who comes in the judged time has the whole promise to get a first token; then the block ends."""
    began = time.monotonic()
    judged_from, judged_until = began + WARM_SECONDS, began + WARM_SECONDS + seconds
    tallies = {priority: LiveTally(judged_from, judged_until) for priority in Priority}
    tasks = []
    for arrival in arrivals:
        await asyncio.sleep(began + arrival.seconds - time.monotonic())
        tally = tallies[arrival.priority]
        tally.offered += judged_from <= time.monotonic() < judged_until
        headers = {"x-aimgpu-priority": policy.class_of(arrival.priority).value}
        if policy.name == "deadline-first":
            patience = {Priority.HIGH: promise, Priority.MEDIUM: 2.5 * promise, Priority.LOW: 120.0}
            headers["x-aimgpu-deadline-ms"] = str(round(patience[arrival.priority] * 1000))
        tasks.append(asyncio.create_task(caller.ask(arrival, headers, tally)))
    await asyncio.sleep(judged_until + promise - time.monotonic())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return summarise(policy.name, tallies, promise)


async def run_round(given: argparse.Namespace, number: int, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    folder = Path(given.instance)
    url = json.loads((folder / "endpoint.json").read_text())["url"]
    key = (folder / "api-key").read_text()
    seed = given.seed + number
    lengths = small(read_lengths(Path(given.traces)) if given.traces else generate_lengths(seed))
    load = {Priority.HIGH: given.high, Priority.MEDIUM: given.medium, Priority.LOW: OVERLOAD - given.high - given.medium}
    mix = Mix(load=load, models=1, popularity=1.0, seconds=WARM_SECONDS + given.seconds, seed=seed)
    policies = [BASELINES[0], OURS, *((*BASELINES[1:], ALONE) if number % given.others_every == given.others_every - 1 else ())]
    random.Random(seed).shuffle(policies)  # noqa: S311  # the order of blocks
    rows = []
    for policy in policies:
        engine = await measure(Caller(session, url, key), given.slots, given.measure_seconds, lengths)
        promise = PROMISE_X_FULL * engine.full_ttft_seconds
        arrivals = make_arrivals(lengths, mix, engine.work_seconds)
        known = promise if policy.presses else None
        async with LiveGateway(policy.queue, url, key, slots=given.slots, promise_seconds=known) as gateway:
            offered = [each for each in arrivals if each.priority is Priority.HIGH] if policy is ALONE else arrivals
            row = await run_block(Caller(session, gateway.url, ""), policy, offered, given.seconds, promise)
        rows.append({"round": number, "promised_ttft_seconds": round(promise, 3)} | row)
        print(rows[-1], flush=True)
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", required=True, help="folder of a running llama.cpp instance")
    parser.add_argument("--traces", type=Path, default=os.environ.get("AIMGPU_TRACES"), help="folder; generated when missing")
    parser.add_argument("--slots", type=int, default=8, help="the model's `concurrency`")
    parser.add_argument("--high", type=float, default=0.04, help="offered high work, as a part of the engine")
    parser.add_argument("--medium", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each block, judged")
    parser.add_argument("--measure-seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--others-every", type=int, default=3, help="the policies beside FIFO and ours run every so many rounds"
    )
    parser.add_argument("--seed", type=int, default=201)
    given = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=None)
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as session:
        for number in range(given.rounds):
            rows += await run_round(given, number, session)
    figures = make_figures(rows)
    private = {str(given.instance): "FOLDER", str(given.traces): "DIR"}
    command = " ".join(("python -m benchmarks.qos_live", *(private.get(argument, argument) for argument in sys.argv[1:])))
    write_result("qos_live", figures, rows, packages=("xllamacpp",), command=command)
    for name, figure in figures.items():
        print(name, figure)


if __name__ == "__main__":
    asyncio.run(main())
