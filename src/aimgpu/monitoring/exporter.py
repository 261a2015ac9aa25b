"""Metrics in Prometheus's text format: the books and the devices as of the scrape, requests as they end."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, DeviceUsage
from aimgpu.isolation.region import TenantUse
from aimgpu.monitoring.metrics import METRICS
from aimgpu.monitoring.requests import RequestCollector
from aimgpu.placement import DeviceState
from aimgpu.qos.slo.request_counts import RequestCounts
from aimgpu.units import PPM

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Scores = Mapping[str, Any]  # models with their queues and targets, as the gateway's score board reports them
ReadTenants = Callable[[str], Mapping[str, TenantUse]]  # of a Partition: what the interposer counted, by instance
_Rows = Iterator[tuple[str, tuple[str, ...], float]]


class Exporter:
    """One registry of its own: nothing of another library slips in."""

    def __init__(
        self, controller: Controller, read_tenants: ReadTenants = lambda _: {}, counts: RequestCounts | None = None
    ) -> None:
        """`counts`: the gateway's; without them there are no metrics of requests."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(RequestCollector(counts or RequestCounts()))
        self._collector = _Books(controller, read_tenants)
        self._registry.register(self._collector)

    def render(self, scores: Scores, models: Collection[str] | None = None) -> bytes:
        """`models`: nothing but these, and so nothing of the GPUs. Synchronous and not quick: call it in a thread."""
        self._collector.scores = scores
        text = generate_latest(self._registry)
        return text if models is None else _only_models(text, models)


def _only_models(text: bytes, models: Collection[str]) -> bytes:
    """The comments, and the samples that are labelled with one of these models."""
    wanted = tuple(f'model="{name}"'.encode() for name in models)
    lines = (line for line in text.splitlines(keepends=True) if line.startswith(b"#") or any(one in line for one in wanted))
    return b"".join(lines)


class _Books(Collector):
    def __init__(self, controller: Controller, read_tenants: ReadTenants) -> None:
        self._controller = controller
        self.read_tenants = read_tenants
        self.scores: Scores = {}

    def describe(self) -> list[Metric]:
        return []  # says to the registry that it need not collect at once

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, labels, value in self._rows():
            if name not in families:
                metric = METRICS[name]
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[name] = kind(name, metric.help, labels=metric.labels)
            families[name].add_metric(labels, value)
        yield from families.values()

    def _rows(self) -> _Rows:
        controller = self._controller
        usage = {item.device_id: item for item in controller.parts.hardware.read_usage()}
        for node, state in controller.snapshot().devices():
            yield from _device_rows(node.name, state.device, usage.get(state.device.id))
            yield from _partition_rows(node.name, state, usage.get(state.device.id))
        yield from _instance_rows(controller)
        yield from _tenant_rows(controller, self.read_tenants)
        for operation, count in controller.statistics.operations().items():
            yield "aim_scheduler_operations", operation, count
        for reason, count in controller.statistics.refusals().items():
            yield "aim_scheduler_refusals", (reason,), count
        yield from _score_rows(self.scores)


def _device_rows(node: str, device: Device, usage: DeviceUsage | None) -> _Rows:
    labels = (node, device.id, device.product, str(device.simulated).lower())
    yield "aim_gpu_total_memory_bytes", labels, device.memory_bytes
    yield "aim_gpu_partition_count", (node, device.id), len(device.layout.partitions)
    if usage is not None and usage.utilization_percent is not None:
        yield "aim_gpu_utilization_ratio", (node, device.id), usage.utilization_percent / 100


def _partition_rows(node: str, state: DeviceState, usage: DeviceUsage | None) -> _Rows:
    for partition in state.device.layout.partitions:
        labels = (node, state.device.id, partition.id)
        granted = sum(grant.memory_bytes for grant in state.grants if grant.partition_id == partition.id)
        foreign = state.foreign_on(partition)
        yield "aim_gpu_partition_memory_bytes", labels, partition.memory_bytes
        yield "aim_gpu_partition_memory_allocated_bytes", labels, granted
        yield "aim_gpu_partition_memory_foreign_bytes", labels, foreign
        yield "aim_gpu_partition_memory_available_bytes", labels, max(0, partition.memory_bytes - granted - foreign)
        yield "aim_gpu_partition_utilization", labels, granted / partition.memory_bytes
        measured = usage.used_bytes_by_partition.get(partition.id) if usage is not None else None
        if measured is not None:
            yield "aim_gpu_partition_memory_measured_bytes", labels, measured


def _instance_rows(controller: Controller) -> _Rows:
    states: dict[tuple[str, str], int] = {}
    for instance in controller.instances():
        key = (instance.deployment, instance.state.value)
        states[key] = states.get(key, 0) + 1
        for grant in instance.grants:
            labels = (grant.node, grant.device_id, grant.partition_id, instance.deployment, instance.id)
            yield "aim_model_memory_bytes", labels, grant.memory_bytes
            yield "aim_model_enforcement_level", (*labels, grant.level.value, grant.mechanism or "pending"), 1
    for key, count in states.items():
        yield "aim_model_instances", key, count


def _tenant_rows(controller: Controller, read_tenants: ReadTenants) -> _Rows:
    """What the interposer counted; instances that it does not hold have no rows."""
    tenants: dict[str, Mapping[str, TenantUse]] = {}
    for instance in controller.instances():
        for grant in instance.grants:
            if grant.partition_id not in tenants:
                tenants[grant.partition_id] = read_tenants(grant.partition_id)
            use = tenants[grant.partition_id].get(instance.id)
            if use is None:
                continue
            labels = (grant.node, grant.device_id, grant.partition_id, instance.deployment, instance.id)
            yield "aim_model_memory_used_bytes", labels, use.used_bytes
            yield "aim_model_allocations_refused", labels, use.denied
            yield "aim_model_gate_wait_seconds", labels, use.waited_seconds
            yield "aim_model_gate_overruns", labels, use.overruns
            yield "aim_model_gate_yield_ratio", labels, use.yield_ppm / PPM
            yield "aim_model_gpu_seconds", labels, use.gpu_seconds


def _score_rows(scores: Scores) -> _Rows:
    for name, model in scores.get("models", {}).items():
        for priority, depth in model["waiting"].items():
            yield "aim_scheduler_queue_depth", (name, priority), depth
        if "recalls" in model:
            yield "aim_model_recalls", (name,), model["recalls"]
        yield from _target_rows(name, "all", model["targets"])
        for priority, one in model["classes"].items():
            if one["own"]:
                yield from _target_rows(name, priority, one["targets"])


def _target_rows(model: str, promised_to: str, targets: Iterable[Mapping[str, Any]]) -> _Rows:
    for target in targets:
        labels = (model, target["name"], promised_to)
        if target["attainment"] is not None:
            yield "aim_slo_attainment_ratio", labels, target["attainment"]
        if target["budget_left"] is not None:
            yield "aim_slo_error_budget_remaining_ratio", labels, target["budget_left"]
        for window in ("fast", "slow"):
            if target[f"{window}_burn"] is not None:
                yield "aim_slo_burn_rate", (*labels, window), target[f"{window}_burn"]
