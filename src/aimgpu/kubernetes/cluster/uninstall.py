"""``python -m aimgpu.kubernetes.cluster.uninstall``: take away what agents and admission wrote, when the chart is removed.

Pods that wait to be placed are let go: nobody is left who would place them.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aimgpu.errors import NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.program import run_program
from aimgpu.kubernetes.api.resources import CLAIM_TEMPLATES, NODES, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.operator.node_views import MANAGER, let_go, node_change, view_node, with_node
from aimgpu.kubernetes.cluster.placer.ungating import ungate_pods
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES
from aimgpu.kubernetes.vocabulary.names import DRIVER, GROUP, LABEL_MANAGED, LABEL_PLAN, MANAGED_BY, NODE_LABELS

log = logging.getLogger(__name__)

_AT_ONCE = 16  # requests to the API server


async def forget_nodes(client: Client) -> None:
    """Labels, GpuNodes and slices; the node's ledger and what others wrote stay. Safe to repeat.

    A node that a PartitionPlan has closed takes pods again: nobody is left who would open it.
    """
    held, _ = await client.list(NODES, labels=LABEL_PLAN)
    await _each(held, lambda node: _open(client, node))
    nodes, _ = await client.list(NODES, labels=LABEL_MANAGED)
    await _each(nodes, lambda node: _forget_labels(client, node))
    for resource, fields in ((GPU_NODES, ""), (RESOURCE_SLICES, f"spec.driver={DRIVER}")):
        with contextlib.suppress(NotFoundInCluster):  # the server does not know the kind
            await client.delete_all(resource, fields=fields)


async def forget_templates(client: Client) -> None:
    """Claim templates of admission, in every namespace: pods that run have their claims, which stay."""
    try:
        templates, _ = await client.list(
            CLAIM_TEMPLATES, labels=",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
        )
    except NotFoundInCluster:  # the server does not know the kind
        return
    await _each(templates, lambda template: _forget_template(client, template))


async def _forget_template(client: Client, template: Object) -> None:
    with contextlib.suppress(NotFoundInCluster):  # its namespace went meanwhile
        await client.delete(CLAIM_TEMPLATES, template["metadata"]["name"], template["metadata"]["namespace"])


async def _open(client: Client, node: Object) -> None:
    """A person's cordon stays."""
    view = view_node(node, {})
    step = let_go({}, {})
    for action in step.actions:
        if change := node_change(view, action, step, ""):
            with contextlib.suppress(NotFoundInCluster):  # removed meanwhile
                view = with_node(view, await client.patch(NODES, view.name, change, manager=MANAGER))
    log.info("node.opened", extra={"data": {"node": view.name}})


async def _forget_labels(client: Client, node: Object) -> None:
    name = node["metadata"]["name"]
    changes = {label: None for label in NODE_LABELS if label in (node["metadata"].get("labels") or {})}
    with contextlib.suppress(NotFoundInCluster):  # removed meanwhile
        await client.patch(NODES, name, {"metadata": {"labels": changes}})
    log.info("node.forgotten", extra={"data": {"node": name}})


async def _each(items: Sequence[Object], work: Callable[[Object], Awaitable[None]]) -> None:
    """Several at once: one after the other, the nodes of a large cluster would take longer than `helm uninstall` waits."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Object) -> None:
        async with turns:
            await work(item)

    await asyncio.gather(*(one(item) for item in items))


def uninstall_rules() -> list[dict[str, Any]]:
    """What that needs in the API."""
    return [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "patch"]},
        {"apiGroups": [GROUP], "resources": ["gpunodes"], "verbs": ["deletecollection"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["deletecollection"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaimtemplates"], "verbs": ["list", "delete"]},
    ]


async def forget_all(client: Client) -> None:
    await forget_nodes(client)
    await forget_templates(client)
    await ungate_pods(client)


if __name__ == "__main__":
    sys.exit(run_program(lambda client: asyncio.ensure_future(forget_all(client))))
