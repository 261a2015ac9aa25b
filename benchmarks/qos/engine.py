"""A GPU in virtual time: engines with continuous batching that take turns on it, one iteration each.

The three costs are of the size of a 7B model on a data-centre GPU. They are assumptions, not measurements: what is compared are
policies on the same engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from aimgpu.domain import Priority
from aimgpu.qos.queueing.ticket import Ticket

ITERATION_SECONDS = 0.008
PREFILL_TOKEN_SECONDS = 50e-6
DECODE_TOKEN_SECONDS = 0.0003
PREFILL_CHUNK = 2048


@dataclass(slots=True, eq=False)
class Job:
    ticket: Ticket
    instance_id: str
    prefill_left: int
    output_tokens: int
    made: int = 0
    first_token: float | None = None
    ended: float | None = None


@dataclass(slots=True)
class SimulatedEngine:
    """One instance on the shared GPU."""

    instance_id: str
    slots: int
    device_id: str | None = "gpu0"
    takes_priority: bool = False  # prompts of higher classes are read first, as vLLM does when it is told
    jobs: list[Job] = field(default_factory=list)

    @property
    def has_high(self) -> bool:
        return any(job.ticket.priority is Priority.HIGH for job in self.jobs)

    def iterate(self, now: float) -> tuple[float, list[Job], list[Job]]:
        """When the iteration ends, the jobs that end with it, and those that made their first token in it."""
        budget = PREFILL_CHUNK
        prefilled = decoded = 0
        producing: list[Job] = []
        jobs = sorted(self.jobs, key=lambda job: -job.ticket.priority.rank) if self.takes_priority else self.jobs
        for job in jobs:
            if job.prefill_left:
                part = min(job.prefill_left, budget)
                budget -= part
                prefilled += part
                job.prefill_left -= part
                if job.prefill_left == 0 and part:
                    producing.append(job)
            else:
                decoded += 1
                producing.append(job)
        end = now + ITERATION_SECONDS + prefilled * PREFILL_TOKEN_SECONDS + decoded * DECODE_TOKEN_SECONDS
        done, begun = [], []
        for job in producing:
            job.made += 1
            if job.first_token is None:
                job.first_token = end
                begun.append(job)
            if job.made >= job.output_tokens:
                job.ended = end
                done.append(job)
        for job in done:
            self.jobs.remove(job)
        return end, done, begun


@dataclass(slots=True)
class SimulatedGpu:
    engines: dict[str, SimulatedEngine]
    gated: bool = False  # engines with high work go first, as with the launch gate of the isolation room
    now: float = 0.0
    _turn: int = 0
    _order: list[SimulatedEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = list(self.engines.values())

    @property
    def busy(self) -> bool:
        return any(engine.jobs for engine in self.engines.values())

    def iterate(self) -> tuple[list[Job], list[Job]]:
        """The next engine with work has its turn: the jobs that end with it, and those that begin to answer."""
        ready = [engine for engine in self._next_engines() if engine.jobs]
        if self.gated:
            ready = [engine for engine in ready if engine.has_high] or ready
        self._turn = self._order.index(ready[0])
        self.now, done, begun = ready[0].iterate(self.now)
        return done, begun

    def _next_engines(self) -> Iterator[SimulatedEngine]:
        count = len(self._order)
        return (self._order[(self._turn + step) % count] for step in range(1, count + 1))


def work_seconds(prompt_tokens: int, output_tokens: int, slots: int) -> float:
    """GPU time of one request when its engine is full: what one of `slots` costs in a shared iteration."""
    per_token = ITERATION_SECONDS / slots + DECODE_TOKEN_SECONDS
    return prompt_tokens * PREFILL_TOKEN_SECONDS + output_tokens * per_token
