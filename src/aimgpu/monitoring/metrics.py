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
    """Counters are exported as `<name>_total`, histograms as `<name>_bucket`, `_sum` and `_count`."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_GPU = ("node", "gpu")
_PARTITION = ("node", "gpu", "partition")
# Not "instance": that is what Prometheus calls the target it scraped, and it would rename ours.
_INSTANCE = ("node", "gpu", "partition", "model", "instance_id")
_MODEL = ("node", "model")
_TARGET = ("node", "model", "target", "class")  # class: who it was promised to, or "all": the classes without their own
_ENGINE = ("node", "model", "instance_id", "engine")


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=text, labels=labels)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind=MetricKind.HISTOGRAM, help=text, labels=_MODEL, buckets=buckets)


_DEVICES = (
    _gauge("aim_gpu_up", "1 where the GPU could be read at this scrape; 0: what is shown of it is from an earlier one.", _GPU),
    _gauge("aim_gpu_total_memory_bytes", "Memory of the GPU.", (*_GPU, "product", "vendor", "simulated")),
    _gauge("aim_gpu_partition_count", "Partitions of the current layout.", _GPU),
    _gauge("aim_gpu_layout", "1 for the layout that the GPU has.", (*_GPU, "layout")),
    _gauge("aim_gpu_utilization_ratio", "Measured utilisation, where the GPU reports it.", _GPU),
    _gauge("aim_gpu_partition_memory_bytes", "Memory of the partition.", _PARTITION),
    _gauge("aim_gpu_partition_memory_allocated_bytes", "Memory granted on the partition.", _PARTITION),
    _gauge("aim_gpu_partition_memory_available_bytes", "Memory neither granted nor held by other processes.", _PARTITION),
    _gauge("aim_gpu_partition_memory_measured_bytes", "Memory in use, where the GPU reports it.", _PARTITION),
    _gauge("aim_gpu_partition_memory_foreign_bytes", "Memory held by processes that aimgpu did not start.", _PARTITION),
    _gauge("aim_gpu_partition_utilization", "Part of the partition's memory that is granted, 0 to 1.", _PARTITION),
)
_MODELS = (
    _gauge("aim_model_memory_bytes", "Memory granted to an instance of the model.", _INSTANCE),
    _gauge("aim_model_memory_measured_bytes", "Memory that the driver reports for the instance, where it does.", _INSTANCE),
    _gauge(
        "aim_model_memory_used_bytes", "Memory that the interposer counted for the instance, its contexts included.", _INSTANCE
    ),
    _gauge(
        "aim_model_enforcement_level",
        "1 for the level at which the instance's grant is enforced, and the mechanism that enforces it.",
        (*_INSTANCE, "level", "mechanism"),
    ),
    _gauge(
        "aim_model_isolation_met",
        "1 where the grant is enforced at least as strongly as the model demands, else 0.",
        (*_INSTANCE, "demanded"),
    ),
    _counter("aim_model_allocations_refused", "Allocations that the interposer refused at the cap.", _INSTANCE),
    _counter("aim_model_gate_wait_seconds", "Time that launches waited for their turn.", _INSTANCE),
    _counter("aim_model_gate_overruns", "Launches let through because a wait reached its bound.", _INSTANCE),
    _counter(
        "aim_model_gate_held_seconds",
        "Time that long launches of the instance waited because they would not fit into a pause of a higher-priority model.",
        _INSTANCE,
    ),
    _gauge("aim_model_gate_longest_launch_seconds", "Longest launch of a gated instance, as learned; 0: not gated.", _INSTANCE),
    _counter("aim_model_gate_requests", "Requests of the instance that the gate counted.", _INSTANCE),
    _counter(
        "aim_model_gate_touched_requests",
        "Requests of the instance that a long launch of a lower-priority model may have delayed.",
        _INSTANCE,
    ),
    _gauge(
        "aim_model_gate_yield_ratio",
        "Part of the device's time that lower-priority models may use while this one works: 0 strict, 1 no gate.",
        _INSTANCE,
    ),
    _gauge(
        "aim_model_gate_cost_ratio",
        "How much longer the measure of the model's tightest promise takes than while it yields nothing; 0: no longer.",
        _MODEL,
    ),
    _counter(
        "aim_model_gate_yielded_seconds",
        "Device time that lower-priority models used while this one worked and yielded a part; not while the gate is open.",
        _MODEL,
    ),
    _counter(
        "aim_model_gate_yielding_seconds",
        "Time that the model worked and yielded a part, in which that was measured.",
        _MODEL,
    ),
    _counter("aim_model_gpu_seconds", "Device time of work that passed the gate, as the interposer measured it.", _INSTANCE),
    _gauge("aim_model_instances", "Instances of the model by state.", (*_MODEL, "state")),
    _gauge("aim_model_waiting_for_room", "1 while the model is wanted and no GPU has room for it.", _MODEL),
    _counter("aim_model_restarts", "Instances that ended in use and were started again.", _MODEL),
    _counter("aim_model_requests", "Requests that named the model, by HTTP status.", (*_MODEL, "status")),
    _histogram("aim_model_request_latency_seconds", "From arrival to the last byte.", LATENCY_BOUNDS),
    _histogram(
        "aim_model_time_to_first_token_seconds", "From arrival to the first byte of a streamed answer.", FIRST_TOKEN_BOUNDS
    ),
    _histogram(
        "aim_model_time_per_output_token_seconds", "Between output tokens after the first, streams only.", OUTPUT_TOKEN_BOUNDS
    ),
    _gauge("aim_model_requests_in_flight", "Requests that engines of the model serve now.", _MODEL),
    _gauge("aim_model_slots", "Requests that the model's engines may serve at once.", _MODEL),
    _counter("aim_model_recalls", "Requests taken back from their engine for something more urgent (preemptions).", _MODEL),
)
_SCHEDULER = (
    _counter("aim_scheduler_operations", "Operations of the controller.", ("node", "operation", "result")),
    _counter("aim_scheduler_refusals", "Reasons in refused placements, one per GPU looked at, by code.", ("node", "reason")),
    _gauge("aim_scheduler_queue_depth", "Requests that wait for the model.", (*_MODEL, "priority")),
    _gauge("aim_scheduler_low_share", "Part of its slots that low-priority work may use on the GPU; 1: all.", _GPU),
)
_SLO = (
    _gauge("aim_slo_attainment_ratio", "Part of the requests (of the time, for throughput) that kept the target.", _TARGET),
    _gauge("aim_slo_objective_ratio", "Part of the requests that must keep the target.", _TARGET),
    _gauge("aim_slo_error_budget_remaining_ratio", "Part of the error budget that is left; below 0: overspent.", _TARGET),
    _gauge("aim_slo_burn_rate", "How fast the error budget is used; 1 lasts exactly its period.", (*_TARGET, "window")),
)
_ENGINES = (
    _gauge("aim_engine_up", "1 where the engine's own metrics could be read at the last attempt.", _ENGINE),
    _gauge("aim_engine_requests_running", "Requests that the engine works on, as it reports.", _ENGINE),
    _gauge("aim_engine_requests_waiting", "Requests that wait inside the engine, as it reports.", _ENGINE),
    _gauge("aim_engine_kv_cache_usage_ratio", "Part of the KV cache in use, as the engine reports.", _ENGINE),
    _counter("aim_engine_prompt_tokens", "Prompt tokens that the engine has read.", _ENGINE),
    _counter("aim_engine_generation_tokens", "Tokens that the engine has generated.", _ENGINE),
    _counter("aim_engine_preemptions", "Requests that the engine itself put back for want of KV cache.", _ENGINE),
    _counter("aim_engine_prefix_cache_hits", "Prompt tokens found in the engine's prefix cache.", _ENGINE),
    _counter("aim_engine_prefix_cache_queries", "Prompt tokens looked for in the engine's prefix cache.", _ENGINE),
)
_EXPORTER = (
    _gauge("aim_build_info", "1, with the version of aimgpu.", ("node", "version")),
    _gauge("aim_exporter_observation_age_seconds", "Age of what this scrape shows of devices and ledger.", ("node",)),
    _gauge("aim_exporter_dropped_series", "Series left out of this scrape because a metric had too many.", ("node",)),
)
METRICS = {metric.name: metric for metric in (*_DEVICES, *_MODELS, *_SCHEDULER, *_SLO, *_ENGINES, *_EXPORTER)}
OPERATOR_METRICS = (  # of the operator on a cluster
    _gauge("aim_operator_leading", "1 in the replica of the operator that leads.", ()),
    _gauge("aim_operator_queue_depth", "Workloads whose GpuShares wait to be reconciled.", ()),
    _counter("aim_operator_reconciles", "Looks at workloads since this replica leads; result: done, failed.", ("result",)),
    _counter(
        "aim_operator_placements",
        "Pods since this replica leads; result: hinted, skipped (let go without a hint), placed, placed-elsewhere.",
        ("result",),
    ),
)
