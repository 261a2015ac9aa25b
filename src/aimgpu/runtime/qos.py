"""Which request goes first and whether objectives are kept, for programs with a loop of their own."""

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
from aimgpu.runtime.latency import RecentTimes, Times
from aimgpu.runtime.priorities import parse_priority
from aimgpu.runtime.sizing import is_number, shown
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
    """`compliant`: every objective of which enough was seen is kept; None: there is no objective, or nothing was seen.

    `targets` are the model's, `classes` those of classes with objectives of their own; both cover six hours. `times` has mean,
    minimum, maximum and percentiles of "ttft", "tpot" and "latency", and rates are by time, over the last five minutes.
    `rate_kept`: the objective for requests per second, while requests waited.
    """

    compliant: bool | None
    objective: ServiceObjective | None
    targets: tuple[TargetReport, ...]
    times: Mapping[str, Times]
    rate_kept: bool | None
    requests_per_second: float | None
    output_tokens_per_second: float | None
    requests: int
    failures: int
    classes: Mapping[Priority, tuple[TargetReport, ...]]

    @property
    def percentiles(self) -> Mapping[str, Mapping[float, float]]:
        """{"ttft" | "tpot" | "latency": {0.5 | 0.9 | 0.95 | 0.99: seconds}}."""
        return {name: times.percentiles for name, times in self.times.items()}


class QoSManager:
    """Safe to use from several threads. Requests that waited longer than their class may are dropped by `next`."""

    def __init__(self, policy: QueuePolicy | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy or QueuePolicy()
        self._clock = clock
        self._lock = threading.Lock()
        self._queues: dict[str, ClassQueue] = {}
        self._ids: dict[Ticket, tuple[str, object]] = {}
        self._running: dict[str, Ticket] = {}
        self._objectives: dict[str, ServiceObjective] = {}
        self._scores: dict[str, ModelScores] = {}
        self._flows: dict[Ticket, Flow] = {}  # of models that promised a rate of tokens
        self._guarantees: dict[tuple[str, str], Guarantee] = {}
        self._rates: dict[str, float] = {}  # objectives for requests per second
        self._times: dict[tuple[str, str], RecentTimes] = {}  # by model and kind
        self.expired = 0  # requests dropped because they waited too long

    def set_objective(
        self, model: str, objective: ServiceObjective | None = None, *, requests_per_second: float | None = None
    ) -> None:
        """Counts from now on: what was seen under another objective is forgotten. Contradictions raise InvalidInput.

        `requests_per_second` must be completed while requests wait.
        """
        objective = ServiceObjective() if objective is None else objective
        if not isinstance(objective, ServiceObjective):
            raise InvalidInput(
                f"{shown(objective)} is not an objective", hint="Give a ServiceObjective, such as of ttft_p95_ms=500."
            )
        if requests_per_second is not None and not _is_rate(requests_per_second):
            raise InvalidInput(f"requests_per_second cannot be {shown(requests_per_second)}", hint="Give a number above 0.")
        parts = [objective, *(objective.of_class(priority) for priority in Priority)]
        problems = dict.fromkeys(text for part in parts for _, text in part.contradictions())
        if problems:
            raise InvalidInput("; ".join(problems), hint="More of the requests cannot be promised a shorter time.")
        with self._lock:
            if requests_per_second is None:
                self._rates.pop(model, None)
            else:
                self._rates[model] = requests_per_second
            if self._objectives.get(model) != objective:
                self._objectives[model] = objective
                self._scores[model] = ModelScores(objective)

    def objective(self, model: str) -> ServiceObjective | None:
        """None where none was set."""
        return self._objectives.get(model)

    def requests_per_second_objective(self, model: str) -> float | None:
        """None where none was set."""
        return self._rates.get(model)

    def guarantees(self, model: str | None = None, partition_id: str | None = None) -> tuple[Guarantee, ...]:
        """Those that were set, of one model or of all, on one partition or on all."""
        with self._lock:
            return tuple(
                each
                for each in self._guarantees.values()
                if model in (None, each.model) and partition_id in (None, each.partition_id)
            )

    def set_guarantee(self, model: str, partition_id: str, guaranteed: float, limit: float | None = None) -> None:
        """Parts of a partition, from 0 to 1. Raises InvalidInput, and changes nothing, where not all on it can be kept."""
        new = Guarantee(
            model=model,
            partition_id=partition_id,
            guaranteed_ppm=_part_ppm(guaranteed),
            limit_ppm=None if limit is None else _part_ppm(limit),
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
        priority: Priority | str | int = Priority.MEDIUM,
        deadline_seconds: float | None = None,
        payload: object = None,
    ) -> str:
        """The request's id. Raises QueueFull when as many of its class wait as may; requests that expired do not count."""
        priority = parse_priority(priority)
        if deadline_seconds is not None and not _is_time(deadline_seconds):
            raise InvalidInput(
                f"deadline_seconds cannot be {shown(deadline_seconds)}", hint="Give the seconds it may wait, from now."
            )
        now = self._clock()
        with self._lock:
            queue = self._queues.setdefault(model, ClassQueue())
            self._drop_expired(queue, now)
            if queue.depth(priority) >= self._policy.most_queued[priority]:
                raise QueueFull(f"{queue.depth(priority)} {priority} requests already wait for {model!r}")
            wait = self._policy.longest_wait_seconds[priority] if deadline_seconds is None else deadline_seconds
            ticket = Ticket(
                model=model, priority=priority, arrived=now, due=now + wait, has_deadline=deadline_seconds is not None
            )
            queue.add(ticket)
            request_id = uuid4().hex
            self._ids[ticket] = (request_id, payload)
            meter = self._scores_of(model).meter(priority)
            if meter is not None:
                self._flows[ticket] = meter.begin(now)
            return request_id

    def next(self, model: str | None = None) -> QoSRequest | None:
        """The request that should run now, of one model or of all; None when none waits."""
        now = self._clock()
        with self._lock:
            queues = self._queues.values() if model is None else [self._queues.get(model) or ClassQueue()]
            best: Ticket | None = None
            best_key: tuple[int, float] = (0, 0.0)
            for queue in queues:
                self._drop_expired(queue, now)
                for ticket in queue.heads():
                    key = (-self._policy.effective_rank(ticket.priority, now - ticket.arrived), ticket.due)
                    if best is None or key < best_key:
                        best, best_key = ticket, key
            if best is None:
                return None
            return self._start(best, now)

    def complete(
        self, request_id: str, *, failed: bool = False, ttft_seconds: float | None = None, output_tokens: int = 0
    ) -> None:
        """Exactly once for what `next` gave; times count from `submit`. Raises NotFound for anything else.

        Raises InvalidInput for a time or a count that cannot be; the request then still runs.
        """
        if ttft_seconds is not None and not _is_time(ttft_seconds):
            raise InvalidInput(
                f"ttft_seconds cannot be {shown(ttft_seconds)}", hint="Give the seconds from submit() to the first token."
            )
        if not is_number(output_tokens) or not isinstance(output_tokens, int) or output_tokens < 0:
            raise InvalidInput(f"output_tokens cannot be {shown(output_tokens)}", hint="Give how many tokens the answer has.")
        now = self._clock()
        with self._lock:
            ticket = self._running.pop(request_id, None)
            if ticket is None:
                raise NotFound(
                    f"no request {shown(request_id)} is running", hint="complete() takes the id of what next() gave, once."
                )
            seconds = now - ticket.arrived
            tpot = None
            if ttft_seconds is not None and output_tokens > 1:
                tpot = max(0.0, seconds - ttft_seconds) / (output_tokens - 1)  # the caller's clock may be ahead of ours
            sample = Sample(
                failed=failed,
                ttft_seconds=ttft_seconds,
                tpot_seconds=tpot,
                latency_seconds=seconds,
                output_tokens=output_tokens,
            )
            self._record(ticket, sample, now)

    def depth(self, model: str | None = None, priority: Priority | str | int | None = None) -> int:
        """How many requests wait, of one model or of all, of one class or of all; expired ones are dropped first."""
        now = self._clock()
        with self._lock:
            queues = self._queues.values() if model is None else [self._queues.get(model) or ClassQueue()]
            for queue in queues:
                self._drop_expired(queue, now)
            return sum(len(queue) if priority is None else queue.depth(parse_priority(priority)) for queue in queues)

    def compliance(self, model: str) -> Compliance:
        """How the model's objectives were kept, and its times."""
        now = self._clock()
        with self._lock:
            scores = self._scores_of(model)
            report = scores.report(now)
            classes = {priority: scores.report_class(priority, now).targets for priority in Priority if priority in scores.own}
            read = {kind: self._times_of(model, kind).read(now) for kind in ("ttft", "tpot", "latency")}
            waiting = len(self._queues.get(model) or ClassQueue())
        window = report.windows[_FAST_WINDOW]
        targets = [*report.targets, *(target for own in classes.values() for target in own)]
        judged = [target.attainment >= target.target_part for target in targets if target.attainment is not None]
        rate_kept = _rate_kept(self._rates.get(model), window.requests_per_second, waiting)
        judged += [] if rate_kept is None else [rate_kept]
        return Compliance(
            compliant=all(judged) if judged else None,
            objective=self._objectives.get(model),
            targets=report.targets,
            times={kind: times for kind, times in read.items() if times is not None},
            rate_kept=rate_kept,
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

    def _times_of(self, model: str, kind: str) -> RecentTimes:
        return self._times.setdefault((model, kind), RecentTimes())

    def _record(self, ticket: Ticket, sample: Sample, now: float) -> None:
        if not sample.failed:
            kinds = {"ttft": sample.ttft_seconds, "tpot": sample.tpot_seconds, "latency": sample.latency_seconds}
            for kind, seconds in kinds.items():
                if seconds is not None:
                    self._times_of(ticket.model, kind).add(now, seconds)
        self._scores_of(ticket.model).record(sample, ticket.priority, now)
        flow = self._flows.pop(ticket, None)
        if flow is not None:
            _end_flow(flow, ticket, sample, now)

    def _drop_expired(self, queue: ClassQueue, now: float) -> None:
        for ticket in queue.pop_expired(now):
            del self._ids[ticket]
            self.expired += 1
            self._record(ticket, Sample(failed=True, latency_seconds=now - ticket.arrived), now)

    def _start(self, ticket: Ticket, now: float) -> QoSRequest:
        self._queues[ticket.model].remove(ticket)
        ticket.state, ticket.started = TicketState.STARTED, now
        request_id, payload = self._ids.pop(ticket)
        self._running[request_id] = ticket
        return QoSRequest(
            id=request_id, model=ticket.model, priority=ticket.priority, waited_seconds=now - ticket.arrived, payload=payload
        )


def _is_rate(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]


def _is_time(seconds: object) -> bool:
    return is_number(seconds) and seconds >= 0  # type: ignore[operator]


def _part_ppm(part: float) -> int:
    if not is_number(part):
        raise InvalidInput(f"a guarantee cannot be {shown(part)}", hint="Give a part of the partition, from 0 to 1.")
    return round(part * PPM)


def _rate_kept(objective: float | None, rate: float | None, waiting: int) -> bool | None:
    """None: no objective, or fewer requests came than it allows, and none waits."""
    if objective is None or rate is None:
        return None
    return True if rate >= objective else (False if waiting else None)


def _end_flow(flow: Flow, ticket: Ticket, sample: Sample, now: float) -> None:
    first = ticket.started if sample.ttft_seconds is None else ticket.arrived + sample.ttft_seconds
    flow.meter.count(flow, sample.output_tokens, now if first is None else first, now)
    flow.meter.end(flow, now, failed=sample.failed)
