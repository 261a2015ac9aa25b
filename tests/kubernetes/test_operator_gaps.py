"""What goes while the operator's watches are interrupted comes back with its name only, and still counts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from aimgpu.kubernetes.api.client import Client, Resource, WatchEvent
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions
from aimgpu.kubernetes.cluster.operator.shares.loop import ShareLoop

OWNER = {"kind": "ReplicaSet", "name": "web-abc", "controller": True}
LABELS = {"pod-template-hash": "abc"}
POD = {"metadata": {"name": "web-abc-1", "namespace": "ns", "labels": LABELS, "ownerReferences": [OWNER]}, "spec": {}}


def share(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"deployment-{name}", "namespace": "ns"},
        "spec": {"workload": {"kind": "Deployment", "name": name}},
    }


def only_name(item: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {key: item["metadata"][key] for key in ("name", "namespace")}}


class InterruptedClient:
    """Plays back what a client's watches report when they list again after a gap; notes what is deleted."""

    def __init__(self) -> None:
        self.deleted: asyncio.Queue[str] = asyncio.Queue()

    async def watch(self, resource: Resource, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
        before: list[dict[str, Any]] = {"pods": [POD], "gpushares": [share("web"), share("gone")]}.get(resource.plural, [])
        for item in before:
            yield WatchEvent(type="ADDED", object=item)
        if resource.plural == "gpushares":
            yield WatchEvent(type="DELETED", object=only_name(share("gone")))
        if resource.plural == "pods":
            yield WatchEvent(type="DELETED", object=only_name(POD))
        yield WatchEvent(type="SYNCED", object={})
        await asyncio.Event().wait()

    async def delete(self, _resource: Resource, name: str, _namespace: str) -> bool:
        self.deleted.put_nowait(name)
        return True


def test_a_pod_that_went_in_a_gap_takes_the_share_of_its_workload_with_it() -> None:
    async def first_deleted() -> str:
        client = InterruptedClient()
        loop = ShareLoop(cast("Client", cast("Any", client)), OperatorOptions(namespace="system"))
        running = asyncio.ensure_future(loop.run())
        found = asyncio.ensure_future(client.deleted.get())
        await asyncio.wait({running, found}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        return await found if found.done() else str(running.exception())

    assert asyncio.run(first_deleted()) == "deployment-web"
