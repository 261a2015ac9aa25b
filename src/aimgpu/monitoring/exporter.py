"""Metrics in Prometheus's text format: ledger and devices as they were seen last, requests as they ended.

A scrape reads nothing itself: devices are read by a MachineObserver in its own thread, engines by `engine_metrics` in theirs.
So it neither fails nor waits because a device or an engine does; `aim_gpu_up` and `aim_engine_up` report that.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aimgpu.control.observation import Observation
from aimgpu.domain import LEAST_LEVEL, Grant, Instance, IsolationRequirement
from aimgpu.monitoring.engine_metrics import EngineReading
from aimgpu.monitoring.exposition import CONTENT_TYPE, Exposition, Row
from aimgpu.placement.fit import ungranted_bytes
from aimgpu.qos.slo.request_counts import RequestCounts
from aimgpu.units import PPM

__all__ = ["CONTENT_TYPE", "Exporter", "MetricSources"]

# Models with their queues and targets, as the gateway's monitor reports them; with "sharing", what each leaves to others.
Scores = Mapping[str, Any]
_Rows = Iterator[Row]
_UNKNOWN_PARTITION = ""
_LAYOUTS_SECONDS = 60.0  # the longest until a change by other means than ours is seen


class ObserveMachine(Protocol):
    def __call__(self, *, max_age_seconds: float = 0.0, layouts_age_seconds: float = 0.0) -> Observation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """What a scrape reads; all but `look` may be left out."""

    look: ObserveMachine
    version: str = "unknown"
    read_operations: Callable[[], Mapping[tuple[str, str], int]] = dict
    read_refusals: Callable[[], Mapping[str, int]] = dict
    read_restarts: Callable[[], Mapping[str, int]] = dict
    read_waiting: Callable[[], Iterable[str]] = tuple  # deployments that have no room
    read_engines: Callable[[], Iterable[EngineReading]] = tuple
    counts: RequestCounts = field(default_factory=RequestCounts)


class Exporter:
    """Renders one scrape at a time; what it shows may be up to `max_age_seconds` old."""

    def __init__(self, sources: MetricSources, *, max_age_seconds: float = 1.0) -> None:
        self._sources = sources
        self._max_age_seconds = max_age_seconds

    def render(self, scores: Scores, only: frozenset[str] | None = None) -> bytes:
        """Call it in a thread: a first look may take until the observer's patience ends. `only`: these models."""
        seen = self._sources.look(max_age_seconds=self._max_age_seconds, layouts_age_seconds=_LAYOUTS_SECONDS)
        wanted = {name for one in seen.deployments for name in (one.name, *(each.name for each in one.overrides.adapters))}
        shown = wanted if only is None else wanted & only
        page = Exposition()
        if only is None:
            page.add(_device_rows(seen))
            _add_partitions(page, seen, _grants_by_partition(seen))
            page.add(self._scheduler_rows(seen.node))
        page.add(row for row in _instance_rows(seen) if row[1][_MODEL_AT[row[0]]] in shown)
        page.add(self._model_rows(seen.node, shown))
        page.add(_score_rows(seen.node, scores, shown, only))
        page.add(_engine_rows(seen.node, self._sources.read_engines(), shown))
        self._add_requests(page, seen.node, shown)
        page.add(self._own_rows(seen, page.dropped))
        return page.render()

    def has_seen_devices(self) -> bool:
        """Whether a look has ended, be it with an error: a failure is shown by `aim_gpu_up`, which is to be scraped."""
        return self._sources.look(max_age_seconds=self._max_age_seconds, layouts_age_seconds=_LAYOUTS_SECONDS).taken_at > 0

    def _scheduler_rows(self, node: str) -> _Rows:
        for operation, count in self._sources.read_operations().items():
            yield "aim_scheduler_operations", (node, *operation), count
        for reason, count in self._sources.read_refusals().items():
            yield "aim_scheduler_refusals", (node, reason), count

    def _model_rows(self, node: str, shown: set[str]) -> _Rows:
        """Every deployed model has both, so that an alert on them has something to look at."""
        restarts, waiting = self._sources.read_restarts(), set(self._sources.read_waiting())
        for name in sorted(shown):
            yield "aim_model_restarts", (node, name), restarts.get(name, 0)
            yield "aim_model_waiting_for_room", (node, name), int(name in waiting)

    def _add_requests(self, page: Exposition, node: str, shown: set[str]) -> None:
        """A model that is not deployed any more has no series; when it comes back, its counts go on."""
        for name, found in self._sources.counts.read():
            if name not in shown:
                continue
            labels = (node, name)
            statuses = tuple(found.by_status.items())
            page.add(("aim_model_requests", (node, name, str(status)), count) for status, count in statuses)
            page.add_histogram("aim_model_request_latency_seconds", labels, found.latency)
            page.add_histogram("aim_model_time_to_first_token_seconds", labels, found.first_token)
            page.add_histogram("aim_model_time_per_output_token_seconds", labels, found.output_token)

    def _own_rows(self, seen: Observation, dropped: int) -> _Rows:
        age = max(0.0, time.monotonic() - seen.taken_at) if seen.taken_at else 0.0
        yield "aim_build_info", (seen.node, self._sources.version), 1
        yield "aim_exporter_observation_age_seconds", (seen.node,), round(age, 3)
        yield "aim_exporter_dropped_series", (seen.node,), dropped


def _grants_by_partition(seen: Observation) -> dict[str, list[Grant]]:
    found: dict[str, list[Grant]] = {}
    for instance in seen.instances:
        for grant in instance.grants:
            found.setdefault(grant.partition_id, []).append(grant)
    return found


def _device_rows(seen: Observation) -> _Rows:
    for device in seen.devices:
        labels = (seen.node, device.id)
        usage = seen.usage.get(device.id)
        yield "aim_gpu_up", labels, 0 if seen.error_of(device.id) else 1
        facts = (device.product, device.vendor.value, "true" if device.simulated else "false")
        yield "aim_gpu_total_memory_bytes", (*labels, *facts), device.memory_bytes
        yield "aim_gpu_partition_count", labels, len(device.layout.partitions)
        yield "aim_gpu_layout", (*labels, device.layout.name), 1
        if usage is not None and usage.utilization_percent is not None:
            yield "aim_gpu_utilization_ratio", labels, usage.utilization_percent / 100


_PER_PARTITION = (
    "aim_gpu_partition_memory_bytes",
    "aim_gpu_partition_memory_allocated_bytes",
    "aim_gpu_partition_memory_foreign_bytes",
    "aim_gpu_partition_memory_available_bytes",
    "aim_gpu_partition_utilization",
)


def _add_partitions(page: Exposition, seen: Observation, grants: Mapping[str, list[Grant]]) -> None:
    series: list[tuple[str, ...]] = []
    rows: list[tuple[float, ...]] = []
    measured: list[Row] = []
    for device in seen.devices:
        usage, foreign = seen.usage.get(device.id), seen.foreign_bytes.get(device.id, {})
        used = usage.used_bytes_by_partition if usage is not None else {}
        unknown = foreign.get(_UNKNOWN_PARTITION, 0)
        for partition in device.layout.partitions:
            size, here = partition.memory_bytes, grants.get(partition.id, [])
            given = sum(grant.memory_bytes for grant in here)
            others = foreign.get(partition.id, 0) + unknown
            labels = (seen.node, device.id, partition.id)
            series.append(labels)
            free = max(0, ungranted_bytes(partition, here, others))
            rows.append((size, given, others, free, given / size if size else 0.0))
            if partition.id in used:
                measured.append(("aim_gpu_partition_memory_measured_bytes", labels, used[partition.id]))
    for name, values in zip(_PER_PARTITION, zip(*rows, strict=True), strict=bool(rows)):
        page.add_column(name, series, values)
    page.add(measured)


_PER_INSTANCE = (
    "aim_model_memory_bytes",
    "aim_model_enforcement_level",
    "aim_model_isolation_met",
    "aim_model_memory_measured_bytes",
    "aim_model_memory_used_bytes",
    "aim_model_allocations_refused",
    "aim_model_gate_wait_seconds",
    "aim_model_gate_overruns",
    "aim_model_gate_yield_ratio",
    "aim_model_gate_held_seconds",
    "aim_model_gate_longest_launch_seconds",
    "aim_model_gate_requests",
    "aim_model_gate_touched_requests",
    "aim_model_gpu_seconds",
)
_MODEL_AT = dict.fromkeys(_PER_INSTANCE, 3) | {"aim_model_instances": 1}  # where the label is


def _instance_rows(seen: Observation) -> _Rows:
    states: dict[tuple[str, str, str], int] = {}
    demanded = {deployment.name: deployment.ask.isolation for deployment in seen.deployments}
    measured = seen.measured_by_instance()
    for instance in seen.instances:
        key = (seen.node, instance.deployment, instance.state.value)
        states[key] = states.get(key, 0) + 1
        wanted = demanded.get(instance.deployment, IsolationRequirement.NONE)
        for grant in instance.grants:
            labels = (seen.node, grant.device_id, grant.partition_id, instance.deployment, instance.id)
            yield from _grant_rows(grant, labels, wanted)
            size = measured.get((instance.id, grant.device_id))
            if size is not None:
                yield "aim_model_memory_measured_bytes", labels, size
            yield from _tenant_rows(seen, instance, labels)
    for key, count in states.items():
        yield "aim_model_instances", key, count


def _grant_rows(grant: Grant, labels: tuple[str, ...], wanted: IsolationRequirement) -> _Rows:
    yield "aim_model_memory_bytes", labels, grant.memory_bytes
    yield "aim_model_enforcement_level", (*labels, grant.level.value, grant.mechanism or "pending"), 1
    yield "aim_model_isolation_met", (*labels, wanted.value), int(grant.level.rank >= LEAST_LEVEL[wanted].rank)


def _tenant_rows(seen: Observation, instance: Instance, labels: tuple[str, ...]) -> _Rows:
    """What the interposer counted; instances that it does not hold have no rows."""
    use = seen.tenants.get(instance.id)
    if use is not None:
        yield "aim_model_memory_used_bytes", labels, use.used_bytes
        yield "aim_model_allocations_refused", labels, use.denied
        yield "aim_model_gate_wait_seconds", labels, use.waited_seconds
        yield "aim_model_gate_overruns", labels, use.overruns
        yield "aim_model_gate_yield_ratio", labels, use.yield_ppm / PPM
        yield "aim_model_gate_held_seconds", labels, use.held_seconds
        yield "aim_model_gate_longest_launch_seconds", labels, use.longest_launch_ns / 1e9
        yield "aim_model_gate_requests", labels, use.requests
        yield "aim_model_gate_touched_requests", labels, use.touched
        yield "aim_model_gpu_seconds", labels, use.gpu_seconds


def _engine_rows(node: str, readings: Iterable[EngineReading], shown: set[str]) -> _Rows:
    for reading in readings:
        target = reading.target
        if target.model in shown:
            labels = (node, target.model, target.instance_id, target.engine)
            yield "aim_engine_up", labels, int(reading.up)
            for name, value in reading.values.items():
                yield name, labels, value


def _score_rows(node: str, scores: Scores, shown: set[str], only: frozenset[str] | None) -> _Rows:
    for name, model in scores.get("models", {}).items():
        if name not in shown:
            continue
        for priority, depth in model["waiting"].items():
            yield "aim_scheduler_queue_depth", (node, name, priority), depth
        yield "aim_model_recalls", (node, name), model.get("recalls", 0)
        if "in_flight" in model:
            yield "aim_model_requests_in_flight", (node, name), model["in_flight"]
            yield "aim_model_slots", (node, name), model["slots"]
        yield from _target_rows(node, name, "all", model["targets"])
        for priority, one in model["classes"].items():
            if one["own"]:
                yield from _target_rows(node, name, priority, one["targets"])
    yield from _sharing_rows(node, {name: one for name, one in scores.get("sharing", {}).items() if name in shown})
    for device, pressure in scores.get("pressure", {}).items() if only is None else ():
        yield "aim_scheduler_low_share", (node, device), pressure["low_share"]


def _sharing_rows(node: str, sharing: Mapping[str, Mapping[str, Any]]) -> _Rows:
    """What the share that a model yields costs it, and what its neighbours got; of models that promise something."""
    for name, one in sharing.items():
        if one.get("cost") is not None:
            yield "aim_model_gate_cost_ratio", (node, name), one["cost"]
        if "yielded_seconds" in one:
            yield "aim_model_gate_yielded_seconds", (node, name), one["yielded_seconds"]
            yield "aim_model_gate_yielding_seconds", (node, name), one["watched_seconds"]


def _target_rows(node: str, model: str, promised_to: str, targets: Iterable[Mapping[str, Any]]) -> _Rows:
    for target in targets:
        labels = (node, model, target["name"], promised_to)
        if target.get("target_part") is not None:
            yield "aim_slo_objective_ratio", labels, target["target_part"]
        if target["attainment"] is not None:
            yield "aim_slo_attainment_ratio", labels, target["attainment"]
        if target["budget_left"] is not None:
            yield "aim_slo_error_budget_remaining_ratio", labels, target["budget_left"]
        for window in ("fast", "slow"):
            if target[f"{window}_burn"] is not None:
                yield "aim_slo_burn_rate", (*labels, window), target[f"{window}_burn"]
