"""Scores every request against its model's objective, counts it, and turns the scores into pressure on low-priority work."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from time import monotonic, time
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import Backend, RouteTable, ServedModel
from aimgpu.qos.arrivals import UNKNOWN_GAP_SECONDS, ArrivalHistory
from aimgpu.qos.queueing.dispatcher import Dispatcher
from aimgpu.qos.slo.arbiter import Arbiter, Burn
from aimgpu.qos.slo.objectives import Sample
from aimgpu.qos.slo.pressure import NO_PRESSURE, Pressure
from aimgpu.qos.slo.request_counts import RequestCounts
from aimgpu.qos.slo.scores import ModelScores
from aimgpu.qos.slo.throughput import Flow
from aimgpu.qos.slo.tracker import Report, TargetReport

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_SERVER_ERROR = 500
_BAD_REQUEST = 400
_OUR_REFUSALS = frozenset({"queue_full", "load_shed"})  # counted as failures although their status says 429

_TARGET_FIELDS = tuple(one.name for one in fields(TargetReport))
_read_target = attrgetter(*_TARGET_FIELDS)

PressureListener = Callable[[str, Pressure], None]


class Flowing(Protocol):
    """A request under way, as far as its tokens go."""

    model: ServedModel
    priority: Priority
    streamed: bool
    arrived: float
    sent: float | None
    first_byte: float | None
    tokens_so_far: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelActivity:
    """How a model is used; times are of the steady clock."""

    last_request: float | None = None  # when one ended last; None: none since the start
    expected_seconds: float = UNKNOWN_GAP_SECONDS  # until the next request, by those seen
    overspending: bool = False  # its error budget is spent faster than the objective allows


class SloMonitor:
    """The one place that scores requests. Lives on the gateway's event loop; other threads call in through it.

    `listener` is called with every change of pressure on a device: the isolation room tightens its launch gate.
    `arbiter`: what turns burn rates into pressure, and knows which models the launch gate keeps the promises of.
    """

    def __init__(
        self,
        routes: RouteTable,
        dispatcher: Dispatcher[Backend],
        listener: PressureListener | None = None,
        arbiter: Arbiter | None = None,
    ) -> None:
        self.counts = RequestCounts()
        self._routes = routes
        self._dispatcher = dispatcher
        self._listener = listener
        self._arbiter = arbiter or Arbiter()
        self._scores: dict[str, ModelScores] = {}
        self._arrivals: dict[str, ArrivalHistory] = {}
        self._last: dict[str, float] = {}
        self._flows: dict[Flow, Flowing] = {}  # requests of models that promised a rate of tokens
        self._timer: asyncio.TimerHandle | None = None

    def finished(self, record: RequestRecord) -> None:
        """Called once per request that named a served model."""
        now = monotonic()
        arrivals = self._arrivals.get(record.model)
        if arrivals is None:
            arrivals = self._arrivals[record.model] = ArrivalHistory()
        arrivals.note(time())
        self._last[record.model] = now
        ttft, tpot = record.ttft_seconds, record.tpot_seconds
        self.counts.observe(record.model, record.status, record.seconds, ttft, tpot)
        failed = record.status >= _SERVER_ERROR or record.code in _OUR_REFUSALS
        if not failed and (record.status >= _BAD_REQUEST or record.code is not None):
            return
        sample = Sample(failed, ttft, tpot, record.seconds, record.output_tokens or 0)
        self._find(record.model).by_class[record.priority].record(sample, now)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def begin(self, request: Flowing) -> Flow | None:
        """For a request whose tokens a promised rate counts; pass the Flow to `end` when it is over."""
        meter = self._find(request.model.name).meter(request.priority)
        if meter is None:
            return None
        flow = meter.begin(request.arrived)
        self._flows[flow] = request
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        return flow

    def end(self, flow: Flow, record: RequestRecord) -> None:
        """Exactly once for every flow of `begin`."""
        now = monotonic()
        request = self._flows.pop(flow)
        flow.meter.count(flow, record.output_tokens or 0, _made_since(request, now), now)
        sample = to_sample(record)
        flow.meter.end(flow, now, failed=sample is not None and sample.failed)

    def read_activity(self) -> dict[str, ModelActivity]:
        """Deployments that were asked for since the start, themselves or one of their adapters."""
        now, of_day = monotonic(), time()
        found: dict[str, ModelActivity] = {}
        for name, arrivals in self._arrivals.items():
            scores, model = self._scores.get(name), self._routes.find(name)
            owner = model.owner if model is not None else name
            before, spends = found.get(owner, ModelActivity()), scores is not None and scores.objective is not None
            expected = arrivals.expected_seconds(of_day)
            found[owner] = ModelActivity(
                last_request=max(self._last[name], before.last_request or 0.0),
                expected_seconds=min(before.expected_seconds, expected) if owner in found else expected,
                overspending=before.overspending or (spends and scores is not None and scores.is_overspending(now)),
            )
        return found

    def pressure(self, device_id: str) -> Pressure:
        """How far low-priority work is held back on a device now."""
        return self._arbiter.pressure.get(device_id, NO_PRESSURE)

    def report(self, *, windows: int = 3, every_class: bool = True) -> Mapping[str, object]:
        """JSON-ready: models with their targets and windows, by class too, and the pressure on each device.

        `windows`: how many, shortest first; `every_class`: also classes without promises of their own. Most readers need less,
        and percentiles are most of the cost.
        """
        now = monotonic()
        self._count_flows(now)
        models = {}
        for model in self._routes.list():
            scores = self._find(model.name)
            models[model.name] = {
                "priority": model.priority.value,
                "state": model.state,
                "simulated": model.simulated,
                "waiting": {priority.value: self._dispatcher.depth(model.name, priority) for priority in Priority},
                "longest_wait_seconds": self._dispatcher.longest_wait(model.name, now),
                "recalls": self._dispatcher.recalls.counts.get(model.name, 0),
                "in_flight": sum(self._dispatcher.in_flight(backend.instance_id) for backend in model.backends),
                "slots": sum(self._dispatcher.allowed(b.instance_id) or b.slots for b in model.backends),
                **report_to_json(scores.report(now, windows=windows)),
                "classes": {
                    priority.value: {
                        **report_to_json(scores.report_class(priority, now, windows=windows)),
                        "own": priority in scores.own,
                    }
                    for priority, tracker in scores.by_class.items()
                    if priority in scores.own or (every_class and tracker.first_seen is not None)
                },
            }
        pressure = {device: asdict(pressure) for device, pressure in self._arbiter.pressure.items()}
        devices = {backend.device_id for model in self._routes.list() for backend in model.backends if backend.device_id}
        running = {device: self._dispatcher.on_device(device) for device in sorted(devices)}
        counted = {device: count for device, count in running.items() if count is not None}
        return {"models": models, "pressure": pressure, "queue": {**self.describe_queue(), "running": counted}}

    def describe_queue(self) -> Mapping[str, object]:
        """JSON-ready: the bounds that are stated."""
        policy = self._dispatcher.policy
        return {
            "per_gpu": policy.every_device_limit,
            "longest_wait_seconds": {priority.value: policy.longest_wait_seconds[priority] for priority in Priority},
            "most_queued": {priority.value: policy.most_queued[priority] for priority in Priority},
        }

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _find(self, name: str) -> ModelScores:
        model = self._routes.find(name)
        objective = model.objective if model is not None else None
        found = self._scores.get(name)
        if found is None or (model is not None and found.objective is not objective and found.objective != objective):
            found = self._scores[name] = ModelScores(objective)
        elif model is not None:
            found.objective = objective  # an equal one: the next look is quicker
        return found

    def _tick(self) -> None:
        self._timer = None
        now = monotonic()
        self._count_flows(now)
        for device, pressure in self._arbiter.press(self._burns(now)).items():
            self._apply(device, pressure)
        if self._arbiter.pressure or self._flows:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _burns(self, now: float) -> Iterator[Burn]:
        for model in self._routes.list():
            scores = self._scores.get(model.name)
            if scores is not None and scores.objective is not None:
                devices = frozenset(backend.device_id for backend in model.backends if backend.device_id is not None)
                yield Burn(model=model.name, rate=scores.burning_high(now), devices=devices)

    def _count_flows(self, now: float) -> None:
        """What streams made so far; an answer that comes whole is counted when it is over."""
        for flow, request in self._flows.items():
            if request.tokens_so_far:
                flow.meter.count(flow, request.tokens_so_far, _made_since(request, now), now)

    def _apply(self, device: str, pressure: Pressure) -> None:
        dispatcher = self._dispatcher
        if pressure == NO_PRESSURE:
            dispatcher.low_shares.pop(device, None)
        else:
            dispatcher.low_shares[device] = pressure.low_share
        (dispatcher.shed_low.add if pressure.shed else dispatcher.shed_low.discard)(device)
        data = {"device": device, "low_share": pressure.low_share, "shed": pressure.shed, "reason": pressure.reason}
        log.info("qos.pressure", extra={"data": data})
        if self._listener is not None:
            self._listener(device, pressure)


def _made_since(request: Flowing, now: float) -> float:
    """When its first token was there; of an answer that comes whole, when its engine was asked."""
    since = request.first_byte if request.streamed else request.sent
    return now if since is None else since


def to_sample(record: RequestRecord) -> Sample | None:
    """None for what says nothing about our promises: the caller's own mistakes and departures."""
    failed = record.status >= _SERVER_ERROR or record.code in _OUR_REFUSALS
    if not failed and (record.status >= _BAD_REQUEST or record.code is not None):
        return None
    return Sample(failed, record.ttft_seconds, record.tpot_seconds, record.seconds, record.output_tokens or 0)


def report_to_json(report: Report) -> dict[str, object]:
    """JSON-ready, percentiles by name."""
    windows = []
    for window in report.windows:
        percentiles = {
            name: {f"p{round(part * 100)}_seconds": value for part, value in values.items()}
            for name, values in window.percentiles.items()
        }
        windows.append(asdict(window) | {"percentiles": percentiles})
    # Not asdict, which copies deeply and takes ten times as long.
    targets = [dict(zip(_TARGET_FIELDS, _read_target(target), strict=True)) for target in report.targets]
    return {"targets": targets, "windows": windows}
