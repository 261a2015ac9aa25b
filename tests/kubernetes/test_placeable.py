"""What is free for a claim that waits, device by device; and stacks that no GPU of a cluster can hold change nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kubernetes.api_server import ApiServer, serving

from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.errors import Conflict, InvalidInput
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator.shares.indexes import ClaimIndex, DeviceIndex, GpuNodeIndex, KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.room import ClaimRoom, find_room
from aimgpu.kubernetes.cluster.operator.shares.status import share_status
from aimgpu.kubernetes.cluster.placeable import refuse_unplaceable
from aimgpu.kubernetes.models.serving.applier import StackApplier
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.manifests import RenderOptions, render_stack

Object = dict[str, Any]
DRA, CORE = "/apis/resource.k8s.io/v1", "/api/v1/namespaces/team"
SHARED, WHOLE = "shared.gpu.aim.amd.com", "gpu.aim.amd.com"


def devices(gpu: str, gib: int, *, product: str = "MI300X") -> list[Object]:
    """A whole GPU and the shares of it."""

    def device(name: str, kind: str) -> Object:
        texts = {"type": kind, "gpu": gpu, "productName": product, "computeMode": "SPX", "vendor": "amd"}
        found: Object = {key: {"string": value} for key, value in texts.items()}
        found |= {"current": {"bool": True}, "partitioned": {"bool": False}}
        return {"name": name, "attributes": found, "capacity": {"memory": {"value": f"{gib}Gi"}}}

    return [device(gpu, "gpu"), device(f"{gpu}-shared", "shared")]


def slice_of(node: str, *gpus: list[Object]) -> Object:
    spec = {"driver": "gpu.aim.amd.com", "pool": {"name": node}, "devices": [one for gpu in gpus for one in gpu]}
    return {"metadata": {"name": node}, "spec": spec}


def claim(name: str, device: str, gib: int | None, node: str = "n1", namespace: str = "team") -> Object:
    result: Object = {"driver": "gpu.aim.amd.com", "pool": node, "device": device}
    if gib is not None:
        result["consumedCapacity"] = {"memory": f"{gib}Gi"}
    status = {"allocation": {"devices": {"results": [result]}}}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {}, "status": status}


def asks(gib: int | None, count: int = 1, device_class: str = SHARED) -> Object:
    exactly: Object = {"deviceClassName": device_class, "count": count}
    if gib is not None:
        exactly["capacity"] = {"requests": {"memory": f"{gib}Gi"}}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def room(spec: Object, slices: list[Object], *claims: Object) -> ClaimRoom:
    found = find_room(spec, KnownGpus(claims=ClaimIndex(claims), devices=DeviceIndex(slices), nodes=GpuNodeIndex()))
    assert found is not None
    return found


ONE_NODE = [slice_of("n1", devices("a", 192), devices("b", 192))]


@pytest.mark.parametrize(
    ("spec", "claims", "ever", "now", "words"),
    [
        (asks(100), [claim("c", "a-shared", 150)], True, True, "n1/b has 192GiB free"),
        (
            asks(100),
            [claim("c", "a-shared", 150), claim("d", "b-shared", 100)],
            True,
            False,
            "it asks for 100GiB; n1/b has 92GiB free, n1/a has 42GiB free; up to 92GiB would fit now",
        ),
        (
            asks(100),
            [claim("c", "a", None), claim("d", "b", None)],
            True,
            False,
            "n1/a has 0B free (given whole), n1/b has 0B free (given whole); nothing would fit now",
        ),
        (asks(900), [], False, False, "no GPU of the cluster is that large: the largest device has 192GiB"),
        (asks(10, count=3), [], False, False, "it asks for 10GiB of each of 3 GPUs of one node"),
        (asks(10, count=2), [claim("c", "a", None)], True, False, "n1/a has 0B free (given whole)"),
        (
            asks(None, device_class=WHOLE),
            [claim("c", "a-shared", 1), claim("d", "b-shared", 1)],
            True,
            False,
            "(shared)",
        ),
        (asks(None, device_class="partition.gpu.aim.amd.com"), [], False, False, "no GPU of the cluster has such a device"),
    ],
)
def test_the_room_for_a_claim_is_told_device_by_device(
    spec: Object,
    claims: list[Object],
    *,
    ever: bool,
    now: bool,
    words: str,
) -> None:
    found = room(spec, ONE_NODE, *claims)
    assert (found.ever, found.now) == (ever, now)
    assert words in found.text


def test_a_claim_whose_terms_are_not_understood_is_not_guessed_at() -> None:
    gpus = KnownGpus(claims=ClaimIndex(), devices=DeviceIndex(ONE_NODE))
    spec = asks(10)
    spec["devices"]["requests"][0]["exactly"]["selectors"] = [{"cel": {"expression": "device.attributes['x'].y > 3"}}]
    assert find_room(spec, gpus) is None
    assert find_room(asks(10, device_class="net.example.com"), gpus) is None
    assert find_room(asks(10), KnownGpus()) is None


def pod(name: str, claim_name: str, version: str, *, node: str = "", **status: Any) -> Object:
    made = [{"name": "aim-gpu", "resourceClaimName": claim_name}]
    metadata = {"name": name, "namespace": "team", "labels": {"pod-template-hash": version, "aim.amd.com/gpu-share": "true"}}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"resourceClaimStatuses": made, **status}}


def message(pods: list[Object], *claims: Object) -> tuple[str, str]:
    gpus = KnownGpus(claims=ClaimIndex(claims), devices=DeviceIndex(ONE_NODE))
    (found,) = share_status(pods, gpus, {})["conditions"]
    return found["status"], found["message"]


def test_a_pod_that_waits_for_the_one_before_it_is_told_which_and_what_to_set() -> None:
    waits: Object = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "2 cannot allocate all claims"}]}
    before = pod("web-1", "one", "old", node="n1", phase="Running")
    after = pod("web-2", "two", "new", phase="Pending", **waits)
    unallocated = {"metadata": {"name": "two", "namespace": "team"}, "spec": asks(150), "status": {}}
    taken = (claim("one", "a-shared", 150), claim("other", "b-shared", 150, namespace="x"))
    status, text = message([before, after], *taken, unallocated)
    assert status == "False"
    assert "2 cannot allocate all claims; it asks for 150GiB; n1/a has 42GiB free" in text
    assert "web-1 of the version before has its share until this pod is ready: set maxSurge: 0" in text


def test_a_share_is_not_allocated_before_the_node_has_prepared_it() -> None:
    """Also where the node cannot write into the claim why it refuses it."""
    starting = pod("web-1", "one", "v", node="n1", phase="Pending")
    given = claim("one", "a-shared", 10)
    assert message([starting], given) == ("False", "1 of 1 pods wait: web-1 is not started on n1 yet")
    prepared = claim("one", "a-shared", 10)
    ready = {"type": "Ready", "status": "True"}
    place = {"driver": "gpu.aim.amd.com", "pool": "n1", "device": "a-shared"}
    prepared["status"]["devices"] = [{**place, "conditions": [ready]}]
    assert message([starting], prepared)[0] == "True"
    assert message([pod("web-1", "one", "v", node="n1", phase="Running")], given)[0] == "True"


def play(scenario: Callable[[ApiServer, Client], Awaitable[None]], *gpus: list[Object]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            api.put(f"{DRA}/resourceslices", slice_of("n1", *gpus))
            await scenario(api, client)

    asyncio.run(main())


def manifests(gpu: str) -> list[Object]:
    stack = parse_stack(f"models: {{chat: {{model: org/chat, engine: vllm, gpu: {gpu}}}}}", base_directory=Path("/nowhere"))
    return render_stack(stack.deployments, RenderOptions(images=ServingImages(own="own:1", vendor="amd")))


def test_a_program_that_no_gpu_can_hold_is_refused() -> None:
    async def scenario(_api: ApiServer, client: Client) -> None:
        for restart in ("never", "always"):
            program = f"{{command: [a], image: b, restart: {restart}, gpu: {{memory: 900GiB}}}}"
            stack = parse_stack(f"programs: {{train: {program}}}")
            found = render_stack(stack.deployments, RenderOptions(images=ServingImages(own=None)))
            with pytest.raises(InvalidInput, match="train: it asks for 900GiB, and no GPU of the cluster is that large"):
                await refuse_unplaceable(client, found, "team")

    play(scenario, devices("a", 192))


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ("{memory: 900GiB}", "chat: it asks for 900GiB, and no GPU of the cluster is that large"),
        ("{memory: 10GiB, devices: 3}", "chat: it asks for 10GiB of each of 3 GPUs of one node"),
        ("{whole: 3}", "chat: it asks for a whole device of each of 3 GPUs"),
        ("auto", "chat: aim.amd.com/gpu-sharing: nothing is known about the model 'org/chat'"),
    ],
)
def test_a_stack_that_no_gpu_can_hold_is_refused(gpu: str, reason: str) -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        with pytest.raises(InvalidInput) as refused:
            await refuse_unplaceable(client, manifests(gpu), "team")
        assert reason in refused.value.message
        assert api.writes == []

    play(scenario, devices("a", 192), devices("b", 192))


def test_without_a_view_of_the_gpus_nothing_is_refused() -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        api.fault = lambda _method, path: 403 if "resourceslices" in path else None
        await refuse_unplaceable(client, manifests("{memory: 900GiB}"), "team")

    play(scenario, devices("a", 192))


def test_a_model_that_runs_is_not_taken_away_for_a_share_that_has_no_place() -> None:
    async def scenario(api: ApiServer, client: Client) -> None:
        async for _ in StackApplier(client, "team").apply(manifests("{memory: 40GiB}")):
            pass
        running = pod("chat-1", "own", "v", node="n1", phase="Running")
        running["metadata"]["labels"]["aim.amd.com/served-model"] = "chat"
        api.put(f"{CORE}/pods", running)
        claims = f"{DRA}/namespaces/team/resourceclaims"
        api.put(claims, claim("own", "a-shared", 40))
        api.put(claims, claim("other", "a-shared", 100))
        await refuse_unplaceable(client, manifests("{memory: 40GiB}"), "team")  # as it is
        await refuse_unplaceable(client, manifests("{memory: 90GiB}"), "team")  # 52 GiB and its own 40
        with pytest.raises(Conflict) as refused:
            await refuse_unplaceable(client, manifests("{memory: 93GiB}"), "team")
        assert "chat runs, and a pod with its new share would have no place" in refused.value.message
        assert "n1/a has 92GiB free" in refused.value.message
        api.remove(f"{CORE}/pods/chat-1")
        await refuse_unplaceable(client, manifests("{memory: 93GiB}"), "team")  # nothing is taken away: it waits for room

    play(scenario, devices("a", 192))
