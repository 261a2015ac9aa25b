"""What a scrape costs: CPU milliseconds with 64 partitions (8 MI300X in CPX) and 50 models that were asked for.

Everything of a scrape is counted: reading the GPUs (plain files of the simulator's tree, as in the benchmark `hardware`), the
ledger, the gateway's scores, and the text. Layouts are read once a minute and the ledger when it has changed, so a scrape reads
the use of the GPUs only. The client library's own rendering of the requests' part of the series stands beside it.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from tests.hardware.emulation.emulated import EmulatedGpu, EmulatedProcess
from tests.hardware.emulation.sysfs_tree import EmulatedMachine, lay_out, write_tree

from aimgpu.control.observation import MachineObserver, ObservedLedger
from aimgpu.domain import (
    Ask,
    Deployment,
    Device,
    Grant,
    Instance,
    InstanceState,
    Level,
    Memory,
    Priority,
    ServiceObjective,
)
from aimgpu.gateway.records import RequestRecord
from aimgpu.gateway.routes import RouteTable, ServedModel
from aimgpu.gateway.slo_monitor import SloMonitor
from aimgpu.hardware.amd import AmdHardware, Sysfs
from aimgpu.hardware.simulated import find_product
from aimgpu.ledger import Ledger
from aimgpu.monitoring.exporter import Exporter, MetricSources
from aimgpu.monitoring.metrics import METRICS
from aimgpu.qos.queueing.dispatcher import Dispatcher
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.units import GIB
from benchmarks.recording import write_result

GPUS, MODELS, REQUESTS = 8, 50, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), rounds)
    for name, value in figures.items():
        print(f"{name:40} {value}")
    write_result("exporter", figures, packages=["prometheus-client"])


def measure(root: Path, rounds: int) -> dict[str, float]:
    processes = tuple(
        EmulatedProcess(pid=1000 + one, bytes_by_partition={(one % GPUS, one // GPUS): GIB}) for one in range(MODELS)
    )
    write_tree(root, lay_out(EmulatedMachine(gpus=_gpus(), processes=processes)))
    hardware = AmdHardware(Sysfs(root))
    devices = hardware.read_devices()
    ledger = Ledger.open(root / "ledger.sqlite3")
    _fill(ledger, devices)
    monitor = _make_monitor(ledger.deployments())
    observer = MachineObserver(hardware, ObservedLedger(instances=ledger.instances, deployments=ledger.deployments))
    exporter = Exporter(MetricSources(look=observer.look, counts=monitor.counts), max_age_seconds=0.0)
    seen = observer.look()
    kept = Exporter(MetricSources(look=lambda **_: seen, counts=monitor.counts))
    read_scores = partial(monitor.report, windows=0, every_class=False)
    text = exporter.render(read_scores())
    series = sum(1 for line in text.splitlines() if line and not line.startswith(b"#"))
    scores = read_scores()
    figures = {
        "partitions": sum(len(device.layout.partitions) for device in devices),
        "models": MODELS,
        "series": series,
        "bytes": len(text),
        "scrape_cpu_ms": _cpu_ms(lambda: exporter.render(read_scores()), rounds),
        "read_layouts_cpu_ms": _cpu_ms(hardware.read_devices, rounds),
        "read_use_cpu_ms": _cpu_ms(hardware.read_usage, rounds),
        "read_ledger_cpu_ms": _cpu_ms(lambda: (ledger.instances(), ledger.deployments()), rounds),
        "read_scores_cpu_ms": _cpu_ms(read_scores, rounds),
        "render_cpu_ms": _cpu_ms(lambda: kept.render(scores), rounds),
        "client_library_requests_only_cpu_ms": _cpu_ms(_client_library(monitor), rounds),
    }
    ledger.close()
    return figures


def _gpus() -> tuple[EmulatedGpu, ...]:
    product = find_product("MI300X")
    return tuple(EmulatedGpu(product=product, number=one, compute_mode="CPX", memory_mode="NPS4") for one in range(GPUS))


def _fill(ledger: Ledger, devices: tuple[Device, ...]) -> None:
    partitions = [(device, part) for device in devices for part in device.layout.partitions]
    capacity = {part.id: part.memory_bytes for _, part in partitions}
    for number in range(MODELS):
        device, part = partitions[number % len(partitions)]
        name, instance_id = f"model-{number}", f"model-{number}-0-abcdef"
        objective = ServiceObjective(ttft_p95_ms=500, tpot_p95_ms=50, availability_ppm=995_000)
        ask = Ask(name=name, want=Memory(memory_bytes=8 * GIB), deployment=name)
        ledger.want(Deployment(name=name, model="Qwen/Qwen2.5-7B-Instruct", ask=ask, objective=objective))
        grant = Grant(
            id=f"grant-{number}",
            instance_id=instance_id,
            deployment=name,
            node="localhost",
            device_id=device.id,
            partition_id=part.id,
            memory_bytes=8 * GIB,
            compute_ppm=None,
            priority=Priority.MEDIUM,
            level=Level.HARDWARE,
            mechanisms=("partition",),
        )
        instance = Instance(
            id=instance_id,
            deployment=name,
            replica=0,
            model="Qwen/Qwen2.5-7B-Instruct",
            engine="vllm",
            launcher="process",
            state=InstanceState.READY,
            grants=(grant,),
        )
        ledger.charge(instance, capacity=capacity)


def _make_monitor(deployments: tuple[Deployment, ...]) -> SloMonitor:
    """With requests in every window of every model."""
    table = RouteTable()
    table.replace(
        ServedModel(
            name=one.name,
            model=one.model,
            state="ready",
            reason=None,
            simulated=False,
            backends=(),
            created=0,
            objective=one.objective,
        )
        for one in deployments
    )
    monitor = SloMonitor(table, Dispatcher(QueuePolicy(), lambda _: ()))
    monitor._timer = object()  # type: ignore[assignment]  # noqa: SLF001 -- no event loop runs here
    dice = random.Random(1)  # noqa: S311 -- latencies
    for one in deployments:
        for _ in range(REQUESTS):
            first, rest = dice.uniform(0.05, 0.6), dice.uniform(0.5, 5)
            monitor.finished(
                RequestRecord(
                    model=one.name,
                    instance_id="i",
                    caller="anyone",
                    priority=Priority.MEDIUM,
                    status=200,
                    code=None,
                    streamed=True,
                    queued_seconds=0.0,
                    first_byte_seconds=first,
                    seconds=first + rest,
                    output_tokens=100,
                )
            )
    return monitor


def _client_library(monitor: SloMonitor) -> Callable[[], object]:
    """The requests' part of the same series, by prometheus_client."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    names = (
        "aim_model_request_latency_seconds",
        "aim_model_time_to_first_token_seconds",
        "aim_model_time_per_output_token_seconds",
    )
    histograms = [Histogram(name, "x", ["model"], buckets=METRICS[name].buckets, registry=registry) for name in names]
    counter = Counter("aim_model_requests", "x", ["model", "status"], registry=registry)
    for name, _ in monitor.counts.read():
        counter.labels(name, "200").inc()
        for histogram in histograms:
            histogram.labels(name).observe(0.1)
    return lambda: generate_latest(registry)


def _cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """The median: other work on the machine shows in the tail."""
    work()
    times = []
    for _ in range(rounds):
        before = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - before)
    return round(sorted(times)[rounds // 2] / 1e6, 2)


if __name__ == "__main__":
    main()
