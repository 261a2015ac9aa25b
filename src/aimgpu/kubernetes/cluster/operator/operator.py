"""The operator's loops, run by the replica that leads."""

import asyncio
import os
import socket

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator.claim_templates import TemplateCollector
from aimgpu.kubernetes.cluster.operator.definitions import keep_definitions
from aimgpu.kubernetes.cluster.operator.leader import Leader
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions
from aimgpu.kubernetes.cluster.operator.plan_loop import PlanLoop
from aimgpu.kubernetes.cluster.operator.shares.loop import ShareLoop


class Operator:
    """Leads or waits to. All state is rebuilt from the API server when it starts to lead."""

    def __init__(self, client: Client, options: OperatorOptions) -> None:
        self._client = client
        self._options = options
        identity = f"{socket.gethostname()}-{os.getpid()}"
        self._leader = Leader(client, namespace=options.namespace, name="aim-gpu-sharing-operator", identity=identity)

    async def run(self) -> None:
        """For ever: an operator that lost the lead waits for it again."""
        while True:
            await self._leader.lead(self._work)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_definitions(self._client))
            shares = ShareLoop(self._client, self._options)
            plans = PlanLoop(self._client, self._options.namespace)
            shares.listen(plans.wake)
            group.create_task(shares.run())
            keep = self._options.keep_templates_seconds
            places = sorted(self._options.namespaces)
            group.create_task(TemplateCollector(self._client, shares.used_templates, keep, places).run())
            group.create_task(plans.run())
