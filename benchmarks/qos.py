"""Who gets what when a GPU is offered more than it can do: our policy beside FIFO, strict priority and deadline-first.

Tight work (class high) is Azure's code trace, interactive work (medium) its conversation trace, batch work (low) the arXiv
lengths; models are chosen by a power law. Everything runs in virtual time on simulated engines, with the dispatcher, windows
and the pressure of the gateway.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.dispatcher import Dispatcher, Outcome, Refused, Started
from aimgpu.qos.objectives import Sample
from aimgpu.qos.policy import QueuePolicy
from aimgpu.qos.pressure import NO_PRESSURE, adjust_pressure
from aimgpu.qos.ticket import Ticket
from aimgpu.qos.tracker import ObjectiveTracker
from benchmarks.qos_engine import Job, SimulatedEngine, SimulatedGpu, work_seconds
from benchmarks.qos_trace import Arrival, Mix, generate_lengths, make_arrivals, read_lengths
from benchmarks.recording import write_result

NEVER = 1e9
UNJUDGED_SECONDS = 120.0
TTFT_SECONDS = {Priority.HIGH: 2.0, Priority.MEDIUM: 5.0, Priority.LOW: 120.0}
BOUNDS = {Priority.HIGH: 30.0, Priority.MEDIUM: 60.0, Priority.LOW: 120.0}
UNBOUNDED = QueuePolicy(
    longest_wait_seconds=dict.fromkeys(Priority, NEVER),
    most_queued=dict.fromkeys(Priority, 10**9),
    refuse_above=NEVER,
    reserve_part=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a policy of the comparison sees a request, and the queue it keeps."""

    name: str
    queue: QueuePolicy
    class_of: Callable[[Priority], Priority]
    patience_of: Callable[[Priority], float]
    expires: bool = False
    presses: bool = False
    tells_engine: bool = False  # the class goes along to the engine
    gated: bool = False  # with the launch gate of the isolation room


BASELINES = (
    Policy(name="fifo", queue=UNBOUNDED, class_of=lambda _: Priority.MEDIUM, patience_of=lambda _: NEVER),
    Policy(name="strict", queue=UNBOUNDED, class_of=lambda given: given, patience_of=lambda _: NEVER, tells_engine=True),
    Policy(name="deadline-first", queue=UNBOUNDED, class_of=lambda _: Priority.MEDIUM, patience_of=TTFT_SECONDS.__getitem__),
)


OURS = Policy(
    name="aimgpu",
    queue=QueuePolicy(longest_wait_seconds=BOUNDS),
    class_of=lambda given: given,
    patience_of=BOUNDS.__getitem__,
    expires=True,
    presses=True,
    tells_engine=True,
)
POLICIES = (*BASELINES, OURS, replace(OURS, name="aimgpu+gate", gated=True))


@dataclass(slots=True)
class Tally:
    """What became of one class."""

    offered: int = 0
    refused: int = 0
    expired: int = 0
    completed: int = 0
    kept: int = 0
    output_tokens: int = 0
    waits: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)


class Replay:
    def __init__(self, policy: Policy, models: int, slots: int) -> None:
        self.tallies = {priority: Tally() for priority in Priority}
        self._policy = policy
        engines = {
            f"m{index}": SimulatedEngine(f"m{index}-0", slots, takes_priority=policy.tells_engine) for index in range(models)
        }
        self._gpu = SimulatedGpu(engines, gated=policy.gated)
        self._dispatcher: Dispatcher[SimulatedEngine] = Dispatcher(policy.queue, lambda name: (engines[name],))
        self._given: dict[Ticket, Arrival] = {}
        self._tracker = ObjectiveTracker.for_objective(ServiceObjective(ttft_p95_ms=round(TTFT_SECONDS[Priority.HIGH] * 1000)))
        self._pressure = NO_PRESSURE
        self._next_tick = 0.0
        self._judged_until = 0.0

    def run(self, arrivals: Sequence[Arrival], seconds: float) -> None:
        """Until the time is over. Who comes in the last minutes loads the GPU but is not judged: its end is not seen."""
        self._judged_until = seconds - UNJUDGED_SECONDS
        index = 0
        gpu = self._gpu
        while gpu.now < seconds:
            while index < len(arrivals) and arrivals[index].seconds <= gpu.now:
                self._arrive(arrivals[index])
                index += 1
            if gpu.now >= self._next_tick:
                self._tick()
            if gpu.busy:
                for job in gpu.iterate():
                    self._finish(job)
            elif index < len(arrivals):
                gpu.now = max(gpu.now, arrivals[index].seconds)
            else:
                return

    def _arrive(self, arrival: Arrival) -> None:
        tally = self.tallies[arrival.priority]
        tally.offered += arrival.seconds <= self._judged_until
        now = self._gpu.now
        patience = self._policy.patience_of(arrival.priority)
        ticket = Ticket(
            model=arrival.model,
            priority=self._policy.class_of(arrival.priority),
            arrived=arrival.seconds,
            due=arrival.seconds + patience,
        )
        self._given[ticket] = arrival
        answer = self._dispatcher.submit(ticket, now)
        if isinstance(answer, Started):
            self._start(answer)
        elif isinstance(answer, Refused):
            tally.refused += 1
            self._note_failure(arrival)

    def _start(self, started: Started[SimulatedEngine]) -> None:
        arrival = self._given[started.ticket]
        self.tallies[arrival.priority].waits.append(self._gpu.now - arrival.seconds)
        started.server.jobs.append(
            Job(started.ticket, started.server.instance_id, arrival.prompt_tokens, arrival.output_tokens)
        )

    def _finish(self, job: Job) -> None:
        arrival = self._given.pop(job.ticket)
        now = self._gpu.now
        assert job.first_token is not None  # noqa: S101  # it ended
        tally = self.tallies[arrival.priority]
        tally.completed += 1
        tally.output_tokens += job.output_tokens
        ttft = job.first_token - arrival.seconds
        tally.ttfts.append(ttft)
        tally.kept += ttft <= TTFT_SECONDS[arrival.priority] and arrival.seconds <= self._judged_until
        if arrival.priority is Priority.HIGH:
            self._tracker.record(Sample(failed=False, ttft_seconds=ttft), now)
        self._dispatcher.finish(job.ticket, self._gpu.engines[arrival.model], Outcome.OK, now)
        for started in self._dispatcher.start_waiting(now):
            self._start(started)

    def _tick(self) -> None:
        now = self._gpu.now
        self._next_tick = now + 0.05
        if self._policy.expires:
            for ticket in self._dispatcher.expire(now):
                arrival = self._given.pop(ticket)
                self.tallies[arrival.priority].expired += 1
                self._note_failure(arrival)
        if self._policy.presses and int(now) != int(now - 0.05):
            self._pressure = adjust_pressure(self._pressure, "high", self._tracker.fast_burn(now))
            self._dispatcher.low_shares["gpu0"] = self._pressure.low_share
            (self._dispatcher.shed_low.add if self._pressure.shed else self._dispatcher.shed_low.discard)("gpu0")
        for started in self._dispatcher.start_waiting(now):
            self._start(started)

    def _note_failure(self, arrival: Arrival) -> None:
        if arrival.priority is Priority.HIGH:
            self._tracker.record(Sample(failed=True), self._gpu.now)


def summarise(policy: str, tallies: dict[Priority, Tally]) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy}
    for priority, tally in tallies.items():
        ordered = sorted(tally.ttfts)
        row[priority.value] = {
            "offered": tally.offered,
            "completed": tally.completed,
            "refused": tally.refused,
            "expired": tally.expired,
            "attainment": round(tally.kept / tally.offered, 4) if tally.offered else None,
            "output_tokens": tally.output_tokens,
            "ttft_p95_seconds": round(ordered[int(0.95 * (len(ordered) - 1))], 3) if ordered else None,
            "longest_wait_seconds": round(max(tally.waits, default=0.0), 2),
        }
    return row


def make_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the worst attainment, goodput and wait, so that no lucky draw counts."""
    fifo = {row["seed"]: row for row in rows if row["policy"] == "fifo"}
    figures = {}
    for policy in POLICIES:
        found = [row for row in rows if row["policy"] == policy.name]
        goodput = [row["low"]["output_tokens"] / fifo[row["seed"]]["low"]["output_tokens"] for row in found]
        figures[policy.name] = {
            "high_attainment": min(row["high"]["attainment"] for row in found),
            "medium_attainment": min(row["medium"]["attainment"] for row in found),
            "batch_goodput_x_fifo": round(min(goodput), 3),
            "longest_wait_seconds": max(row["low"]["longest_wait_seconds"] for row in found),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("AIMGPU_TRACES"), help="folder; generated when missing")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of virtual time")
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--high", type=float, default=0.04, help="offered tight work, as a part of the GPU")
    parser.add_argument("--medium", type=float, default=0.1)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="each chooses other models and other batch work"
    )
    given = parser.parse_args()
    load = {Priority.HIGH: given.high, Priority.MEDIUM: given.medium, Priority.LOW: given.overload - given.high - given.medium}
    rows = []
    for seed in given.seeds:
        lengths = read_lengths(Path(given.traces)) if given.traces else generate_lengths(seed)
        mix = Mix(load=load, models=given.models, popularity=1.0, seconds=given.seconds, seed=seed)
        arrivals = make_arrivals(lengths, mix, lambda prompt, output: work_seconds(prompt, output, given.slots))
        for policy in POLICIES:
            replay = Replay(policy, given.models, given.slots)
            replay.run(arrivals, given.seconds)
            rows.append({"seed": seed} | summarise(policy.name, replay.tallies))
            print(rows[-1], flush=True)
    figures = make_figures(rows)
    figures["trace"] = "azure-2023 and arxiv" if given.traces else "generated"
    figures["low_wait_bound_seconds"] = BOUNDS[Priority.LOW]
    write_result("qos", figures, rows)
    for name, figure in figures.items():
        print(name, figure)


if __name__ == "__main__":
    main()
