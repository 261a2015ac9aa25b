"""`aimgpu resize --on kubernetes`, against an API server in this process: what it waits for, and what it leaves behind."""

import asyncio
from typing import Any

import pytest
from tests.kubernetes.api_server import until
from tests.kubernetes.applied_objects import applied, rendered
from tests.kubernetes.page_objects import node, pod, share
from tests.kubernetes.small_api_server import OWN, SmallApiServer

from aimgpu.cli.commands.cluster import resizing
from aimgpu.cli.commands.cluster.resizing import ClusterResize
from aimgpu.errors import EngineFailed
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES

FULL = find_product("MI300X").memory_bytes
DONE = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}


def crashed(name: str) -> dict[str, Any]:
    found = pod(name, type="Ready", status="False")
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    found["status"]["containerStatuses"] = [{"name": "engine", "state": waiting}]
    return found


def put_model(server: SmallApiServer) -> None:
    """One pod, with 10 GiB of the only GPU, that crashes."""
    server.rights[OWN] |= {"patch"}
    held = share("chat-1")
    held["status"]["replicas"][0]["partitionInfo"] |= {"partitionId": "gpu-0/spx-0", "partitionSizeGB": FULL / 10**9}
    server.put(GPU_NODES, node(memoryBytes=FULL, layout="SPX/NPS1", layouts=["SPX/NPS1"]))
    server.put(DEPLOYMENTS, applied(rendered("{model: org/Tiny-1B, engine: vllm, gpu: {memory: 10GiB}}")))
    server.put(PODS, crashed("chat-1"))
    server.put(GPU_SHARES, held)


def resize(*, new_pod: dict[str, Any] | None, detach: bool = False) -> tuple[int, list[Any]]:
    """The status of the command, and the strategies that it wrote; `new_pod`: one that comes with the new share."""

    async def main() -> tuple[int, list[Any]]:
        async with SmallApiServer() as server, server.client() as client:
            put_model(server)
            asked = ClusterResize(model="chat", memory_bytes=20 << 30, detach=detach)
            running = asyncio.ensure_future(resizing._resize(client, "team", asked))
            await until(lambda: bool(server.patches) or running.done())
            if new_pod is None:
                server.objects(DEPLOYMENTS, "team")["chat"]["status"] = DONE
            else:
                server.put(PODS, new_pod)
            return await running, [body["spec"]["strategy"]["rollingUpdate"]["maxSurge"] for _, body in server.patches]

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_LOOK_SECONDS", 0.01)


def test_an_old_pod_that_fails_does_not_end_the_wait_and_the_strategy_is_as_before() -> None:
    assert resize(new_pod=None) == (0, [1, 0])


def test_a_new_pod_that_fails_is_reported_and_old_ones_are_not_ended_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert resize(new_pod=crashed("chat-2")) == (EngineFailed.exit_status, [1])
    assert "maxSurge 1" in capsys.readouterr().out


def test_without_waiting_the_strategy_that_stays_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert resize(new_pod=crashed("chat-2"), detach=True) == (0, [1])
    assert "maxSurge 1" in capsys.readouterr().out
