"""What our programs rely on of an API server: the real one and that of the tests are held to the same."""

import pytest

from aimgpu.errors import ClusterConflict, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.cluster.operator.node_views import MANAGER, view_node

MAPS = Resource(version="v1", plural="configmaps", namespaced=True)
NODES = Resource(version="v1", plural="nodes")


async def check_objects(client: Client, namespace: str) -> None:
    """Versions change with what changes; a stale one is refused; null removes."""
    made = await client.create(MAPS, _map("one", a="1"), namespace)
    with pytest.raises(ClusterConflict):
        await client.create(MAPS, _map("one"), namespace)
    same = await client.patch(MAPS, "one", {"data": {"a": "1"}}, namespace)
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    changed = await client.patch(MAPS, "one", {"data": {"a": None, "b": "2"}}, namespace)
    assert changed["data"] == {"b": "2"}
    assert changed["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "data": {"c": "3"}}
    with pytest.raises(ClusterConflict):
        await client.patch(MAPS, "one", stale, namespace)
    with pytest.raises(ClusterConflict):
        await client.replace(MAPS, made, namespace)
    with pytest.raises(ClusterConflict):
        await client.delete(MAPS, "one", namespace, version=made["metadata"]["resourceVersion"])
    await check_selectors(client, namespace)
    assert await client.delete(MAPS, "one", namespace, version=changed["metadata"]["resourceVersion"])
    with pytest.raises(NotFoundInCluster):
        await client.patch(MAPS, "one", {"data": {}}, namespace)


async def check_selectors(client: Client, namespace: str) -> None:
    body = _map("two")
    body["metadata"]["labels"] = {"kind": "x"}
    await client.create(MAPS, body, namespace)
    for labels, count in (("kind", 1), ("kind=x", 1), ("kind=y", 0), ("kind=x,other", 0)):
        assert len((await client.list(MAPS, namespace, labels=labels))[0]) == count
    assert len((await client.list(MAPS, namespace, fields="metadata.name=two"))[0]) == 1


async def check_cordons(client: Client, name: str) -> None:
    """A field belongs to the one who changed it last; writing what is there already takes nothing over."""
    await client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"made": "here"}}})
    try:
        await _cordon(client, name, "kubectl-cordon")
        assert not await _is_ours(client, name)
        await _cordon(client, name, MANAGER)
        assert not await _is_ours(client, name)
        await _uncordon(client, name, "kubectl-uncordon")
        await _cordon(client, name, MANAGER)
        assert await _is_ours(client, name)
        await _cordon(client, name, "kubectl-cordon")
        assert await _is_ours(client, name)
        await _uncordon(client, name, MANAGER)
        await _cordon(client, name, "kubectl-cordon")
        assert not await _is_ours(client, name)
    finally:
        await client.delete(NODES, name)


async def _cordon(client: Client, name: str, manager: str) -> None:
    await client.patch(NODES, name, {"spec": {"unschedulable": True}}, manager=manager)


async def _uncordon(client: Client, name: str, manager: str) -> None:
    await client.patch(NODES, name, {"spec": {"unschedulable": None}}, manager=manager)


async def _is_ours(client: Client, name: str) -> bool:
    seen = view_node(await client.get(NODES, name), {})
    assert seen.cordoned
    return seen.cordoned_by_us


def _map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
