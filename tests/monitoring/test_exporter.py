from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.control.world import Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.monitoring.exporter import Exporter
from aimgpu.monitoring.metrics import METRICS, MetricKind
from aimgpu.qos.slo.request_counts import RequestCounts
from aimgpu.units import GIB

TARGET = {"name": "ttft_p95", "attainment": 0.97, "budget_left": 0.4, "fast_burn": 2.0, "slow_burn": 0.5}
OWN = {"name": "latency_p99", "attainment": 0.5, "budget_left": -49.0, "fast_burn": 50.0, "slow_burn": None}
CLASSES = {"high": {"own": False, "targets": [TARGET]}, "low": {"own": True, "targets": [OWN]}}
SCORES = {"models": {"chat": {"waiting": {"high": 3, "low": 0}, "recalls": 2, "targets": [TARGET], "classes": CLASSES}}}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path))
    yield controller
    controller.close()


def scrape(exporter: Exporter) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exporter.render(SCORES).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                labels = tuple(sample.labels[label] for label in METRICS[family.name].labels)
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_every_metric_of_the_table_is_exported_with_its_labels(controller: Controller, tmp_path: Path) -> None:
    controller.apply([deployment("chat", 10)])
    controller.apply([deployment("huge", 500)])
    region = Region.create(tmp_path / "gpu.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name=controller.instances()[0].id, cap_bytes=10 * GIB))
    counts = RequestCounts()
    exporter = Exporter(controller, lambda _: {use.name: use for use in region.read_use()}, counts)
    counts.observe("chat", 200, 1.0, 0.1, 0.05)
    families = {family.name: family for family in text_string_to_metric_families(exporter.render(SCORES).decode())}
    not_measured_here = {"aim_gpu_utilization_ratio", "aim_gpu_partition_memory_measured_bytes"}
    assert set(families) == set(METRICS) - not_measured_here
    for name, family in families.items():
        assert family.documentation == METRICS[name].help
        assert family.type == METRICS[name].kind.value
        labels = set(family.samples[0].labels) - ({"le"} if METRICS[name].kind is MetricKind.HISTOGRAM else set())
        assert labels == set(METRICS[name].labels), name


def test_the_numbers_are_those_of_the_books(controller: Controller) -> None:
    controller.apply([deployment("chat", 10), deployment("code", 20)])
    found = scrape(Exporter(controller))
    assert sum(found["aim_gpu_partition_memory_allocated_bytes"].values()) == 30 * GIB
    assert sum(found["aim_model_memory_bytes"].values()) == 30 * GIB
    sizes = found["aim_gpu_partition_memory_bytes"]
    for labels, free in found["aim_gpu_partition_memory_available_bytes"].items():
        assert free == sizes[labels] - found["aim_gpu_partition_memory_allocated_bytes"][labels]
    assert {labels[-1] for labels in found["aim_model_enforcement_level"]} == {"none"}
    assert {labels[-1] for labels in found["aim_gpu_total_memory_bytes"]} == {"true"}, "simulation is named"


def test_operations_refusals_queues_and_promises_are_counted(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    controller.apply([deployment("huge", 500)])
    controller.release(["chat"])
    found = scrape(Exporter(controller))
    operations = found["aim_scheduler_operations_total"]
    assert operations == {("apply", "ok"): 1, ("apply", "refused"): 1, ("release", "ok"): 1}
    assert sum(found["aim_scheduler_refusals_total"].values()) == len(controller.devices())
    assert found["aim_scheduler_queue_depth"]["chat", "high"] == 3
    assert found["aim_slo_error_budget_remaining_ratio"]["chat", "ttft_p95", "all"] == 0.4
    assert found["aim_slo_burn_rate"]["chat", "ttft_p95", "all", "fast"] == 2.0
    assert found["aim_slo_attainment_ratio"] == {("chat", "ttft_p95", "all"): 0.97, ("chat", "latency_p99", "low"): 0.5}


def test_a_request_is_seen_in_each_latency_that_it_had(controller: Controller) -> None:
    counts = RequestCounts()
    exporter = Exporter(controller, counts=counts)
    counts.observe("chat", 200, 1.0, 0.1, 0.05)
    counts.observe("chat", 503, 2.0, None, None)
    found = scrape(exporter)
    assert found["aim_model_requests_total"] == {("chat", "200"): 1, ("chat", "503"): 1}
    assert found["aim_model_request_latency_seconds_sum"] == {("chat",): 3.0}
    assert found["aim_model_time_to_first_token_seconds_count"] == {("chat",): 1}
    assert found["aim_model_time_per_output_token_seconds_count"] == {("chat",): 1}
