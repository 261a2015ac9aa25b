"""The replay on real engines is fair: same arrivals for all, turned order, requests that fit, engines that are warm."""

import argparse
import asyncio
from collections import Counter

from benchmarks.qos.trace import Arrival, Lengths, generate_lengths
from benchmarks.qos_live.engines import Caller, Done, Fleet
from benchmarks.qos_live.run import order_policies, shorten
from benchmarks.qos_live.tally import LiveTally

from aimgpu.domain import Priority

LENGTHS = generate_lengths(3)


class CountingCaller(Caller):
    """Answers at once and counts how many of a model's requests of a prompt length are in flight."""

    def __init__(self) -> None:
        self.widths: set[tuple[str, int, int]] = set()
        self._in_flight: Counter[tuple[str, int]] = Counter()

    async def ask(self, arrival: Arrival, headers: dict[str, str], tally: LiveTally | None = None) -> float | None:
        assert not headers
        assert tally is None
        key = (arrival.model, arrival.prompt_tokens)
        self._in_flight[key] += 1
        await asyncio.sleep(0)
        self.widths.add((*key, self._in_flight[key]))
        self._in_flight[key] -= 1
        return 0.01


def given(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{"policies": ["aimgpu", "fifo"], "others_every": 99, **values})


def names(number: int, **values: object) -> list[str]:
    return [policy.name for policy in order_policies(given(**values), number)]


def test_the_policies_change_places_from_one_round_to_the_next() -> None:
    assert names(0) + names(1) == ["aimgpu", "fifo", "fifo", "aimgpu"]


def test_the_other_policies_join_in_the_last_of_every_so_many_rounds() -> None:
    assert names(1, others_every=3) == ["fifo", "aimgpu"]
    assert set(names(2, others_every=3)) == {"aimgpu", "fifo", "strict", "deadline-first", "alone"}


def test_a_prompt_and_its_answer_fit_into_the_context() -> None:
    short = shorten(LENGTHS, given(prompt_part=1, output_part=1, context=8192))
    for priority, found in short.items():
        assert max(prompt + output for _, prompt, output in found.rows) < 8192
        assert [at for at, _, _ in found.rows] == [at for at, _, _ in LENGTHS[priority].rows]


def test_without_a_context_lengths_are_only_divided() -> None:
    short = shorten({Priority.LOW: Lengths(rows=((None, 8192, 1000),))}, given(prompt_part=2, output_part=8, context=0))
    assert short[Priority.LOW].rows == ((None, 4096, 125),)


def test_every_number_of_sequences_runs_on_every_model_before_anything_is_measured() -> None:
    caller = CountingCaller()
    fleet = Fleet(caller=caller, models=["m0", "m1"], slots=6, lengths=LENGTHS)
    asyncio.run(fleet.warm_up(pass_seconds=0.0, limit_seconds=60.0))
    for model in ("m0", "m1"):
        assert {width for name, prompt, width in caller.widths if (name, prompt) == (model, 4)} >= set(range(1, 7))
    assert max(prompt for _, prompt, _ in caller.widths) > 500


def test_only_what_arrives_in_the_judged_time_is_judged() -> None:
    tally = LiveTally(began=0.0, judged_from=5.0, judged_until=25.0)
    for seconds in (4.9, 5.0, 24.9, 25.0):
        arrival = Arrival(seconds=seconds, model="m0", priority=Priority.HIGH, prompt_tokens=8, output_tokens=2)
        tally.note_arrival(arrival)
        tally.note_first_token(arrival, seconds)
    assert (tally.offered, tally.ttfts) == (2, [5.0, 24.9])


def test_a_request_that_the_engine_cannot_take_is_not_counted_as_refused_by_the_queue() -> None:
    tally = LiveTally(began=0.0, judged_from=0.0, judged_until=1.0)
    for status in (400, 429, 500, 503):
        tally.note_refusal(status)
    assert (tally.refused, tally.failed) == (2, 2)


def test_a_request_counts_by_the_part_that_was_done_in_time() -> None:
    done = Done(Arrival(seconds=0.0, model="m0", priority=Priority.LOW, prompt_tokens=8, output_tokens=2), 10.0, 14.0, 0.1)
    assert [done.part_until(end) for end in (9.0, 11.0, 14.0, 20.0)] == [0.0, 0.25, 1.0, 1.0]
