"""The same question as benchmarks.qos on real engines: requests of three classes at 1.5 times what running llama.cpp can do.

Start the models first (`aimgpu up --detach`) and name the folders of their instances (`$AIMGPU_HOME/runs/NAME-0-...`), the
most popular first. They should share one device, as on a GPU: where that is a processor, `taskset` gives them one core and this
program another. Each round gives every policy a block of its own, in another order each time. The engines are measured before
every block, because a machine that is also busy with other things changes its speed: the arrivals of the round's seed are 1.5
times what they do then. Promised are the same times to the first token as in the replay on simulated engines.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from aimgpu.domain import Priority
from benchmarks.qos_live_gateway import DEVICE_ID, LiveGateway, Place
from benchmarks.qos_live_tally import LiveTally, make_figures, summarise
from benchmarks.qos_replay import BASELINES, OURS, TTFT_SECONDS, Policy
from benchmarks.qos_trace import Arrival, Lengths, Mix, generate_lengths, make_arrivals, read_lengths
from benchmarks.recording import write_result

OVERLOAD = 1.5
HIGH = Arrival(seconds=0.0, model="m0", priority=Priority.HIGH, prompt_tokens=8, output_tokens=2)
LOW = Arrival(seconds=0.0, model="m0", priority=Priority.LOW, prompt_tokens=14, output_tokens=20)
LONGEST_MEASURED_PROMPT = 4096
MAIN = ("fifo", "aimgpu")
ALONE = replace(BASELINES[0], name="alone")  # high work with the engine to itself: what no policy can beat
POLICIES = (*BASELINES, OURS, ALONE)
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
    def __init__(self, session: aiohttp.ClientSession, places: Mapping[str, Place]) -> None:
        self._session = session
        self._places = places

    async def ask(self, arrival: Arrival, headers: dict[str, str], tally: LiveTally | None = None) -> float | None:
        """Seconds to the first token; None where it was refused. Batch work is not streamed."""
        streamed = arrival.priority is not Priority.LOW
        body = {
            "model": arrival.model,
            "stream": streamed,
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "prompt": " ".join(random.choices(WORDS, k=arrival.prompt_tokens)),  # noqa: S311  # a workload
        }
        began, first = time.monotonic(), None
        place = self._places[arrival.model]
        sent = headers | {"authorization": f"Bearer {place.key}"}
        async with self._session.post(f"{place.url}/v1/completions", json=body, headers=sent) as answer:
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


async def measure(
    caller: Caller, models: Sequence[str], slots: int, seconds: float, lengths: dict[Priority, Lengths]
) -> Engine:
    """Straight at all engines: prompts alone, output alone, then high requests one by one while low ones fill the rest."""

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
        each = (replace(arrival, model=model) for model in models for _ in range(slots))
        await asyncio.gather(*(loop(one, began + seconds, done) for one in each))
        return (time.monotonic() - began) / len(done)

    _, prompts, outputs = zip(*lengths[Priority.LOW].rows, strict=True)
    prompt_tokens = min(8 * round(statistics.median(prompts)), LONGEST_MEASURED_PROMPT)
    output_tokens = 2 * round(statistics.median(outputs))
    long_prompt = await rate(replace(LOW, prompt_tokens=prompt_tokens, output_tokens=1))
    output = await rate(replace(LOW, prompt_tokens=4, output_tokens=output_tokens)) / output_tokens
    firsts: list[float] = []
    end = time.monotonic() + 2 * seconds
    others = (loop(replace(LOW, model=model), end, [], lengths[Priority.LOW]) for model in models for _ in range(slots - 1))
    highs = (loop(replace(HIGH, model=model), end, firsts, lengths[Priority.HIGH]) for model in models)
    await asyncio.gather(*highs, *others)
    return Engine(
        prompt_token_seconds=max(long_prompt - output, 0.0) / prompt_tokens,
        output_token_seconds=output,
        full_ttft_seconds=statistics.median(firsts),
    )


def shorten(lengths: dict[Priority, Lengths], prompt_part: int, output_part: int) -> dict[Priority, Lengths]:
    def fit(prompt: int, output: int) -> tuple[int, int]:
        return max(4, prompt // prompt_part), max(1, output // output_part)

    return {
        priority: Lengths(rows=tuple((at, *fit(prompt, output)) for at, prompt, output in found.rows))
        for priority, found in lengths.items()
    }


async def run_block(caller: Caller, policy: Policy, arrivals: list[Arrival], given: argparse.Namespace) -> dict[str, Any]:
    """Everybody who comes in the judged time has the whole promise to get a first token; then the block ends."""
    promise = TTFT_SECONDS[Priority.HIGH]
    began = time.monotonic()
    judged_from = began + given.warm_seconds
    judged_until = judged_from + given.seconds
    tallies = {priority: LiveTally(judged_from, judged_until) for priority in Priority}
    tasks = []
    for arrival in arrivals:
        await asyncio.sleep(began + arrival.seconds - time.monotonic())
        tally = tallies[arrival.priority]
        tally.offered += judged_from <= time.monotonic() < judged_until
        headers = {"x-aimgpu-priority": policy.class_of(arrival.priority).value}
        if policy.name == "deadline-first":
            headers["x-aimgpu-deadline-ms"] = str(round(TTFT_SECONDS[arrival.priority] * 1000))
        tasks.append(asyncio.create_task(caller.ask(arrival, headers, tally)))
    await asyncio.sleep(judged_until + promise - time.monotonic())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return summarise(policy.name, tallies, promise)


async def run_round(given: argparse.Namespace, number: int, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    places = {f"m{index}": read_place(folder) for index, folder in enumerate(given.instance)}
    seed = given.seed + number
    lengths = read_lengths(Path(given.traces)) if given.traces else generate_lengths(seed)
    lengths = shorten(lengths, given.prompt_part, given.output_part)
    load = {Priority.HIGH: given.high, Priority.MEDIUM: given.medium, Priority.LOW: OVERLOAD - given.high - given.medium}
    mix = Mix(load=load, models=len(places), popularity=1.0, seconds=given.warm_seconds + given.seconds, seed=seed)
    others = number % given.others_every == given.others_every - 1
    policies = [policy for policy in POLICIES if policy.name in given.policies or (others and policy.name not in MAIN)]
    random.Random(seed).shuffle(policies)  # noqa: S311  # the order of blocks
    limits = {DEVICE_ID: given.at_once} if given.at_once else {}
    measured_slots = math.ceil(given.at_once / len(places)) if given.at_once else given.slots
    rows = []
    for policy in policies:
        engine = await measure(Caller(session, places), list(places), measured_slots, given.measure_seconds, lengths)
        arrivals = make_arrivals(lengths, mix, engine.work_seconds)
        known = TTFT_SECONDS[Priority.HIGH] if policy.presses else None
        queue = replace(policy.queue, device_limits=limits)
        async with LiveGateway(queue, places, slots=given.slots, promise_seconds=known) as gateway:
            offered = [each for each in arrivals if each.priority is Priority.HIGH] if policy is ALONE else arrivals
            caller = Caller(session, dict.fromkeys(places, Place(gateway.url, "")))
            row = await run_block(caller, policy, offered, given)
        rows.append({"round": number, "full_ttft_seconds": round(engine.full_ttft_seconds, 3)} | row)
        print(rows[-1], flush=True)
    return rows


def read_place(folder: str) -> Place:
    url = json.loads((Path(folder) / "endpoint.json").read_text())["url"]
    return Place(url, (Path(folder) / "api-key").read_text())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", required=True, nargs="+", help="folders of running llama.cpp instances")
    parser.add_argument("--traces", type=Path, default=os.environ.get("AIMGPU_TRACES"), help="folder; generated when missing")
    parser.add_argument("--slots", type=int, default=8, help="the model's `concurrency`")
    parser.add_argument("--at-once", type=int, default=0, help="requests on the device at once, over all models; 0: no limit")
    parser.add_argument("--prompt-part", type=int, default=200, help="prompts of the traces are divided by this")
    parser.add_argument("--output-part", type=int, default=8, help="answers of the traces are divided by this")
    parser.add_argument("--high", type=float, default=0.04, help="offered high work, as a part of the engine")
    parser.add_argument("--medium", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each block, judged")
    parser.add_argument("--warm-seconds", type=float, default=20.0, help="before them: the load is on, nobody is judged")
    parser.add_argument("--measure-seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--others-every", type=int, default=3, help="the policies beside FIFO and ours run every so many rounds"
    )
    parser.add_argument("--device", default="one processor core", help="what the models share, for the record")
    parser.add_argument("--result", default="qos_live", help="name of the file under benchmarks/results")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=MAIN,
        choices=[each.name for each in POLICIES],
        help="those of every round, FIFO among them",
    )
    parser.add_argument("--seed", type=int, default=201)
    given = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=None)
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as session:
        for number in range(given.rounds):
            rows += await run_round(given, number, session)
            write(given, rows)


def write(given: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    figures = make_figures(rows) | {"device": given.device}
    private = dict.fromkeys(given.instance, "FOLDER") | {str(given.traces): "DIR"}
    command = " ".join(("python -m benchmarks.qos_live", *(private.get(argument, argument) for argument in sys.argv[1:])))
    write_result(given.result, figures, rows, packages=("xllamacpp",), command=command)
    for name, figure in figures.items():
        print(name, figure, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
