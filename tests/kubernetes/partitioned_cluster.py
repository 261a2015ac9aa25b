"""Nodes with GPUs, pods on them and plans for them, on the API server of a test; the node agent's part is played here."""

from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.api_server import ApiServer

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.operator.plan_loop import PlanLoop

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/team/pods"
PLANS, GPU_NODES = "/apis/aim.amd.com/v1alpha1/partitionplans", "/apis/aim.amd.com/v1alpha1/gpunodes"
LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "CPX/NPS1", "CPX/NPS4"]
GPU = "gpu-a"
TAINT = {"key": "amd-dcm", "value": "up", "effect": "NoExecute"}
CLOSED = {"key": "aim.amd.com/repartitioning", "effect": "NoSchedule"}

Object = dict[str, Any]


@dataclass
class PartitionedCluster:
    """Looked at by one operator after another, by a clock that the test sets."""

    api: ApiServer
    client: Client
    clock: float = 1000.0
    loop: PlanLoop = field(init=False)

    def __post_init__(self) -> None:
        self.start_operator()

    def start_operator(self) -> None:
        """A new one, which knows nothing of the one before."""
        self.loop = PlanLoop(self.client, "system", lambda: self.clock)

    def add_node(self, name: str = "n1", layout: str = "SPX/NPS1", **node: Any) -> None:
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **node.pop("labels", {})}}
        self.api.put(NODES, {"metadata": metadata, "spec": node})
        gpu = {"id": GPU, "index": 0, "product": "MI300X", "layout": layout, "layouts": LAYOUTS, "memoryBytes": 192 << 30}
        self.api.put(GPU_NODES, {"metadata": {"name": name}, "spec": {}, "status": {"gpus": [gpu], "observedGeneration": 1}})

    def add_pod(self, name: str, node: str = "n1") -> None:
        metadata = {"name": name, "labels": {"aim.amd.com/gpu-share": "true"}}
        self.api.put(PODS, {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})

    def add_plan(self, name: str = "cpx", **spec: Any) -> Object:
        """To CPX unless another layout is given."""
        wanted = {"layout": {"computeMode": "CPX"}, **spec}
        body = {"apiVersion": "aim.amd.com/v1alpha1", "kind": "PartitionPlan", "metadata": {"name": name}, "spec": wanted}
        return self.api.put(PLANS, body)

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.loop.look()
            self.clock += 2  # as it waits between looks

    async def carry_on(self, looks: int = 8) -> None:
        """Looks, and between them an agent that applies what is wanted."""
        for _ in range(looks):
            await self.look()
            self.act_as_agent()

    def act_as_agent(self, *, refuse: str = "") -> None:
        for (kind, _, name), item in list(self.api.store.objects.items()):
            if kind != "gpunodes":
                continue
            wanted = {one["gpu"]: one["layout"] for one in (item.get("spec") or {}).get("layouts") or ()}
            gpus = [
                {**gpu, "layout": gpu["layout"] if refuse else wanted.get(gpu["id"], gpu["layout"])}
                for gpu in item["status"]["gpus"]
            ]
            condition = {"type": "LayoutsApplied", "status": "False" if refuse else "True", "message": refuse}
            status = {"gpus": gpus, "observedGeneration": item["metadata"]["generation"], "conditions": [condition]}
            self.api.patch(f"{GPU_NODES}/{name}", {"status": status})

    def node(self, name: str = "n1") -> Object:
        found = self.api.find(f"{NODES}/{name}")
        assert found is not None
        return found

    def is_cordoned(self, name: str = "n1") -> bool:
        return bool(self.node(name)["spec"].get("unschedulable"))

    def marks(self, name: str = "n1") -> Object:
        """Labels and annotations that a plan leaves on a node."""
        metadata = self.node(name)["metadata"]
        found = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
        return {key: value for key, value in found.items() if key.startswith("aim.amd.com/partition-plan")}

    def taints(self, name: str = "n1") -> list[Object]:
        return list(self.node(name)["spec"].get("taints") or [])

    def phase(self, plan: str = "cpx") -> str:
        found = self.api.find(f"{PLANS}/{plan}")
        assert found is not None
        return str((found.get("status") or {}).get("phase"))

    def phases(self, plan: str = "cpx") -> dict[str, str]:
        found = self.api.find(f"{PLANS}/{plan}")
        assert found is not None
        return {one["name"]: one["phase"] for one in found["status"]["nodes"]}

    def message(self, plan: str = "cpx") -> str:
        found = self.api.find(f"{PLANS}/{plan}")
        assert found is not None
        return str(found["status"]["message"])

    def layout(self, name: str = "n1") -> str:
        found = self.api.find(f"{GPU_NODES}/{name}")
        assert found is not None
        return str(found["status"]["gpus"][0]["layout"])

    def wanted(self, name: str = "n1") -> list[Object]:
        found = self.api.find(f"{GPU_NODES}/{name}")
        assert found is not None
        return list((found.get("spec") or {}).get("layouts") or [])

    def cordon(self, name: str = "n1") -> None:
        """As `kubectl cordon` does it."""
        self.api.patch(f"{NODES}/{name}", {"spec": {"unschedulable": True}}, manager="kubectl-cordon")

    def uncordon(self, name: str = "n1") -> None:
        self.api.patch(f"{NODES}/{name}", {"spec": {"unschedulable": None}}, manager="kubectl-uncordon")
