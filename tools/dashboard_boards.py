"""The Grafana dashboards as data: panels with their expressions. `tools/dashboards.py` makes the files of them."""

from tools.dashboard_panels import Board, Panel

_NODE = 'node=~"$node"'
_GPU = 'node=~"$node", gpu=~"$gpu"'
_MODEL = 'node=~"$node", model=~"$model"'
_FAILED = f'{_MODEL}, status=~"5..|429"'
_BOTH = 'node=~"$node", gpu=~"$gpu", model=~"$model"'
_BYTES, _PART, _SECONDS, _RATE = "bytes", "percentunit", "s", "reqps"
_LEVEL = "aim_model_enforcement_level"
_GREEN, _ORANGE, _RED = "green", "orange", "red"


def _quantile(part: float, metric: str) -> str:
    return f"histogram_quantile({part}, sum by (node, model, le) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval])))"


def _latencies(metric: str) -> list[tuple[str, str]]:
    return [(_quantile(part, metric), f"{{{{model}}}} p{round(part * 100)}") for part in (0.5, 0.95, 0.99)]


PARTITIONS = Board(
    uid="aim-partitions",
    title="AIM / Partition utilisation",
    description="Memory that is granted, measured, held by others and free, on every partition of every GPU.",
    rows=[
        (
            "GPUs",
            [
                Panel(
                    title="GPUs that answer",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=[(f"sum(aim_gpu_up{{{_GPU}}})", "up")],
                    limits=[(_RED, 0), (_GREEN, 1)],
                ),
                Panel(
                    title="Partitions",
                    kind="stat",
                    width=4,
                    height=5,
                    queries=[(f"sum(aim_gpu_partition_count{{{_GPU}}})", "partitions")],
                ),
                Panel(
                    title="Memory granted",
                    kind="stat",
                    unit=_PART,
                    width=4,
                    height=5,
                    limits=[(_GREEN, 0), (_ORANGE, 0.85), (_RED, 0.97)],
                    queries=[
                        (
                            (
                                f"sum(aim_gpu_partition_memory_allocated_bytes{{{_GPU}}}) "
                                f"/ sum(aim_gpu_partition_memory_bytes{{{_GPU}}})"
                            ),
                            "granted",
                        )
                    ],
                ),
                Panel(
                    title="Memory of all GPUs",
                    kind="stat",
                    unit=_BYTES,
                    width=4,
                    height=5,
                    queries=[(f"sum(aim_gpu_total_memory_bytes{{{_GPU}}})", "memory")],
                ),
                Panel(
                    title="Layouts",
                    kind="table",
                    width=8,
                    height=5,
                    queries=[(f"max by (node, gpu, layout) (aim_gpu_layout{{{_GPU}}})", "")],
                    columns=[("node", "Node"), ("gpu", "GPU"), ("layout", "Layout")],
                ),
                Panel(
                    title="Granted and measured, by GPU",
                    unit=_BYTES,
                    text="Solid: what the ledger granted. A GPU that does not report its use has no measured line.",
                    queries=[
                        (
                            f"sum by (node, gpu) (aim_gpu_partition_memory_allocated_bytes{{{_GPU}}})",
                            "{{node}} {{gpu}} granted",
                        ),
                        (
                            f"sum by (node, gpu) (aim_gpu_partition_memory_measured_bytes{{{_GPU}}})",
                            "{{node}} {{gpu}} measured",
                        ),
                    ],
                ),
                Panel(
                    title="Utilisation, by GPU",
                    unit=_PART,
                    most=1,
                    queries=[(f"aim_gpu_utilization_ratio{{{_GPU}}}", "{{node}} {{gpu}}")],
                ),
            ],
        ),
        (
            "Partitions",
            [
                Panel(
                    title="Granted part of each partition",
                    kind="bargauge",
                    unit=_PART,
                    most=1,
                    height=10,
                    limits=[(_GREEN, 0), (_ORANGE, 0.85), (_RED, 0.97)],
                    queries=[(f"aim_gpu_partition_utilization{{{_GPU}}}", "{{partition}}")],
                ),
                Panel(
                    title="Free memory of each partition",
                    unit=_BYTES,
                    height=10,
                    queries=[(f"aim_gpu_partition_memory_available_bytes{{{_GPU}}}", "{{partition}}")],
                ),
                Panel(
                    title="Memory of each model",
                    unit=_BYTES,
                    stacked=True,
                    queries=[
                        (f"sum by (node, gpu, partition, model) (aim_model_memory_bytes{{{_BOTH}}})", "{{partition}} {{model}}")
                    ],
                ),
                Panel(
                    title="Held by processes that aimgpu did not start",
                    unit=_BYTES,
                    queries=[(f"aim_gpu_partition_memory_foreign_bytes{{{_GPU}}}", "{{partition}}")],
                ),
            ],
        ),
        (
            "Enforcement",
            [
                Panel(
                    title="Level and mechanism of every grant",
                    kind="table",
                    width=14,
                    height=9,
                    queries=[
                        (
                            f"max by (model, partition, instance_id, level, mechanism) ({_LEVEL}{{{_BOTH}}})",
                            "",
                        )
                    ],
                    columns=[
                        ("model", "Model"),
                        ("partition", "Partition"),
                        ("level", "Level"),
                        ("mechanism", "Mechanism"),
                        ("instance_id", "Instance"),
                    ],
                ),
                Panel(
                    title="Measured beyond the grant",
                    unit=_BYTES,
                    width=10,
                    height=9,
                    text="Above 0, an instance holds more than it was granted.",
                    queries=[
                        (
                            f"aim_model_memory_measured_bytes{{{_BOTH}}} - aim_model_memory_bytes{{{_BOTH}}}",
                            "{{instance_id}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "Launch gate, where the interposer runs",
            [
                Panel(
                    title="Allocations refused at the cap",
                    unit="ops",
                    width=8,
                    queries=[
                        (
                            f"sum by (model) (rate(aim_model_allocations_refused_total{{{_BOTH}}}[$__rate_interval]))",
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    title="Launches held back at the gate",
                    unit=_PART,
                    width=8,
                    text="Part of the time that launches of a model waited for more urgent work.",
                    queries=[
                        (f"sum by (model) (rate(aim_model_gate_wait_seconds_total{{{_BOTH}}}[$__rate_interval]))", "{{model}}")
                    ],
                ),
                Panel(
                    title="Long launches held back",
                    unit=_PART,
                    width=8,
                    text="Part of the time they waited because they would not fit into a pause of a higher-priority model.",
                    queries=[
                        (f"sum by (model) (rate(aim_model_gate_held_seconds_total{{{_BOTH}}}[$__rate_interval]))", "{{model}}")
                    ],
                ),
                Panel(
                    title="Longest launch",
                    unit=_SECONDS,
                    text="As the gate has learned it; 0: not gated.",
                    queries=[(f"max by (model) (aim_model_gate_longest_launch_seconds{{{_BOTH}}})", "{{model}}")],
                ),
                Panel(
                    title="Requests that a long launch may have delayed",
                    unit=_PART,
                    most=1,
                    text="Part of the requests that the gate counted.",
                    queries=[
                        (
                            (
                                f"sum by (model) (rate(aim_model_gate_touched_requests_total{{{_BOTH}}}[$__rate_interval]))"
                                f" / sum by (model) (rate(aim_model_gate_requests_total{{{_BOTH}}}[$__rate_interval]))"
                            ),
                            "{{model}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)

MODELS = Board(
    uid="aim-models",
    title="AIM / Model performance",
    description="Requests, latencies and tokens of every model, as its callers see them, and what its engines report.",
    rows=[
        (
            "Traffic",
            [
                Panel(
                    title="Requests per second",
                    unit=_RATE,
                    queries=[(f"sum by (model) (rate(aim_model_requests_total{{{_MODEL}}}[$__rate_interval]))", "{{model}}")],
                ),
                Panel(
                    title="Failed requests",
                    unit=_PART,
                    text="Answers of 5xx and 429, as part of all.",
                    queries=[
                        (
                            (
                                f"sum by (model) (rate(aim_model_requests_total{{{_FAILED}}}[$__rate_interval])) "
                                f"/ sum by (model) (rate(aim_model_requests_total{{{_MODEL}}}[$__rate_interval])) or "
                                f"0 * sum by (model) (rate(aim_model_requests_total{{{_MODEL}}}[$__rate_interval]))"
                            ),
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    title="In flight and slots",
                    queries=[
                        (f"sum by (model) (aim_model_requests_in_flight{{{_MODEL}}})", "{{model}} in flight"),
                        (f"sum by (model) (aim_model_slots{{{_MODEL}}})", "{{model}} slots"),
                    ],
                ),
                Panel(
                    title="Instances by state",
                    stacked=True,
                    queries=[(f"sum by (model, state) (aim_model_instances{{{_MODEL}}})", "{{model}} {{state}}")],
                ),
            ],
        ),
        (
            "Latency",
            [
                Panel(title="Time to first token", unit=_SECONDS, queries=_latencies("aim_model_time_to_first_token_seconds")),
                Panel(
                    title="Time per output token", unit=_SECONDS, queries=_latencies("aim_model_time_per_output_token_seconds")
                ),
                Panel(title="Whole answer", unit=_SECONDS, queries=_latencies("aim_model_request_latency_seconds")),
                Panel(
                    title="Restarts, last hour",
                    kind="bargauge",
                    limits=[(_GREEN, 0), (_ORANGE, 1), (_RED, 3)],
                    queries=[(f"sum by (model) (increase(aim_model_restarts_total{{{_MODEL}}}[1h]))", "{{model}}")],
                ),
            ],
        ),
        (
            "Engines",
            [
                Panel(
                    title="Tokens per second, as engines report",
                    queries=[
                        (
                            f"sum by (model) (rate(aim_engine_generation_tokens_total{{{_MODEL}}}[$__rate_interval]))",
                            "{{model}} generated",
                        ),
                        (
                            f"sum by (model) (rate(aim_engine_prompt_tokens_total{{{_MODEL}}}[$__rate_interval]))",
                            "{{model}} read",
                        ),
                    ],
                ),
                Panel(
                    title="KV cache in use",
                    unit=_PART,
                    most=1,
                    queries=[
                        (
                            f"max by (model, instance_id) (aim_engine_kv_cache_usage_ratio{{{_MODEL}}})",
                            "{{instance_id}}",
                        )
                    ],
                ),
                Panel(
                    title="Running and waiting inside the engine",
                    queries=[
                        (f"sum by (model) (aim_engine_requests_running{{{_MODEL}}})", "{{model}} running"),
                        (f"sum by (model) (aim_engine_requests_waiting{{{_MODEL}}})", "{{model}} waiting"),
                    ],
                ),
                Panel(
                    title="Engines whose metrics can be read",
                    kind="statushistory",
                    queries=[(f"min by (model) (aim_engine_up{{{_MODEL}}})", "{{model}}")],
                    words=[(0, "not read"), (1, "read")],
                    limits=[(_RED, 0), (_GREEN, 1)],
                ),
            ],
        ),
    ],
)

SCHEDULER = Board(
    uid="aim-scheduler",
    title="AIM / Scheduler",
    description="What was placed, refused, preempted and restarted, and who waits.",
    rows=[
        (
            "Decisions",
            [
                Panel(
                    title="Operations",
                    unit="ops",
                    queries=[
                        (
                            f"sum by (operation, result) (rate(aim_scheduler_operations_total{{{_NODE}}}[$__rate_interval]))",
                            "{{operation}} {{result}}",
                        )
                    ],
                ),
                Panel(
                    title="Refusals by reason, last hour",
                    kind="bargauge",
                    queries=[('sum by (reason) (increase(aim_scheduler_refusals_total{node=~"$node"}[1h]))', "{{reason}}")],
                ),
                Panel(
                    title="Models without room",
                    kind="statushistory",
                    limits=[(_GREEN, 0), (_RED, 1)],
                    queries=[(f"max by (model) (aim_model_waiting_for_room{{{_MODEL}}})", "{{model}}")],
                    words=[(0, "placed"), (1, "no room")],
                ),
                Panel(
                    title="Memory free for the next model",
                    unit=_BYTES,
                    text="The largest free piece of any partition, and all free memory.",
                    queries=[
                        (f"max by (node) (aim_gpu_partition_memory_available_bytes{{{_GPU}}})", "{{node}} largest piece"),
                        (f"sum by (node) (aim_gpu_partition_memory_available_bytes{{{_GPU}}})", "{{node}} in all"),
                    ],
                ),
            ],
        ),
        (
            "Queues",
            [
                Panel(
                    title="Requests that wait, by class",
                    stacked=True,
                    queries=[(f"sum by (priority) (aim_scheduler_queue_depth{{{_MODEL}}})", "{{priority}}")],
                ),
                Panel(
                    title="Requests that wait, by model",
                    queries=[(f"sum by (model) (aim_scheduler_queue_depth{{{_MODEL}}})", "{{model}}")],
                ),
                Panel(
                    title="Requests taken back for something more urgent",
                    unit="ops",
                    queries=[(f"sum by (model) (rate(aim_model_recalls_total{{{_MODEL}}}[$__rate_interval]))", "{{model}}")],
                ),
                Panel(
                    title="Share of its slots that low-priority work may use",
                    unit=_PART,
                    most=1,
                    text="Only while a promise is being broken; no line: all of them.",
                    queries=[(f"min by (node, gpu) (aim_scheduler_low_share{{{_GPU}}})", "{{node}} {{gpu}}")],
                ),
            ],
        ),
        (
            "This exporter",
            [
                Panel(
                    title="Age of what is shown",
                    unit=_SECONDS,
                    queries=[('max by (node) (aim_exporter_observation_age_seconds{node=~"$node"})', "{{node}}")],
                ),
                Panel(
                    title="Versions",
                    kind="table",
                    queries=[('max by (node, version) (aim_build_info{node=~"$node"})', "")],
                    columns=[("node", "Node"), ("version", "Version")],
                ),
            ],
        ),
    ],
)

_TARGET_LABELS = "{{model}} {{target}} {{class}}"
SLO = Board(
    uid="aim-slo",
    title="AIM / Promises and error budgets",
    description="What was promised to callers, what was kept over six hours, and how fast the error budget goes.",
    rows=[
        (
            "Promises",
            [
                Panel(
                    title="Error budget left",
                    kind="bargauge",
                    unit=_PART,
                    most=1,
                    limits=[(_RED, -1000), (_ORANGE, 0.01), (_GREEN, 0.25)],
                    queries=[
                        (f"min by (model, target, class) (aim_slo_error_budget_remaining_ratio{{{_MODEL}}})", _TARGET_LABELS)
                    ],
                ),
                Panel(
                    title="Kept, against the promise",
                    unit=_PART,
                    queries=[
                        (f"min by (model, target, class) (aim_slo_attainment_ratio{{{_MODEL}}})", f"{_TARGET_LABELS} kept"),
                        (f"min by (model, target, class) (aim_slo_objective_ratio{{{_MODEL}}})", f"{_TARGET_LABELS} promised"),
                    ],
                ),
                Panel(
                    title="Burn-down of the error budget",
                    unit=_PART,
                    queries=[
                        (f"min by (model, target, class) (aim_slo_error_budget_remaining_ratio{{{_MODEL}}})", _TARGET_LABELS)
                    ],
                ),
                Panel(
                    title="Burn rate",
                    text="1 spends the budget exactly in its period. Fast: five minutes. Slow: one hour.",
                    limits=[(_GREEN, 0), (_ORANGE, 1), (_RED, 6)],
                    queries=[
                        (
                            f"max by (model, target, class, window) (aim_slo_burn_rate{{{_MODEL}}})",
                            f"{_TARGET_LABELS} {{{{window}}}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "What moves them",
            [
                Panel(
                    title="Time to first token, p95",
                    unit=_SECONDS,
                    queries=[(_quantile(0.95, "aim_model_time_to_first_token_seconds"), "{{model}}")],
                ),
                Panel(
                    title="Time per output token, p95",
                    unit=_SECONDS,
                    queries=[(_quantile(0.95, "aim_model_time_per_output_token_seconds"), "{{model}}")],
                ),
                Panel(
                    title="Requests that wait",
                    queries=[(f"sum by (model) (aim_scheduler_queue_depth{{{_MODEL}}})", "{{model}}")],
                ),
                Panel(
                    title="Time that neighbours may use while the model works",
                    unit=_PART,
                    most=1,
                    text="0: strict, 1: no gate. Steered by the promise where `sharing: promise`.",
                    queries=[(f"max by (model) (aim_model_gate_yield_ratio{{{_BOTH}}})", "{{model}}")],
                ),
                Panel(
                    title="Time that neighbours used while the model worked",
                    unit=_PART,
                    text="Of lower priority, as the gate measured it; nothing is measured while it is open.",
                    queries=[
                        (
                            (
                                f"sum by (model) (rate(aim_model_gate_yielded_seconds_total{{{_MODEL}}}[$__rate_interval]))"
                                f" / sum by (model) (rate(aim_model_gate_yielding_seconds_total{{{_MODEL}}}[$__rate_interval]))"
                            ),
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    title="How much slower the model is for it",
                    unit=_PART,
                    text="The measure of its tightest promise, against the time while it yields nothing.",
                    queries=[(f"max by (model) (aim_model_gate_cost_ratio{{{_MODEL}}})", "{{model}}")],
                ),
            ],
        ),
    ],
)
BOARDS = (PARTITIONS, MODELS, SCHEDULER, SLO)
