"""What the daemon's /metrics reads: one observer of devices and ledger, which the page shares, and the engines' own metrics."""

from collections.abc import Sequence
from pathlib import Path

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.instance.run_folder import read_api_key
from aimgpu.control.observation import MachineObserver, ObservedLedger, ReadTenants
from aimgpu.domain import InstanceState
from aimgpu.engines.ownership import EngineOwner
from aimgpu.monitoring.engine_metrics import EngineMetrics, EngineTarget
from aimgpu.monitoring.exporter import Exporter, MetricSources
from aimgpu.qos.slo.request_counts import RequestCounts


def make_observer(controller: Controller, dependencies: Dependencies, read_tenants: ReadTenants) -> MachineObserver:
    """One look at the devices and the ledger, shared by /metrics and the page."""
    return MachineObserver(
        dependencies.hardware,
        ObservedLedger(instances=controller.instances, deployments=controller.deployments),
        node=dependencies.node,
        read_tenants=read_tenants,
    )


def make_exporter(
    controller: Controller, dependencies: Dependencies, observer: MachineObserver, gateway: tuple[RequestCounts, str]
) -> Exporter:
    """`gateway`: its counts of requests, and our version."""
    counts, version = gateway
    statistics = controller.statistics
    return Exporter(
        MetricSources(
            look=observer.look,
            version=version,
            read_operations=statistics.operations,
            read_refusals=statistics.refusals,
            read_restarts=statistics.restarts,
            read_waiting=lambda: find_without_room(controller),
            read_engines=EngineMetrics(lambda: _engine_targets(controller, dependencies.runs)).read,
            counts=counts,
        )
    )


def find_without_room(controller: Controller) -> list[str]:
    """Deployments that wait for room; those whose engine failed wait for another try."""
    failed = {one.deployment for one in controller.instances() if one.state is InstanceState.FAILED}
    return [item.deployment for item in controller.waiting() if item.deployment not in failed]


def _engine_targets(controller: Controller, runs: Path) -> Sequence[EngineTarget]:
    return [
        EngineTarget(
            instance_id=one.id,
            model=one.deployment,
            engine=one.engine,
            url=one.endpoint,
            api_key=read_api_key(runs, one.id) or "",
            owner=EngineOwner.of(one),
        )
        for one in controller.instances()
        if one.state is InstanceState.READY and one.endpoint
    ]
