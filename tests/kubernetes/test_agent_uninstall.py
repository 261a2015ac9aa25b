"""What agents wrote in the cluster is taken away with the chart, and nothing else."""

import asyncio

from tests.kubernetes.api_server import serving

from aimgpu.kubernetes.cluster.uninstall import forget_all, forget_nodes, forget_templates
from aimgpu.kubernetes.vocabulary.names import GATE

NODES, GPU_NODES = "/api/v1/nodes", "/apis/aim.amd.com/v1alpha1/gpunodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def test_labels_gpu_nodes_and_slices_of_ours_go_and_those_of_others_stay() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            ours = {"aim.amd.com/gpu-sharing.managed": "true", "nvidia.com/gpu.product": "H200", "amd.com/gpu.vram": "191G"}
            api.put(NODES, {"metadata": {"name": "n1", "labels": {**ours, "zone": "a", "nvidia.com/cuda.driver.major": "580"}}})
            api.put(NODES, {"metadata": {"name": "n2", "labels": {"nvidia.com/gpu.product": "H200"}}})  # another program's
            api.put(GPU_NODES, {"metadata": {"name": "n1"}})
            for driver in ("gpu.aim.amd.com", "gpu.nvidia.com"):
                api.put(SLICES, {"metadata": {"name": driver}, "spec": {"driver": driver}})
            for number in range(100):
                api.put(NODES, {"metadata": {"name": f"many-{number}", "labels": ours}})
            for _ in range(2):  # safe to repeat
                await forget_nodes(client)
            labels = {name: (api.find(f"{NODES}/{name}") or {})["metadata"]["labels"] for name in ("n1", "n2")}
            assert labels == {
                "n1": {"zone": "a", "nvidia.com/cuda.driver.major": "580"},
                "n2": {"nvidia.com/gpu.product": "H200"},
            }
            left = [
                item["metadata"] for (kind, _, name), item in api.store.objects.items() if kind == "nodes" and "many" in name
            ]
            assert [item.get("labels") for item in left] == [{}] * 100
            assert api.find(f"{GPU_NODES}/n1") is None
            assert api.find(f"{SLICES}/gpu.aim.amd.com") is None
            assert api.find(f"{SLICES}/gpu.nvidia.com") is not None

    asyncio.run(main())


def test_a_node_that_goes_meanwhile_does_not_end_it() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            for name in ("n1", "n2"):
                api.put(NODES, {"metadata": {"name": name, "labels": {"aim.amd.com/gpu-sharing.managed": "true"}}})
            api.put(GPU_NODES, {"metadata": {"name": "n1"}})
            api.fault = lambda method, path: 404 if (method, path) == ("PATCH", f"{NODES}/n1") else None
            await forget_nodes(client)
            assert (api.find(f"{NODES}/n2") or {})["metadata"]["labels"] == {}
            assert api.find(f"{GPU_NODES}/n1") is None

    asyncio.run(main())


def test_claim_templates_of_admission_go_in_every_namespace_and_those_of_users_stay() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            ours = {"app.kubernetes.io/managed-by": "aim-gpu-sharing"}
            paths = [f"/apis/resource.k8s.io/v1/namespaces/{name}/resourceclaimtemplates" for name in ("a", "b")]
            for path in paths:
                api.put(path, {"metadata": {"name": "aim-gpu-1", "labels": ours}})
                api.put(path, {"metadata": {"name": "own", "labels": {"app": "x"}}})
            gone = f"{paths[1]}/aim-gpu-1"
            api.fault = lambda method, path: 404 if (method, path) == ("DELETE", gone) else None  # its namespace went
            await forget_templates(client)
            assert api.find(f"{paths[0]}/aim-gpu-1") is None
            assert all(api.find(f"{path}/own") for path in paths)
            api.fault = lambda _method, path: 404 if "resourceclaimtemplates" in path else None  # a server without the kind
            await forget_templates(client)

    asyncio.run(main())


def test_pods_that_wait_to_be_placed_are_let_go_and_other_gates_stay() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            path, hold = "/api/v1/namespaces/a/pods", {"name": "test/hold"}
            for name, gates in (("ours", [{"name": GATE}]), ("both", [{"name": GATE}, hold]), ("other", [hold])):
                api.put(path, {"metadata": {"name": name, "namespace": "a", "uid": name}, "spec": {"schedulingGates": gates}})
            await forget_all(client)
            specs = {name: (api.find(f"{path}/{name}") or {})["spec"] for name in ("ours", "both", "other")}
            assert specs == {"ours": {}, "both": {"schedulingGates": [hold]}, "other": {"schedulingGates": [hold]}}

    asyncio.run(main())
