"""The same question as `make bench-qos` on real engines: requests of three classes at 1.5 times what running llama.cpp can do.

Start the models first (`aimgpu up --detach`) and name the folders of their instances (`$AIMGPU_HOME/runs/NAME-0-...`), the
most popular first. They should share one device, as on a GPU: where that is a processor, `taskset` gives them one core and this
program another. Before the first round the engines are warmed up until their rate is steady. Each round makes arrivals of 1.5
times what the engines do, measured before it (or before every so many rounds), and gives every policy a block with these same
arrivals; the order of the policies changes from one round to the next (ours, FIFO, FIFO, ours). Promised are the same times to
the first token as in the replay on simulated engines.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from aimgpu.domain import Priority
from benchmarks.qos.replay import BASELINES, OURS, TTFT_SECONDS, Policy
from benchmarks.qos.trace import Arrival, Lengths, Mix, generate_lengths, make_arrivals, read_lengths
from benchmarks.qos_live.engines import Caller, Engine, Fleet
from benchmarks.qos_live.gateway import DEVICE_ID, LiveGateway, Place
from benchmarks.qos_live.tally import LiveTally, make_figures, summarise
from benchmarks.recording import write_result

OVERLOAD = 1.5
MAIN = ("aimgpu", "fifo")
SPECIAL_TOKENS = 8  # that a tokenizer may add to a prompt
ALONE = replace(BASELINES[0], name="alone")  # high work with the engine to itself: what no policy can beat
POLICIES = (*BASELINES, OURS, ALONE)


def shorten(lengths: dict[Priority, Lengths], given: argparse.Namespace) -> dict[Priority, Lengths]:
    """To the size of the model, and so that a prompt and its answer fit into the context."""

    def fit(prompt: int, output: int) -> tuple[int, int]:
        answer = max(1, output // given.output_part)
        longest = given.context - answer - SPECIAL_TOKENS if given.context else prompt
        return max(4, min(prompt // given.prompt_part, longest)), answer

    return {
        priority: Lengths(rows=tuple((at, *fit(prompt, output)) for at, prompt, output in found.rows))
        for priority, found in lengths.items()
    }


async def run_block(caller: Caller, policy: Policy, arrivals: list[Arrival], given: argparse.Namespace) -> dict[str, Any]:
    """Everybody who comes in the judged time has the whole promise to get a first token; then the block ends."""
    promise = TTFT_SECONDS[Priority.HIGH]
    began = time.monotonic()
    judged_until = given.warm_seconds + given.seconds
    tallies = {
        priority: LiveTally(began=began, judged_from=given.warm_seconds, judged_until=judged_until) for priority in Priority
    }
    tasks = []
    for arrival in arrivals:
        await asyncio.sleep(began + arrival.seconds - time.monotonic())
        tally = tallies[arrival.priority]
        tally.note_arrival(arrival)
        headers = {"x-aimgpu-priority": policy.class_of(arrival.priority).value}
        if policy.name == "deadline-first":
            headers["x-aimgpu-deadline-ms"] = str(round(TTFT_SECONDS[arrival.priority] * 1000))
        tasks.append(asyncio.create_task(caller.ask(arrival, headers, tally)))
    await asyncio.sleep(began + judged_until + promise - time.monotonic())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return summarise(policy.name, tallies, promise)


async def run_round(
    given: argparse.Namespace, number: int, fleet: Fleet, engine: Engine, session: aiohttp.ClientSession
) -> list[dict[str, Any]]:
    """One list of arrivals, one block for each policy."""
    places = read_places(given)
    seconds = given.warm_seconds + given.seconds
    load = {Priority.HIGH: given.high, Priority.MEDIUM: given.medium, Priority.LOW: OVERLOAD - given.high - given.medium}
    mix = Mix(load=load, models=len(places), popularity=1.0, seconds=seconds, seed=given.seed + number)
    arrivals = make_arrivals(fleet.lengths, mix, engine.work_seconds)
    rows = []
    for policy in order_policies(given, number):
        await fleet.settle()
        known = TTFT_SECONDS[Priority.HIGH] if policy.presses else None
        queue = replace(policy.queue, device_limits={DEVICE_ID: given.at_once} if given.at_once else {})
        async with LiveGateway(queue, places, slots=given.slots, promise_seconds=known) as gateway:
            offered = [each for each in arrivals if each.priority is Priority.HIGH] if policy is ALONE else arrivals
            caller = Caller(session, dict.fromkeys(places, Place(gateway.url, "")))
            row = await run_block(caller, policy, offered, given)
        measured = {
            "full_ttft_seconds": round(engine.full_ttft_seconds, 3),
            "longest_full_ttft_seconds": round(engine.longest_full_ttft_seconds, 3),
            "mix_slowdown": round(engine.mix_slowdown, 2),
        }
        rows.append({"round": number} | measured | row)
        print(rows[-1], flush=True)
    return rows


def order_policies(given: argparse.Namespace, number: int) -> list[Policy]:
    """Ours first in even rounds and last in odd ones; the rarer policies in the last of every so many rounds."""
    others = number % given.others_every == given.others_every - 1
    named = {policy.name: policy for policy in POLICIES}
    chosen = [*given.policies, *(name for name in named if others and name not in (*MAIN, *given.policies))]
    return [named[name] for name in (chosen if number % 2 == 0 else reversed(chosen))]


def read_places(given: argparse.Namespace) -> dict[str, Place]:
    return {f"m{index}": read_place(folder) for index, folder in enumerate(given.instance)}


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
    parser.add_argument("--context", type=int, default=0, help="of a slot: longer requests are cut to it; 0: none is longer")
    parser.add_argument("--high", type=float, default=0.04, help="offered high work, as a part of the engine")
    parser.add_argument("--medium", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each block, judged")
    parser.add_argument("--warm-seconds", type=float, default=20.0, help="before them: the load is on, nobody is judged")
    parser.add_argument("--measure-seconds", type=float, default=6.0)
    parser.add_argument("--measure-every", type=int, default=1, help="rounds")
    parser.add_argument("--warm-up-limit", type=float, default=60.0, help="seconds in which the engines are to get steady")
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
    places = read_places(given)
    slots = math.ceil(given.at_once / len(places)) if given.at_once else given.slots
    lengths = shorten(read_lengths(Path(given.traces)) if given.traces else generate_lengths(given.seed), given)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as session:
        fleet = Fleet(caller=Caller(session, places), models=list(places), slots=slots, lengths=lengths)
        rates = await fleet.warm_up(given.measure_seconds, given.warm_up_limit)
        print("requests a second while warming up", rates, flush=True)
        for number in range(given.rounds):
            if number % given.measure_every == 0:
                engine = await fleet.measure(given.measure_seconds)
                print(engine, flush=True)
            rows += await run_round(given, number, fleet, engine, session)
            write(given, rows, rates)


def write(given: argparse.Namespace, rows: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> None:
    figures = make_figures(rows) | {"device": given.device, "warm_up_requests_per_second": list(rates)}
    private = dict.fromkeys(given.instance, "FOLDER") | {str(given.traces): "DIR"}
    command = " ".join(("python -m benchmarks.qos_live.run", *(private.get(argument, argument) for argument in sys.argv[1:])))
    write_result(given.result, figures, rows, packages=("xllamacpp",), command=command)
    for name, figure in figures.items():
        print(name, figure, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
