"""`plan`, `explain`, `capacity` and `snapshot` with `--on kubernetes`, against an API server in this process."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes.applied_objects import applied, rendered
from tests.kubernetes.page_objects import node, pod, share
from tests.kubernetes.small_api_server import OWN, SmallApiServer

from aimgpu.cli.main import run_command
from aimgpu.hardware.simulated.products import find_product
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, GPU_SHARES

FULL = find_product("MI300X").memory_bytes
Ran = tuple[int, str, str]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """One GPU, of which the pod of `chat` has 10 GiB; another pod of it waits."""

    def call(*words: str, stack: str = "", gpus: bool = True, holder: str = "chat-1") -> Ran:
        async def main() -> int:
            async with SmallApiServer() as server, server.client():
                waiting = pod("chat-2", type="PodScheduled", status="False", message="0/1 nodes: cannot allocate all claims")
                del waiting["spec"]["nodeName"]
                waiting["status"]["phase"] = "Pending"
                held = share(holder)
                held["status"]["replicas"][0]["partitionInfo"] |= {
                    "partitionId": "gpu-0/spx-0",
                    "partitionSizeGB": FULL / 10**9,
                }
                if gpus:
                    server.put(GPU_NODES, node(memoryBytes=FULL, layout="SPX/NPS1", layouts=["SPX/NPS1"]))
                server.put(DEPLOYMENTS, applied(rendered("{model: org/Tiny-1B, engine: vllm, gpu: {memory: 10GiB}}")))
                for one in (pod("chat-1"), waiting):
                    server.put(PODS, one)
                server.put(GPU_SHARES, held)
                return await asyncio.to_thread(run_command, [*words, *where(server.url)])

        def where(server: str) -> list[str]:
            config = {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": OWN}}],
            }
            path = tmp_path / "config"
            path.write_text(yaml.safe_dump(config))
            file = tmp_path / "stack.yaml"
            file.write_text(f"models: {{{stack}}}")
            return ["--on", "kubernetes", "--kubeconfig", str(path), *(["-f", str(file)] if stack else [])]

        status = asyncio.run(main())
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def asks(name: str, memory: str, **more: Any) -> str:
    return f"{name}: " + json.dumps({"model": f"org/{name}", "engine": "vllm", "gpu": {"memory": memory}, **more})


def test_a_stack_that_fits_beside_what_runs_is_planned_and_what_runs_is_not_placed_again(run: Callable[..., Ran]) -> None:
    status, text, _ = run("plan", "--json", stack=f"{asks('chat', '10GiB')}, {asks('more', '20GiB', replicas=2)}")
    placed = {one["ask"]: one["slots"][0]["partition_id"] for one in json.loads(text)["placements"]}
    assert (status, placed) == (0, dict.fromkeys(("more-0", "more-1"), "n1/gpu-0/spx-0"))


def test_what_does_not_fit_is_refused_with_the_reason_and_nothing_is_moved_for_it(run: Callable[..., Ran]) -> None:
    status, text, error = run("plan", stack=asks("large", "185GiB"))
    assert status != 0
    assert "1 of 1 do not fit: large-0" in error
    assert "does not fit on n1/gpu-0: has 181.9GiB free" in text
    assert "move" not in text


def test_memory_that_serves_no_model_is_held_by_other_pods(run: Callable[..., Ran]) -> None:
    status, text, _ = run("plan", stack=asks("large", "185GiB"), holder="notebook")
    assert status != 0
    assert "GiB used by other pods)" in text
    assert "End the other pods on n1/gpu-0: they use " in text


def test_every_pod_of_a_model_is_explained_with_kube_schedulers_reason(run: Callable[..., Ran]) -> None:
    status, text, _ = run("explain", "chat")
    assert status == 0
    first, _, second = text.partition("chat-2:")
    assert "chosen" in first
    assert "kube-scheduler has no place for it: 0/1 nodes: cannot allocate all claims." in second
    assert "By memory alone a GPU has room for it now" in second
    assert "there is no model 'chatt'" in run("explain", "chatt")[2]


@pytest.mark.parametrize(("memory", "more"), [("50GiB", 3), ("185GiB", 0)])
def test_capacity_counts_how_many_more_fit(run: Callable[..., Ran], memory: str, more: int) -> None:
    status, text, _ = run("capacity", "--json", stack=asks("one", memory))
    assert (status, json.loads(text)["models"]) == (0, [{"name": "one", "more": more}])


def test_a_snapshot_of_a_cluster_is_planned_on_anywhere(run: Callable[..., Ran], tmp_path: Path) -> None:
    status, text, _ = run("snapshot")
    (state,) = json.loads(text)["nodes"][0]["devices"]
    assert (status, state["device"]["id"]) == (0, "n1/gpu-0")
    (tmp_path / "s.json").write_text(text)
    (tmp_path / "other.yaml").write_text(f"models: {{{asks('more', '20GiB')}}}")
    assert run_command(["plan", "-f", str(tmp_path / "other.yaml"), "--snapshot", str(tmp_path / "s.json")]) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("plan", "--gpu", "MI300X"), "--gpu and --on kubernetes were both given"),
        (("plan", "--free", "1"), "about one machine"),
        (("plan",), "no GPU of the cluster can be seen"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Callable[..., Ran], words: tuple[str, ...], reason: str) -> None:
    status, _, error = run(*words, stack=asks("one", "1GiB"), gpus=False)
    assert status != 0
    assert reason in error
