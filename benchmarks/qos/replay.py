"""One replay in virtual time: arrivals, a policy, simulated engines, and the dispatcher and pressure of the gateway."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.qos.queueing.dispatcher import Dispatcher, Refused, RequestOutcome, Started
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.recalls import RecallPolicy
from aimgpu.qos.queueing.ticket import Ticket
from aimgpu.qos.slo.objectives import Sample
from aimgpu.qos.slo.pressure import NO_PRESSURE, adjust_pressure
from aimgpu.qos.slo.tracker import ObjectiveTracker
from benchmarks.qos.engine import Job, SimulatedEngine, SimulatedGpu
from benchmarks.qos.trace import Arrival

NEVER = 1e9
UNJUDGED_SECONDS = 120.0
TTFT_SECONDS = {Priority.HIGH: 2.0, Priority.MEDIUM: 5.0, Priority.LOW: 120.0}
BOUNDS = {Priority.HIGH: 30.0, Priority.MEDIUM: 60.0, Priority.LOW: 120.0}
UNBOUNDED = QueuePolicy(
    longest_wait_seconds=dict.fromkeys(Priority, NEVER),
    most_queued=dict.fromkeys(Priority, 10**9),
    refuse_above=dict.fromkeys(Priority, NEVER),
    reserve_part=0.0,
    recall=RecallPolicy(most=0),
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
    recalled: int = 0
    lost_seconds: float = 0.0
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
                done, begun = gpu.iterate()
                for job in begun:
                    if job.ticket in self._given and self._given[job.ticket].priority is not Priority.LOW:
                        self._dispatcher.note_first_byte(job.ticket, gpu.engines[job.ticket.model], gpu.now)
                for job in done:
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
            promised_seconds=TTFT_SECONDS[Priority.HIGH] if self._promises(arrival) else None,
        )
        self._given[ticket] = arrival
        answer = self._dispatcher.submit(ticket, now)
        if isinstance(answer, Started):
            self._start(answer)
        elif isinstance(answer, Refused):
            tally.refused += 1
            self._note_failure(arrival)
        elif arrival.priority is Priority.HIGH:
            self._recall()

    def _promises(self, arrival: Arrival) -> bool:
        """Only our policy knows of the promise; the others are judged by it."""
        return self._policy.presses and arrival.priority is Priority.HIGH

    def _recall(self) -> None:
        """Lower work whose caller has seen nothing makes way; batch work is not streamed, so that is until its end."""
        now = self._gpu.now
        for chosen in self._dispatcher.choose_recalls(now):
            [job] = [job for job in chosen.backend.jobs if job.ticket is chosen.ticket]
            chosen.backend.jobs.remove(job)
            tally = self.tallies[self._given[chosen.ticket].priority]
            tally.recalled += 1
            tally.lost_seconds += now - (chosen.ticket.started or now)
            self._dispatcher.take_back(chosen.ticket, chosen.backend)
            self._dispatcher.queue_again(chosen.ticket)
        for started in self._dispatcher.start_waiting(now):
            self._start(started)

    def _start(self, started: Started[SimulatedEngine]) -> None:
        arrival = self._given[started.ticket]
        tally = self.tallies[arrival.priority]
        tally.waits.append(self._gpu.now - arrival.seconds)
        started.backend.jobs.append(
            Job(started.ticket, started.backend.instance_id, arrival.prompt_tokens, arrival.output_tokens)
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
        self._dispatcher.finish(job.ticket, self._gpu.engines[arrival.model], RequestOutcome.OK, now)
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
            self._pressure = adjust_pressure(self._pressure, "high", self._tracker.burning(now))
            self._dispatcher.low_shares["gpu0"] = self._pressure.low_share
            (self._dispatcher.shed_low.add if self._pressure.shed else self._dispatcher.shed_low.discard)("gpu0")
        self._recall()

    def _note_failure(self, arrival: Arrival) -> None:
        if arrival.priority is Priority.HIGH:
            self._tracker.record(Sample(failed=True), self._gpu.now)
