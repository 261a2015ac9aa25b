"""What the daemon's /metrics reads: one observer of devices and ledger, which the page shares, and the engines' own metrics."""

from collections.abc import Sequence

from aimgpu.control.controller import Controller
from aimgpu.control.observation import ObservedLedger, Observer, ReadTenants
from aimgpu.control.runs.run_files import read_api_key
from aimgpu.domain import InstanceState
from aimgpu.monitoring.engine_metrics import EngineMetrics, EngineTarget
from aimgpu.monitoring.exporter import Exporter, MetricSources
from aimgpu.qos.slo.request_counts import RequestCounts


def make_observer(controller: Controller, read_tenants: ReadTenants) -> Observer:
    return Observer(
        controller.parts.hardware,
        ObservedLedger(instances=controller.instances, deployments=controller.deployments),
        node=controller.parts.node,
        read_tenants=read_tenants,
    )


def make_exporter(controller: Controller, observer: Observer, counts: RequestCounts, version: str) -> Exporter:
    statistics = controller.statistics
    return Exporter(
        MetricSources(
            look=observer.look,
            version=version,
            read_operations=statistics.operations,
            read_refusals=statistics.refusals,
            read_restarts=statistics.restarts,
            read_waiting=lambda: [item.deployment for item in controller.waiting()],
            read_engines=EngineMetrics(lambda: _engine_targets(controller)).read,
            counts=counts,
        )
    )


def _engine_targets(controller: Controller) -> Sequence[EngineTarget]:
    return [
        EngineTarget(
            instance_id=one.id,
            model=one.deployment,
            engine=one.engine,
            url=one.endpoint,
            api_key=read_api_key(controller.parts.runs, one.id) or "",
        )
        for one in controller.instances()
        if one.state is InstanceState.READY and one.endpoint
    ]
