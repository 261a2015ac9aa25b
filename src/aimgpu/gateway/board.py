"""Keeps score of the promises, and turns the score into pressure on low work, about once a second."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict

from aimgpu.domain import Priority, ServiceObjective
from aimgpu.gateway.directory import Backend, Directory
from aimgpu.gateway.records import RequestRecord
from aimgpu.qos.dispatcher import Dispatcher
from aimgpu.qos.objectives import Sample
from aimgpu.qos.pressure import NO_PRESSURE, Pressure, adjust_pressure
from aimgpu.qos.tracker import ObjectiveTracker, Report, burning, report_together

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_SERVER_ERROR = 500
_NOT_OURS = frozenset({499})  # the caller left
_OUR_REFUSALS = frozenset({"queue_full", "load_shed"})  # counted as failures although their status says 429

PressureListener = Callable[[str, Pressure], None]


class _Scores:
    """One model's: a tracker for each class; the model's own are their sum."""

    def __init__(self, objective: ServiceObjective | None) -> None:
        self.objective = objective
        self.by_class = {priority: ObjectiveTracker.for_objective(objective) for priority in Priority}
        self.trackers = tuple(self.by_class.values())


class ScoreBoard:
    """An Observer. `listener` hears of every change of pressure on a Device: the isolation room tightens its launch gate."""

    def __init__(self, directory: Directory, dispatcher: Dispatcher[Backend], listener: PressureListener | None = None) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._listener = listener
        self._scores: dict[str, _Scores] = {}
        self._pressure: dict[str, Pressure] = {}
        self._timer: asyncio.TimerHandle | None = None

    def finished(self, record: RequestRecord) -> None:
        sample = to_sample(record)
        if sample is None:
            return
        now = asyncio.get_running_loop().time()
        self._find(record.model).by_class[record.priority].record(sample, now)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def pressure(self, device_id: str) -> Pressure:
        return self._pressure.get(device_id, NO_PRESSURE)

    def report(self) -> Mapping[str, object]:
        """JSON-ready: models with their targets and windows, by class too, and the pressure on each Device."""
        now = asyncio.get_running_loop().time()
        models = {}
        for model in self._directory.list():
            scores = self._find(model.name)
            models[model.name] = {
                "priority": model.priority.value,
                "state": model.state,
                "simulated": model.simulated,
                "waiting": {priority.value: self._dispatcher.depth(model.name, priority) for priority in Priority},
                "recalls": self._dispatcher.recalls.counts.get(model.name, 0),
                "in_flight": sum(self._dispatcher.in_flight(backend.instance_id) for backend in model.backends),
                "slots": sum(self._dispatcher.allowed(b.instance_id) or b.slots for b in model.backends),
                **report_to_json(report_together(scores.trackers, now)),
                "classes": {
                    priority.value: report_to_json(tracker.report(now))
                    for priority, tracker in scores.by_class.items()
                    if tracker.first_seen is not None
                },
            }
        return {"models": models, "pressure": {device: asdict(pressure) for device, pressure in self._pressure.items()}}

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _find(self, name: str) -> "_Scores":
        model = self._directory.find(name)
        objective = model.objective if model is not None else None
        found = self._scores.get(name)
        if found is None or (found.objective is not objective and found.objective != objective and model is not None):
            found = self._scores[name] = _Scores(objective)
        return found

    def _tick(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for device, (name, burn) in self._worst_burns(now).items():
            before = self.pressure(device)
            after = adjust_pressure(before, name, burn)
            if after != before:
                self._apply(device, after)
        if self._pressure:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _worst_burns(self, now: float) -> dict[str, tuple[str | None, float]]:
        """For each Device the model whose high work burns fastest; low work may be late for high work, not the other way."""
        worst: dict[str, tuple[str | None, float]] = dict.fromkeys(self._pressure, (None, 0.0))
        for model in self._directory.list():
            scores = self._scores.get(model.name)
            if scores is None or scores.objective is None:
                continue
            # High requests alone: were shed low ones to count, holding them back would be a reason to hold them back.
            burn = burning((scores.by_class[Priority.HIGH],), now)
            for device in {backend.device_id for backend in model.backends if backend.device_id is not None}:
                if device not in worst or burn > worst[device][1]:
                    worst[device] = (model.name, burn)
        return worst

    def _apply(self, device: str, pressure: Pressure) -> None:
        dispatcher = self._dispatcher
        if pressure == NO_PRESSURE:
            self._pressure.pop(device, None)
            dispatcher.low_shares.pop(device, None)
        else:
            self._pressure[device] = pressure
            dispatcher.low_shares[device] = pressure.low_share
        (dispatcher.shed_low.add if pressure.shed else dispatcher.shed_low.discard)(device)
        data = {"device": device, "low_share": pressure.low_share, "shed": pressure.shed, "reason": pressure.reason}
        log.info("qos.pressure", extra={"data": data})
        if self._listener is not None:
            self._listener(device, pressure)


def to_sample(record: RequestRecord) -> Sample | None:
    """None for what says nothing about our promises: the caller's own mistakes and departures."""
    failed = record.status >= _SERVER_ERROR or record.code in _OUR_REFUSALS
    if not failed and (record.status in _NOT_OURS or record.code is not None or record.status >= 400):  # noqa: PLR2004
        return None
    return Sample(
        failed=failed,
        ttft_seconds=record.first_byte_seconds,
        tpot_seconds=record.tpot_seconds,
        latency_seconds=record.seconds,
        output_tokens=record.output_tokens or 0,
    )


def report_to_json(report: Report) -> dict[str, object]:
    windows = []
    for window in report.windows:
        percentiles = {
            name: {f"p{round(part * 100)}_seconds": value for part, value in values.items()}
            for name, values in window.percentiles.items()
        }
        windows.append(asdict(window) | {"percentiles": percentiles})
    return {"targets": [asdict(target) for target in report.targets], "windows": windows}
