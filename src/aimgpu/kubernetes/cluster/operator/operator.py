"""The operator's loops, run by the replica that leads."""

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.metrics_server import MetricsServer
from aimgpu.kubernetes.cluster.operator.claim_templates import TemplateCollector
from aimgpu.kubernetes.cluster.operator.leader import Leader
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions
from aimgpu.kubernetes.cluster.operator.plan_loop import PlanLoop
from aimgpu.kubernetes.cluster.operator.shares.loop import ShareLoop
from aimgpu.kubernetes.cluster.operator.work_queue import WorkQueue
from aimgpu.kubernetes.cluster.placer.placer import PodPlacer
from aimgpu.monitoring.metrics import OPERATOR_METRICS, Metric, MetricKind


class Operator:
    """Leads or waits to. All state is rebuilt from the API server when it starts to lead."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        self._shares: ShareLoop | None = None  # while it leads
        self._placer: PodPlacer | None = None
        self._identity = identity = f"{socket.gethostname()}-{os.getpid()}"
        self._leader = Leader(client, namespace=options.namespace, name="aim-gpu-sharing-operator", identity=identity)

    async def run(self) -> None:
        """For ever: an operator that lost the lead waits for it again."""
        metrics = MetricsServer(self._options.metrics_port, self.render)
        if self._options.metrics_port:
            await metrics.start()
        try:
            while True:
                await self._leader.lead(self._work)
                self._shares = self._placer = None
        finally:
            await metrics.stop()

    def render(self) -> bytes:
        """Its metrics. A replica that waits for the lead is well."""
        leads, queue = self._shares is not None, self._shares.queue if self._shares else WorkQueue[object]()
        placed = self._placer.counts if self._placer else {}
        values = {
            "aim_operator_leading": [("", int(leads))],
            "aim_operator_queue_depth": [("", len(queue))],
            "aim_operator_placements": [(f'{{result="{one}"}}', count) for one, count in placed.items()],
            "aim_operator_reconciles": [(f'{{result="{one}"}}', queue.finished[one]) for one in ("done", "failed")],
        }
        return "".join(text for metric in OPERATOR_METRICS for text in _lines(metric, values[metric.name])).encode()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            shares = self._shares = ShareLoop(self._client, self._options)
            if self._options.placement is not None:
                self._placer = PodPlacer(self._client, self._options, self._identity, shares.reasons)
                group.create_task(self._placer.run())
            plans = PlanLoop(self._client, self._options.namespace)
            shares.listen(plans.wake)
            group.create_task(shares.run())
            keep = self._options.keep_templates_seconds
            places = sorted(self._options.namespaces)
            group.create_task(TemplateCollector(self._client, shares.used_templates, keep, places).run())
            group.create_task(plans.run())


def _lines(metric: Metric, values: Iterable[tuple[str, int]]) -> Iterator[str]:
    name = f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name
    yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind.value}\n"
    yield from (f"{name}{labels} {value}\n" for labels, value in values)
