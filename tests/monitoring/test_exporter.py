import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.control.world import Machine, boot, deployment

from aimgpu.control.controller import Controller
from aimgpu.control.observation import MachineObserver, Observation, ObservedLedger
from aimgpu.domain import DeviceUsage, ForeignProcess
from aimgpu.isolation.region import Region, TenantLimits, TenantUse
from aimgpu.monitoring.engine_metrics import ENGINE_NAMES, EngineReading, EngineTarget
from aimgpu.monitoring.exporter import Exporter, MetricSources
from aimgpu.monitoring.exposition import MOST_SERIES
from aimgpu.monitoring.metrics import METRICS, MetricKind
from aimgpu.qos.slo.request_counts import RequestCounts
from aimgpu.units import GIB

TARGET = {
    "name": "ttft_p95",
    "target_part": 0.95,
    "judged": 100,
    "attainment": 0.97,
    "budget_left": 0.4,
    "fast_burn": 2.0,
    "slow_burn": 0.5,
}
OWN = TARGET | {"name": "latency_p99", "attainment": 0.5, "budget_left": -49.0, "fast_burn": 50.0, "slow_burn": None}
CLASSES = {"high": {"own": False, "targets": [TARGET]}, "low": {"own": True, "targets": [OWN]}}
CHAT = {
    "waiting": {"high": 3, "low": 0},
    "recalls": 2,
    "in_flight": 1,
    "slots": 4,
    "targets": [TARGET],
    "classes": CLASSES,
}
SHARED = {"sharing": "promise", "share": 0.3, "cost": 0.08, "yielded": 0.2, "yielded_seconds": 4.0, "watched_seconds": 20.0}
SCORES: dict[str, Any] = {
    "models": {"chat": CHAT},
    "pressure": {"sim-mi300x-0": {"low_share": 0.25}},
    "sharing": {"chat": SHARED, "huge": {"sharing": "strict", "share": 0.0}, "gone": SHARED},
}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = boot(Machine(root=tmp_path))
    yield controller
    controller.close()


def observer_of(controller: Controller, tenants: dict[str, TenantUse] | None = None, **options: Any) -> MachineObserver:
    ledger = ObservedLedger(instances=controller.instances, deployments=controller.deployments)
    options = {"patience_seconds": 60.0, **options}  # a busy machine may not let it look for longer than a scrape may take
    return MachineObserver(
        controller._dependencies.hardware, ledger, node="here", read_tenants=lambda _: tenants or {}, **options
    )


def exporter_of(controller: Controller, **sources: Any) -> Exporter:
    statistics = controller.statistics
    given: dict[str, Any] = {
        "look": observer_of(controller).look,
        "read_operations": statistics.operations,
        "read_refusals": statistics.refusals,
        "read_restarts": statistics.restarts,
    }
    return Exporter(MetricSources(**(given | sources)), max_age_seconds=0.0)


def scrape(exporter: Exporter, **given: Any) -> dict[str, dict[tuple[str, ...], float]]:
    """By sample, then by the label values that follow the node."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exporter.render(SCORES, **given).decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                labels = tuple(sample.labels[label] for label in METRICS[family.name].labels)
                found.setdefault(sample.name, {})[labels[1:]] = sample.value
    return found


def measured(seen: Observation) -> Observation:
    """As a GPU would that reports what each process holds."""
    (instance,) = (one for one in seen.instances if one.grants)
    grant = instance.grants[0]
    process = ForeignProcess(pid=1, name="engine", memory_bytes=9 * GIB, partition_id=grant.partition_id)
    usage = DeviceUsage(
        device_id=grant.device_id,
        used_bytes=9 * GIB,
        used_bytes_by_partition={grant.partition_id: 9 * GIB},
        utilization_percent=71,
        processes=(process,),
    )
    return replace(seen, usage={grant.device_id: usage}, owners={1: instance.id})


def test_every_documented_metric_is_exported_with_its_labels_and_no_other(controller: Controller, tmp_path: Path) -> None:
    controller.apply([deployment("chat", 10)])
    controller.apply([deployment("huge", 500)])
    (instance,) = controller.instances()
    region = Region.create(tmp_path / "gpu.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name=instance.id, cap_bytes=10 * GIB))
    observer = observer_of(controller, {use.name: use for use in region.read_use()})
    target = EngineTarget(instance_id=instance.id, model="chat", engine="vllm", url="", api_key="")
    reading = EngineReading(target=target, up=True, values=dict.fromkeys(ENGINE_NAMES["vllm"], 1.0))
    counts = RequestCounts()
    counts.observe("chat", 200, 1.0, 0.1, 0.05)
    exporter = exporter_of(
        controller, look=lambda **_: measured(observer.look()), read_engines=lambda: [reading], counts=counts
    )
    families = {family.name: family for family in text_string_to_metric_families(exporter.render(SCORES).decode())}
    assert set(families) == set(METRICS)
    for name, family in families.items():
        assert family.documentation == METRICS[name].help
        assert family.type == METRICS[name].kind.value
        labels = set(family.samples[0].labels) - ({"le"} if METRICS[name].kind is MetricKind.HISTOGRAM else set())
        assert labels == set(METRICS[name].labels), name


def test_every_metric_names_its_node_and_uses_the_same_words_for_the_same_things() -> None:
    for metric in METRICS.values():
        assert metric.labels[0] == "node", metric.name
        assert not set(metric.labels) & {"device", "gpu_id", "deployment", "modelName"}, metric.name
        assert metric.help.endswith("."), metric.name


def test_the_numbers_are_those_of_the_ledger(controller: Controller) -> None:
    controller.apply([deployment("chat", 10), deployment("code", 20)])
    found = scrape(exporter_of(controller))
    assert sum(found["aim_gpu_partition_memory_allocated_bytes"].values()) == 30 * GIB
    assert sum(found["aim_model_memory_bytes"].values()) == 30 * GIB
    sizes = found["aim_gpu_partition_memory_bytes"]
    for labels, free in found["aim_gpu_partition_memory_available_bytes"].items():
        assert free == sizes[labels] - found["aim_gpu_partition_memory_allocated_bytes"][labels]
    assert {labels[-1] for labels in found["aim_model_enforcement_level"]} == {"none"}
    assert {labels[-1] for labels in found["aim_gpu_total_memory_bytes"]} == {"true"}, "simulation is named"


def test_operations_refusals_restarts_queues_and_promises_are_counted(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    controller.apply([deployment("huge", 500)])
    controller.statistics.count_restart("chat")
    found = scrape(exporter_of(controller, read_waiting=lambda: ["chat"]))
    assert found["aim_scheduler_operations_total"] == {("apply", "ok"): 1, ("apply", "refused"): 1}
    assert sum(found["aim_scheduler_refusals_total"].values()) == len(controller.devices())
    assert found["aim_model_restarts_total"] == {("chat",): 1}
    assert found["aim_model_waiting_for_room"] == {("chat",): 1}
    assert found["aim_scheduler_queue_depth"]["chat", "high"] == 3
    assert found["aim_scheduler_low_share"] == {("sim-mi300x-0",): 0.25}
    assert found["aim_slo_error_budget_remaining_ratio"]["chat", "ttft_p95", "all"] == 0.4
    assert found["aim_slo_burn_rate"]["chat", "ttft_p95", "all", "fast"] == 2.0
    assert found["aim_slo_attainment_ratio"] == {("chat", "ttft_p95", "all"): 0.97, ("chat", "latency_p99", "low"): 0.5}


def test_what_a_share_costs_and_yields_is_exported_for_models_that_promise_something(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    found = scrape(exporter_of(controller))
    assert found["aim_model_gate_cost_ratio"] == {("chat",): 0.08}
    assert found["aim_model_gate_yielded_seconds_total"] == {("chat",): 4.0}
    assert found["aim_model_gate_yielding_seconds_total"] == {("chat",): 20.0}


def test_a_request_is_seen_in_each_latency_that_it_had(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    counts = RequestCounts()
    counts.observe("chat", 200, 1.0, 0.1, 0.05)
    counts.observe("chat", 503, 2.0, None, None)
    found = scrape(exporter_of(controller, counts=counts))
    assert found["aim_model_requests_total"] == {("chat", "200"): 1, ("chat", "503"): 1}
    assert found["aim_model_request_latency_seconds_sum"] == {("chat",): 3.0}
    assert found["aim_model_time_to_first_token_seconds_count"] == {("chat",): 1}
    assert found["aim_model_time_per_output_token_seconds_count"] == {("chat",): 1}


def test_the_series_of_a_model_go_away_with_it(controller: Controller) -> None:
    controller.apply([deployment("chat", 10), deployment("code", 10)])
    counts = RequestCounts()
    counts.observe("chat", 200, 1.0, 0.1, 0.05)
    exporter = exporter_of(controller, counts=counts)
    assert 'model="chat"' in exporter.render(SCORES).decode()
    controller.release(["chat"])
    assert 'model="chat"' not in exporter.render(SCORES).decode()
    assert 'model="code"' in exporter.render(SCORES).decode()


def test_a_caller_with_some_models_sees_those_alone_and_no_gpu(controller: Controller) -> None:
    controller.apply([deployment("chat", 10), deployment("code", 10)])
    counts = RequestCounts()
    for name in ("chat", "code"):
        counts.observe(name, 200, 1.0, 0.1, 0.05)
    text = exporter_of(controller, counts=counts).render(SCORES, frozenset({"code"})).decode()
    assert 'model="code"' in text
    assert 'model="chat"' not in text
    assert "aim_gpu_" not in text
    assert "aim_scheduler_operations" not in text


def test_labels_that_callers_chose_are_escaped(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    (instance,) = controller.instances()
    target = EngineTarget(instance_id='a"b\\c\nd', model="chat", engine="vllm", url="", api_key="")
    reading = EngineReading(target=target, up=False)
    found = scrape(exporter_of(controller, read_engines=lambda: [reading]))
    assert found["aim_engine_up"] == {("chat", 'a"b\\c\nd', "vllm"): 0}
    assert instance.id in {labels[3] for labels in found["aim_model_memory_bytes"]}


def test_a_metric_never_has_more_than_its_share_of_series(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    target = EngineTarget(instance_id="x", model="chat", engine="vllm", url="", api_key="")
    many = [EngineReading(target=replace(target, instance_id=str(number)), up=True) for number in range(MOST_SERIES + 7)]
    found = scrape(exporter_of(controller, read_engines=lambda: many))
    assert len(found["aim_engine_up"]) == MOST_SERIES
    assert found["aim_exporter_dropped_series"] == {(): 7}


class BrokenGpus:
    """Readable once, then whatever `fail` does; those of `lost` are left out, as NVML's backend does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fail: Any = None
        self.lost: set[str] = set()

    def read_devices(self) -> Any:
        if self.fail is not None:
            self.fail()
        return tuple(one for one in self._inner.read_devices() if one.id not in self.lost)

    def read_usage(self) -> Any:
        if self.fail is not None:
            self.fail()
        return tuple(one for one in self._inner.read_usage() if one.device_id not in self.lost)


def test_a_gpu_that_its_driver_loses_stays_with_an_up_of_0_beside_the_others(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    gpus = BrokenGpus(controller._dependencies.hardware)
    ledger = ObservedLedger(instances=controller.instances, deployments=controller.deployments)
    observer = MachineObserver(gpus, ledger, node="here", patience_seconds=60.0)  # type: ignore[arg-type]
    exporter = exporter_of(controller, look=observer.look)
    whole = scrape(exporter)
    first, second = (name for (name,) in whole["aim_gpu_up"])
    gpus.lost = {first}
    for _ in range(2):
        found = scrape(exporter)
        assert found["aim_gpu_up"] == {(first,): 0, (second,): 1}
        assert found["aim_gpu_partition_memory_bytes"] == whole["aim_gpu_partition_memory_bytes"], "as last known"
    seen = observer.look()
    assert (seen.error_of(first), seen.error_of(second)) == ("the driver does not answer for it", None)
    assert seen.problem == f"{first}: the driver does not answer for it"
    gpus.lost = set()
    assert scrape(exporter)["aim_gpu_up"] == {(first,): 1, (second,): 1}


def test_a_device_that_fails_or_hangs_costs_the_scrape_nothing_but_its_up(controller: Controller) -> None:
    controller.apply([deployment("chat", 10)])
    gpus = BrokenGpus(controller._dependencies.hardware)
    ledger = ObservedLedger(instances=controller.instances, deployments=controller.deployments)
    observer = MachineObserver(gpus, ledger, node="here", patience_seconds=0.2)  # type: ignore[arg-type]
    exporter = exporter_of(controller, look=observer.look)
    wait_until_up(exporter)

    def raise_error() -> None:
        raise RuntimeError("the driver is gone")

    gpus.fail = raise_error
    found = scrape(exporter)
    assert set(found["aim_gpu_up"].values()) == {0}
    assert sum(found["aim_model_memory_bytes"].values()) == 10 * GIB, "the ledger is still shown"

    released = threading.Event()
    gpus.fail = released.wait
    try:
        controller.apply([deployment("code", 20)])
        found = scrape(exporter)
        assert set(found["aim_gpu_up"].values()) == {0}
        assert sum(found["aim_model_memory_bytes"].values()) == 30 * GIB, "and read again"
        threads = sum(thread.name == "observer" for thread in threading.enumerate())
        scrape(exporter)
        assert sum(thread.name == "observer" for thread in threading.enumerate()) <= max(threads, 1), "one look at a time"
    finally:
        released.set()
    gpus.fail = None
    wait_until_up(exporter)


def wait_until_up(exporter: Exporter) -> None:
    deadline = time.monotonic() + 60
    while set(scrape(exporter).get("aim_gpu_up", {}).values()) != {1}:
        assert time.monotonic() < deadline
