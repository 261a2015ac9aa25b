"""Who goes first and whether promises hold, for people who run their own loop: the qos room behind four verbs."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import InvalidInput, NotFound, QueueFull
from aimgpu.qos.queueing.guarantees import Guarantee, check_guarantees
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.queue import ClassQueue
from aimgpu.qos.queueing.ticket import Ticket, TicketState
from aimgpu.qos.slo.objectives import Sample
from aimgpu.qos.slo.scores import ModelScores
from aimgpu.qos.slo.throughput import Flow
from aimgpu.qos.slo.tracker import TargetReport
from aimgpu.units import PPM

_FAST_WINDOW = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QoSRequest:
    """What `next` hands out; pass its id to `complete`."""

    id: str
    model: str
    priority: Priority
    waited_seconds: float
    payload: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compliance:
    """`compliant`: every objective of which enough was seen is kept; None: nothing was promised, or nothing seen.

    `targets` are the model's, `classes` those of classes with promises of their own; both speak for six hours. Percentiles are
    {"ttft" | "tpot" | "latency": {0.5 | 0.9 | 0.95 | 0.99: seconds}} and rates are by time, over the last five minutes.
    """

    compliant: bool | None
    objective: ServiceObjective | None
    targets: tuple[TargetReport, ...]
    percentiles: Mapping[str, Mapping[float, float]]
    requests_per_second: float | None
    output_tokens_per_second: float | None
    requests: int
    failures: int
    classes: Mapping[Priority, tuple[TargetReport, ...]]


class QoSManager:
    """Safe to use from several threads. Requests that waited longer than their class may are dropped by `next`."""

    def __init__(self, policy: QueuePolicy | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy or QueuePolicy()
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[str, ClassQueue] = {}
        self._ids: dict[Ticket, tuple[str, object]] = {}
        self._running: dict[str, Ticket] = {}
        self._objectives: dict[str, ServiceObjective] = {}
        self._scores: dict[str, ModelScores] = {}
        self._flows: dict[Ticket, Flow] = {}  # of models that promised a rate of tokens
        self._guarantees: dict[tuple[str, str], Guarantee] = {}
        self.expired = 0  # requests dropped because they waited too long

    def set_objective(self, model: str, objective: ServiceObjective) -> None:
        """Counts from now on: what was seen under another promise is forgotten. Contradictions raise InvalidInput."""
        parts = [objective, *(objective.of_class(priority) for priority in Priority)]
        problems = dict.fromkeys(text for part in parts for _, text in part.contradictions())
        if problems:
            raise InvalidInput("; ".join(problems), hint="More of the requests cannot be promised a shorter time.")
        with self._lock:
            if self._objectives.get(model) != objective:
                self._objectives[model] = objective
                self._scores[model] = ModelScores(objective)

    def objective(self, model: str) -> ServiceObjective | None:
        return self._objectives.get(model)

    def set_guarantee(self, model: str, partition_id: str, guaranteed: float, limit: float | None = None) -> None:
        """Parts of a Partition, from 0 to 1. Raises InvalidInput, and changes nothing, where not all on it can be kept."""
        new = Guarantee(
            model=model,
            partition_id=partition_id,
            guaranteed_ppm=round(guaranteed * PPM),
            limit_ppm=None if limit is None else round(limit * PPM),
        )
        with self._lock:
            wanted = self._guarantees | {(model, partition_id): new}
            problems = check_guarantees(wanted.values())
            if problems:
                raise InvalidInput("; ".join(problems), hint="Guarantees on one partition add up to at most 100%.")
            self._guarantees = wanted

    def submit(
        self,
        model: str,
        *,
        priority: Priority | str = Priority.MEDIUM,
        deadline_seconds: float | None = None,
        payload: object = None,
    ) -> str:
        """The request's id. Raises QueueFull when as many of its class wait as may."""
        priority = Priority(priority)
        now = self._clock()
        with self._lock:
            line = self._lines.setdefault(model, ClassQueue())
            if line.depth(priority) >= self._policy.most_queued[priority]:
                raise QueueFull(f"{line.depth(priority)} {priority} requests already wait for {model!r}")
            wait = self._policy.longest_wait_seconds[priority] if deadline_seconds is None else deadline_seconds
            ticket = Ticket(
                model=model, priority=priority, arrived=now, due=now + wait, has_deadline=deadline_seconds is not None
            )
            line.add(ticket)
            request_id = uuid4().hex
            self._ids[ticket] = (request_id, payload)
            meter = self._scores_of(model).meter(priority)
            if meter is not None:
                self._flows[ticket] = meter.begin(now)
            return request_id

    def next(self, model: str | None = None) -> QoSRequest | None:
        """The request that should run now, of one model or of all; None when nobody waits."""
        now = self._clock()
        with self._lock:
            lines = self._lines.values() if model is None else [self._lines.get(model) or ClassQueue()]
            best: Ticket | None = None
            best_key: tuple[int, float] = (0, 0.0)
            for line in lines:
                self._drop_expired(line, now)
                for ticket in line.heads():
                    key = (-self._policy.effective_rank(ticket.priority, now - ticket.arrived), ticket.due)
                    if best is None or key < best_key:
                        best, best_key = ticket, key
            if best is None:
                return None
            return self._start(best, now)

    def complete(
        self, request_id: str, *, failed: bool = False, ttft_seconds: float | None = None, output_tokens: int = 0
    ) -> None:
        """Exactly once for what `next` gave; times count from `submit`. Raises NotFound for anything else."""
        now = self._clock()
        with self._lock:
            ticket = self._running.pop(request_id, None)
            if ticket is None:
                raise NotFound(
                    f"no request {request_id!r} is running", hint="complete() takes the id of what next() gave, once."
                )
            seconds = now - ticket.arrived
            tpot = None
            if ttft_seconds is not None and output_tokens > 1:
                tpot = (seconds - ttft_seconds) / (output_tokens - 1)
            sample = Sample(
                failed=failed,
                ttft_seconds=ttft_seconds,
                tpot_seconds=tpot,
                latency_seconds=seconds,
                output_tokens=output_tokens,
            )
            self._record(ticket, sample, now)

    def depth(self, model: str | None = None, priority: Priority | str | None = None) -> int:
        with self._lock:
            lines = self._lines.values() if model is None else [self._lines.get(model) or ClassQueue()]
            return sum(len(line) if priority is None else line.depth(Priority(priority)) for line in lines)

    def compliance(self, model: str) -> Compliance:
        now = self._clock()
        with self._lock:
            scores = self._scores_of(model)
            report = scores.report(now)
            classes = {priority: scores.report_class(priority, now).targets for priority in Priority if priority in scores.own}
        window = report.windows[_FAST_WINDOW]
        targets = [*report.targets, *(target for own in classes.values() for target in own)]
        judged = [target.attainment >= target.target_part for target in targets if target.attainment is not None]
        return Compliance(
            compliant=all(judged) if judged else None,
            objective=self._objectives.get(model),
            targets=report.targets,
            percentiles=window.percentiles,
            requests_per_second=window.requests_per_second,
            output_tokens_per_second=window.output_tokens_per_second,
            requests=window.requests,
            failures=window.failures,
            classes=classes,
        )

    def _scores_of(self, model: str) -> ModelScores:
        found = self._scores.get(model)
        if found is None:
            found = self._scores[model] = ModelScores(self._objectives.get(model))
        return found

    def _record(self, ticket: Ticket, sample: Sample, now: float) -> None:
        self._scores_of(ticket.model).record(sample, ticket.priority, now)
        flow = self._flows.pop(ticket, None)
        if flow is not None:
            _end_flow(flow, ticket, sample, now)

    def _drop_expired(self, line: ClassQueue, now: float) -> None:
        for ticket in line.pop_expired(now):
            del self._ids[ticket]
            self.expired += 1
            self._record(ticket, Sample(failed=True, latency_seconds=now - ticket.arrived), now)

    def _start(self, ticket: Ticket, now: float) -> QoSRequest:
        self._lines[ticket.model].remove(ticket)
        ticket.state, ticket.started = TicketState.STARTED, now
        request_id, payload = self._ids.pop(ticket)
        self._running[request_id] = ticket
        return QoSRequest(
            id=request_id, model=ticket.model, priority=ticket.priority, waited_seconds=now - ticket.arrived, payload=payload
        )


def _end_flow(flow: Flow, ticket: Ticket, sample: Sample, now: float) -> None:
    first = ticket.started if sample.ttft_seconds is None else ticket.arrived + sample.ttft_seconds
    flow.meter.count(flow, sample.output_tokens, now if first is None else first, now)
    flow.meter.end(flow, now, failed=sample.failed)
