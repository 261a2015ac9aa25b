"""``python -m aimgpu.kubernetes.agent.uninstall``: take from the nodes what agents wrote there, when the chart is removed."""

import asyncio
import contextlib
import logging
import sys
from typing import Any

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.agent.labels import label_changes
from aimgpu.kubernetes.api_client import Client
from aimgpu.kubernetes.custom_resources import GPU_NODES
from aimgpu.kubernetes.names import DRIVER, GROUP, LABEL_MANAGED
from aimgpu.kubernetes.program import run_program
from aimgpu.kubernetes.standard_resources import NODES, RESOURCE_SLICES

log = logging.getLogger(__name__)


async def forget_nodes(client: Client) -> None:
    """Labels, GpuNodes and slices; the node's ledger and what others wrote stay. Safe to repeat."""
    for node in (await client.list(NODES, labels=LABEL_MANAGED))[0]:
        changes = label_changes(node["metadata"].get("labels") or {}, {})
        await client.patch(NODES, node["metadata"]["name"], {"metadata": {"labels": changes}})
        log.info("node.forgotten", extra={"data": {"node": node["metadata"]["name"]}})
    for resource, fields in ((GPU_NODES, ""), (RESOURCE_SLICES, f"spec.driver={DRIVER}")):
        with contextlib.suppress(NotFoundInCluster):  # the server does not know the kind
            for found in (await client.list(resource, fields=fields))[0]:
                await client.delete(resource, found["metadata"]["name"])


def uninstall_rules() -> list[dict[str, Any]]:
    """What that needs in the API."""
    return [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "patch"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes"], "verbs": ["list", "delete"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "delete"]},
    ]


if __name__ == "__main__":
    sys.exit(run_program(lambda client: asyncio.ensure_future(forget_nodes(client))))
