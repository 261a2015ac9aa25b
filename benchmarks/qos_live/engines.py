"""The running engines of `make bench-qos-live`: one request, the shapes that must have run before, and what a token costs."""

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from aimgpu.domain import Priority
from benchmarks.qos.trace import Arrival, Lengths
from benchmarks.qos_live.gateway import Place
from benchmarks.qos_live.tally import LiveTally

HIGH = Arrival(seconds=0.0, model="m0", priority=Priority.HIGH, prompt_tokens=8, output_tokens=2)
LOW = Arrival(seconds=0.0, model="m0", priority=Priority.LOW, prompt_tokens=14, output_tokens=20)
LONGEST_MEASURED_PROMPT = 2048
STEADY_CHANGE = 1.15  # of the rate between two passes
WORDS = ("river", "stone", "cloud", "lamp", "garden", "window", "paper", "bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one token costs when all slots are in use, and how soon a high request gets its first."""

    prompt_token_seconds: float
    output_token_seconds: float
    mix_slowdown: float  # of both, against prompts alone and output alone
    full_ttft_seconds: float
    longest_full_ttft_seconds: float

    def work_seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.prompt_token_seconds + output_tokens * self.output_token_seconds


@dataclass(frozen=True, slots=True)
class Done:
    """A request that was answered; times of the monotonic clock."""

    arrival: Arrival
    began: float
    ended: float
    first: float  # seconds to the first token

    def part_until(self, end: float) -> float:
        """How much of it was done by then, as if it went on evenly."""
        return max(0.0, min(1.0, (end - self.began) / max(self.ended - self.began, 1e-9)))


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
                    tally.note_refusal(answer.status)
                return None
            async for line in answer.content:
                if first is None and line.strip():
                    first = time.monotonic() - began
                    if tally is not None:
                        tally.note_first_token(arrival, first)
        if tally is not None:
            waited = int(answer.headers.get("x-aimgpu-waited-ms", 0)) / 1000
            tally.note_done(arrival.output_tokens, int(answer.headers.get("x-aimgpu-recalls", 0)), waited)
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All engines, asked directly, with as many requests at once on each as it has slots."""

    caller: Caller
    models: Sequence[str]
    slots: int
    lengths: dict[Priority, Lengths]

    async def warm_up(self, pass_seconds: float, limit_seconds: float) -> list[float]:
        """Requests a second of each pass of the mix, until two passes agree.

        A GPU's kernels are loaded, or compiled from PTX, when their shape is first used: llama.cpp has other ones for every
        number of sequences in a batch up to 16, and one that is compiled stops its engine for seconds. So every width comes
        once before the mix, and some of them with longer prompts.
        """
        end = time.monotonic() + limit_seconds
        median = round(statistics.median(prompt for _, prompt, _ in self.lengths[Priority.LOW].rows))
        widths = range(1, self.slots + 1)
        shapes = [(4, width) for width in widths]
        shapes += [(max(4, median // part), width) for part in (50, 4) for width in widths if self.slots % width == 0]
        for prompt_tokens, width in shapes:
            if time.monotonic() < end:
                await self._ask_at_once(width, replace(LOW, prompt_tokens=prompt_tokens, output_tokens=4))
        rates: list[float] = []
        while time.monotonic() < end:
            done: list[Done] = []
            began = time.monotonic()
            await self._run_mix(began + pass_seconds, [], done)
            rates.append(round(len(done) / (time.monotonic() - began), 2))
            if len(rates) > 1 and max(rates[-2:]) <= STEADY_CHANGE * min(rates[-2:]):
                break
        return rates

    async def measure(self, seconds: float) -> Engine:
        """Prompts alone, output alone, then high requests one by one while low ones fill the rest.

        Both together may take much longer than each alone: what a token costs is scaled to what was done of the mix.
        """
        _, prompts, outputs = zip(*self.lengths[Priority.LOW].rows, strict=True)
        prompt_tokens = min(8 * round(statistics.median(prompts)), LONGEST_MEASURED_PROMPT)
        output_tokens = 2 * round(statistics.median(outputs))
        long_prompt = await self._rate(replace(LOW, prompt_tokens=prompt_tokens, output_tokens=1), seconds)
        output = await self._rate(replace(LOW, prompt_tokens=4, output_tokens=output_tokens), seconds) / output_tokens
        prompt = max(long_prompt - output, 0.0) / prompt_tokens
        highs: list[Done] = []
        lows: list[Done] = []
        began = time.monotonic()
        end = began + 2 * seconds
        await self._run_mix(end, highs, lows)
        work = sum(
            one.part_until(end) * (one.arrival.prompt_tokens * prompt + one.arrival.output_tokens * output)
            for one in (*highs, *lows)
        )
        slower = (end - began) / work
        firsts = [one.first for one in highs]
        return Engine(
            prompt_token_seconds=prompt * slower,
            output_token_seconds=output * slower,
            mix_slowdown=slower,
            full_ttft_seconds=statistics.median(firsts),
            longest_full_ttft_seconds=max(firsts),
        )

    async def settle(self) -> None:
        """Until every engine has answered: what was cancelled has left it."""
        await self._ask_at_once(1, HIGH)

    async def _ask_at_once(self, width: int, arrival: Arrival) -> None:
        each = (replace(arrival, model=model) for model in self.models for _ in range(width))
        await asyncio.gather(*(self.caller.ask(one, {}) for one in each))

    async def _rate(self, arrival: Arrival, seconds: float) -> float:
        """Seconds per request with all slots in use."""
        done: list[Done] = []
        began = time.monotonic()
        each = (replace(arrival, model=model) for model in self.models for _ in range(self.slots))
        await asyncio.gather(*(self._repeat(one, began + seconds, done) for one in each))
        return (time.monotonic() - began) / len(done)

    async def _run_mix(self, end: float, highs_done: list[Done], done: list[Done]) -> None:
        low, high = self.lengths[Priority.LOW], self.lengths[Priority.HIGH]
        others = (
            self._repeat(replace(LOW, model=model), end, done, low) for model in self.models for _ in range(self.slots - 1)
        )
        highs = (self._repeat(replace(HIGH, model=model), end, highs_done, high) for model in self.models)
        await asyncio.gather(*highs, *others)

    async def _repeat(self, arrival: Arrival, end: float, done: list[Done], like: Lengths | None = None) -> None:
        while time.monotonic() < end:
            if like is not None:
                _, prompt, output = random.choice(like.rows)  # noqa: S311  # a workload
                arrival = replace(arrival, prompt_tokens=prompt, output_tokens=output)
            began = time.monotonic()
            first = await self.caller.ask(arrival, {})
            done.append(Done(arrival, began, time.monotonic(), first or 0.0))
