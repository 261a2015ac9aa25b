"""Carries out PartitionPlans: looks at the nodes of a plan, takes one step on each, writes the plan's status."""

import asyncio
import datetime as dt
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from aimgpu.errors import AimGpuError, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object, Resource
from aimgpu.kubernetes.custom_resources import GPU_NODES, PARTITION_PLANS
from aimgpu.kubernetes.names import LABEL_SHARE
from aimgpu.kubernetes.operator.config_manager import DCM_PROFILE, node_order
from aimgpu.kubernetes.operator.plan_phases import advance, whole_phase
from aimgpu.kubernetes.operator.plan_proposals import find_pending, plan_for, propose
from aimgpu.kubernetes.operator.plan_vocabulary import DONE, NodeView, PlanAction, Transition

log = logging.getLogger(__name__)

NODES = Resource(version="v1", plural="nodes")
PODS = Resource(version="v1", plural="pods", namespaced=True)
_LOOK_SECONDS = 2.0
_FINISHED = ("Succeeded", "Failed")
_TOO_MANY = 429  # an eviction that a PodDisruptionBudget does not allow now


class PlanLoop:
    """Every plan that is not finished is looked at every two seconds; finished ones start again when their spec changes."""

    def __init__(self, client: Client, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._now = now

    async def run(self) -> None:
        while True:
            try:
                for plan in (await self._client.list(PARTITION_PLANS))[0]:
                    await self._reconcile(plan)
            except (AimGpuError, OSError) as error:
                log.warning("plan.failed", extra={"data": {"reason": str(error)}})
            await asyncio.sleep(_LOOK_SECONDS)

    async def _find_layouts(self, plan: Object) -> None:
        """An automatic plan: says what would let pending pods run and, by its policy, makes a plan for each change.

        While a plan that it made is under way nothing new is proposed: the pods may run in a moment.
        """
        spec = plan["spec"]
        policy = str(spec["auto"].get("policy") or "Propose")
        mine = [one for one in (await self._client.list(PARTITION_PLANS))[0] if _owned_by(one, plan)]
        if any((one.get("status") or {}).get("phase") not in DONE for one in mine):
            return
        pods, _ = await self._client.list(PODS, labels=f"{LABEL_SHARE}=true")
        least = float(spec["auto"].get("minPendingSeconds") or 0)
        pending = find_pending(pods, self._now(), least, _read_time)
        proposals = propose(pending, await self._views(spec.get("nodeSelector") or {}))
        if policy == "Apply":
            for proposal in proposals:
                await self._carry_out(plan_for(proposal, plan), mine)
        changes = ", ".join(f"{one.layout} on {one.node}" for one in proposals)
        message = f"{len(pending)} pods wait; " + (changes or "no other layout of an idle node would let them run")
        status = {"phase": "Pending", "message": message, "proposals": [one.to_json() for one in proposals], "nodes": []}
        await self._write(plan, status if pending else {**status, "message": "no pod waits for a GPU"})

    async def _carry_out(self, wanted: Object, mine: list[Object]) -> None:
        """A plan of that name that is done was for pods before: it gives way to the new one."""
        name = wanted["metadata"]["name"]
        if any(one["metadata"]["name"] == name for one in mine):
            await self._client.delete(PARTITION_PLANS, name)
        await self._client.create(PARTITION_PLANS, wanted)
        log.info("plan.proposed", extra={"data": {"plan": name, "spec": wanted["spec"]}})

    async def _reconcile(self, plan: Object) -> None:
        if plan["spec"].get("auto") is not None:
            await self._find_layouts(plan)
            return
        status, generation = plan.get("status") or {}, plan["metadata"].get("generation")
        if status.get("observedGeneration") == generation and status.get("phase") in DONE:
            return
        changed = status.get("observedGeneration") not in (None, generation)
        known = {} if changed else {node["name"]: node for node in status.get("nodes") or ()}
        views = await self._views(plan["spec"].get("nodeSelector") or {})
        if plan["spec"].get("dryRun"):
            await self._write(plan, _preview(views))
            return
        nodes, active = [], 0
        for view in views:
            before = known.get(view.name, _pending(view.name))
            waits = before["phase"] == "Pending" and active >= int(plan["spec"].get("maxParallel") or 1)
            step = Transition(status=before) if waits else advance(plan["spec"], before, view, self._now())
            nodes.append(step.status)
            if step.status["phase"] not in ("Pending", *DONE):
                active += 1
            if step.status != before:  # the intent before the act: an operator that takes over goes on from here
                later = [known.get(each.name, _pending(each.name)) for each in views[len(nodes) :]]
                await self._write(plan, self._whole([*nodes, *later]))
            await self._act(view, step)
        await self._write(plan, self._whole(nodes))

    def _whole(self, nodes: list[Object]) -> Object:
        phase, message = whole_phase(nodes)
        return {"phase": phase, "message": message, "nodes": nodes}

    async def _write(self, plan: Object, status: Object) -> None:
        fresh = {**status, "observedGeneration": plan["metadata"].get("generation")}
        if fresh == (plan.get("status") or {}):
            return
        plan["status"] = fresh
        await self._client.patch(PARTITION_PLANS, plan["metadata"]["name"], {"status": fresh}, subresource="status")

    async def _views(self, selector: dict[str, str]) -> list[NodeView]:
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        nodes = {node["metadata"]["name"]: node for node in (await self._client.list(NODES, labels=labels))[0]}
        gpu_nodes = (await self._client.list(GPU_NODES))[0]
        holders: dict[str, list[str]] = {}
        for pod in (await self._client.list(PODS, labels=f"{LABEL_SHARE}=true"))[0]:
            if (pod.get("status") or {}).get("phase") not in _FINISHED:
                place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                holders.setdefault(pod["spec"].get("nodeName") or "", []).append(place)
        return [
            _view(nodes[item["metadata"]["name"]], item, tuple(sorted(holders.get(item["metadata"]["name"], ()))))
            for item in sorted(gpu_nodes, key=lambda each: str(each["metadata"]["name"]))
            if item["metadata"]["name"] in nodes
        ]

    async def _act(self, view: NodeView, step: Transition) -> None:
        for action in step.actions:
            if action in (PlanAction.CORDON, PlanAction.UNCORDON):
                await self._client.patch(NODES, view.name, {"spec": {"unschedulable": action is PlanAction.CORDON or None}})
            elif action is PlanAction.EVICT:
                for pod in view.pods:
                    await self._evict(*pod.split("/", 1))
            elif action in (PlanAction.SET_PROFILE, PlanAction.RESTORE_PROFILE, PlanAction.RELEASE):
                if action is PlanAction.SET_PROFILE:  # our own agent is to want nothing of the node meanwhile
                    await self._client.patch(GPU_NODES, view.name, {"spec": {"layouts": []}})
                await self._client.patch(NODES, view.name, node_order(view, action, step.profile))
            else:
                layouts = [{"gpu": gpu, "layout": layout} for gpu, layout in sorted(step.layouts.items())]
                await self._client.patch(GPU_NODES, view.name, {"spec": {"layouts": layouts}})
            log.info("plan.acted", extra={"data": {"node": view.name, "action": action.value}})

    async def _evict(self, namespace: str, name: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        try:
            await self._client.request("POST", PODS.path(namespace, name, "eviction"), body=body)
        except NotFoundInCluster:
            return
        except ClusterFailed as error:
            if error.status != _TOO_MANY:  # else its budget allows it later
                raise


def _owned_by(plan: Object, owner: Object) -> bool:
    return any(one.get("uid") == owner["metadata"]["uid"] for one in plan["metadata"].get("ownerReferences") or ())


def _read_time(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def _pending(name: str) -> Object:
    return {"name": name, "phase": "Pending"}


def _preview(views: list[NodeView]) -> Object:
    pods = [pod for view in views for pod in view.pods]
    message = f"dry run: {len(views)} nodes, {len(pods)} pods would be evicted"
    return {"phase": "Pending", "message": message, "evictions": pods, "nodes": []}


def _view(node: Object, gpu_node: Object, pods: tuple[str, ...]) -> NodeView:
    status: dict[str, Any] = gpu_node.get("status") or {}
    condition: dict[str, Any] = next((one for one in status.get("conditions") or () if one["type"] == "LayoutsApplied"), {})
    return NodeView(
        name=gpu_node["metadata"]["name"],
        gpus=tuple(json.loads(json.dumps(status.get("gpus") or ()))),
        wanted={one["gpu"]: one["layout"] for one in (gpu_node.get("spec") or {}).get("layouts") or ()},
        refused=condition.get("message") if condition.get("status") == "False" else None,
        observed=status.get("observedGeneration") == gpu_node["metadata"].get("generation"),
        cordoned=bool((node.get("spec") or {}).get("unschedulable")),
        pods=pods,
        profile=(node["metadata"].get("labels") or {}).get(DCM_PROFILE),
        taints=tuple(map(_taint, (node.get("spec") or {}).get("taints") or ())),
        version=str(node["metadata"].get("resourceVersion") or ""),
    )


def _taint(taint: Object) -> Object:
    return {key: taint[key] for key in ("key", "value", "effect") if key in taint}
