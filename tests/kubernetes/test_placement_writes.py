"""What the placer does with one pod where the API server, or the pod, is not as it should be. No cluster."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.kubernetes.placed_nodes import node_body, pod_body

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.cluster.operator.options import OperatorOptions, PlacementForm
from aimgpu.kubernetes.cluster.placer.placer import PodPlacer
from aimgpu.kubernetes.cluster.placer.pods import PodView, read_pod
from aimgpu.kubernetes.cluster.placer.rules import read_node
from aimgpu.kubernetes.vocabulary.names import GATE, HINT, UNHINTED

if TYPE_CHECKING:
    from aimgpu.kubernetes.api.client import Client

KEY = ("a", "p")


class Server:
    """Refuses statuses, and has no volumes to show."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    async def find(self, *_: object) -> None:
        raise ClusterFailed("the server is away")

    async def patch(
        self, _resource: object, _name: str, body: dict[str, Any], *_: object, subresource: str = "", **__: object
    ) -> None:
        if subresource:
            raise ClusterFailed("a policy says no", status=422)
        self.written.append(body)


def placed(server: Server, **spec: Any) -> tuple[PodPlacer, PodView]:
    placer = PodPlacer(cast("Client", server), OperatorOptions(namespace="a", placement=PlacementForm.HINT), "me", {})
    placer._gap = None
    placer._fleet.put_node("n1", read_node(node_body("n1", {"cpu": "1", "memory": "1Gi", "pods": "9"})))
    pod = pod_body("p", {"cpu": "1"}, schedulingGates=[{"name": GATE}], **spec)
    pod["metadata"] |= {"namespace": "a", "uid": "p"}
    placer._fleet.put_pod(KEY, view := read_pod(pod))
    return placer, view


def test_a_pod_whose_volumes_cannot_be_read_waits_for_the_next_look() -> None:
    placer, view = placed(Server(), volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    assert asyncio.run(placer._choose(view)) is None
    assert placer._fleet.waits(view)


def test_a_pod_that_cannot_be_evaluated_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("too large")

    placer, view = placed(Server())
    monkeypatch.setattr(placer._fleet, "choose", fail)
    choice = asyncio.run(placer._choose(view))
    assert choice is not None
    assert choice.skipped == "it cannot be evaluated"


def test_a_pod_whose_hint_is_refused_is_let_go_without_one() -> None:
    server = Server()
    placer, view = placed(server)

    async def write() -> None:
        choice = await placer._choose(view)
        assert choice is not None
        assert choice.node == "n1"
        await placer._slots.acquire()
        placer._writing[KEY] = placer._last["n1"] = asyncio.ensure_future(placer._write(view, choice, None))
        await placer._writing[KEY]

    asyncio.run(write())
    (body,) = server.written
    assert body["spec"] == {"schedulingGates": None}
    assert "a policy says no" in body["metadata"]["annotations"][UNHINTED]
    assert HINT not in body["metadata"]["annotations"]
    assert (placer._last, placer._writing, placer.counts["skipped"]) == ({}, {}, 1)
    assert not placer._fleet.waits(view)
    assert getattr(placer._fleet.choose(view), "node", "") == "n1", "its room was given back"
