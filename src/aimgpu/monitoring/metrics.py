"""Every metric by name, with what it means and its labels; the exporter and the reference page use this table alone."""

from dataclasses import dataclass
from enum import StrEnum

from aimgpu.qos.slo.request_counts import FIRST_TOKEN_BOUNDS, LATENCY_BOUNDS, OUTPUT_TOKEN_BOUNDS


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_PARTITION = ("node", "gpu", "partition")
_INSTANCE = ("node", "gpu", "partition", "model", "instance")
_TARGET = ("model", "target", "class")  # class: whom it was promised to, or "all": the classes without their own


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=text, labels=labels)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.HISTOGRAM, help=text, labels=("model",), buckets=buckets)


_ALL = (
    _gauge("aim_gpu_total_memory_bytes", "Memory of the Device.", ("node", "gpu", "product", "simulated")),
    _gauge("aim_gpu_partition_count", "Partitions of the current Layout.", ("node", "gpu")),
    _gauge("aim_gpu_utilization_ratio", "Measured utilisation, where the Device tells.", ("node", "gpu")),
    _gauge("aim_gpu_partition_memory_bytes", "Memory of the Partition.", _PARTITION),
    _gauge("aim_gpu_partition_memory_allocated_bytes", "Memory granted on the Partition.", _PARTITION),
    _gauge("aim_gpu_partition_memory_available_bytes", "Memory neither granted nor held by foreign processes.", _PARTITION),
    _gauge("aim_gpu_partition_memory_measured_bytes", "Memory in use as the Device says, where it does.", _PARTITION),
    _gauge("aim_gpu_partition_memory_foreign_bytes", "Memory held by processes that are not ours.", _PARTITION),
    _gauge("aim_gpu_partition_utilization", "Part of the Partition's memory that is granted, 0 to 1.", _PARTITION),
    _gauge("aim_model_memory_bytes", "Memory granted to an instance of the model.", _INSTANCE),
    _gauge(
        "aim_model_enforcement_level",
        "1 for the Level at which the instance's Grant is enforced, and what enforces it.",
        (*_INSTANCE, "level", "mechanism"),
    ),
    _gauge(
        "aim_model_memory_used_bytes", "Memory that the interposer counted for the instance, its contexts included.", _INSTANCE
    ),
    _counter("aim_model_allocations_refused", "Allocations that the interposer refused at the cap.", _INSTANCE),
    _counter("aim_model_gate_wait_seconds", "Time that launches waited for their turn.", _INSTANCE),
    _counter("aim_model_gate_overruns", "Launches let through because a wait reached its bound.", _INSTANCE),
    _gauge(
        "aim_model_gate_yield_ratio",
        "Part of the device's time that lower-priority models may use while this one works: 0 strict, 1 no gate.",
        _INSTANCE,
    ),
    _counter("aim_model_gpu_seconds", "Device time of work that passed the gate, as the interposer measured it.", _INSTANCE),
    _gauge("aim_model_instances", "Instances of the model by state.", ("model", "state")),
    _counter("aim_model_requests", "Requests that named the model, by HTTP status.", ("model", "status")),
    _histogram("aim_model_request_latency_seconds", "From arrival to the last byte.", LATENCY_BOUNDS),
    _histogram(
        "aim_model_time_to_first_token_seconds", "From arrival to the first byte of a streamed answer.", FIRST_TOKEN_BOUNDS
    ),
    _histogram(
        "aim_model_time_per_output_token_seconds", "Between output tokens after the first, streams only.", OUTPUT_TOKEN_BOUNDS
    ),
    _counter("aim_model_recalls", "Requests taken from their engine again for something more urgent.", ("model",)),
    _counter("aim_scheduler_operations", "Operations of the controller.", ("operation", "result")),
    _counter("aim_scheduler_refusals", "Reasons of Devices in refusals, by code.", ("reason",)),
    _gauge("aim_scheduler_queue_depth", "Requests that wait for the model.", ("model", "priority")),
    _gauge("aim_slo_attainment_ratio", "Part of the requests (of the time, for throughput) that kept the target.", _TARGET),
    _gauge("aim_slo_error_budget_remaining_ratio", "Part of the error budget that is left.", _TARGET),
    _gauge("aim_slo_burn_rate", "How fast the error budget is used; 1 lasts exactly its period.", (*_TARGET, "window")),
)
METRICS = {metric.name: metric for metric in _ALL}
