"""Carries out PartitionPlans: looks at the nodes of a plan, takes one step on each, writes the plan's status."""

import asyncio
import contextlib
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aimgpu.errors import AimGpuError, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.custom_resources import GPU_NODES, PARTITION_PLANS
from aimgpu.kubernetes.names import LABEL_PLAN
from aimgpu.kubernetes.operator.gpu_holders import find_holders
from aimgpu.kubernetes.operator.node_views import MANAGER, is_under_way, let_go, node_change, view_node, with_node
from aimgpu.kubernetes.operator.pending_pods import PendingPod, find_pending
from aimgpu.kubernetes.operator.plan_phases import advance, whole_phase
from aimgpu.kubernetes.operator.plan_proposals import plan_for, propose
from aimgpu.kubernetes.operator.plan_vocabulary import DONE, NodeView, PlanAction, Transition
from aimgpu.kubernetes.operator.pod_gpus import claims_of, may_ask
from aimgpu.kubernetes.standard_resources import NODES, PODS, RESOURCE_CLAIMS

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_TOO_MANY = 429  # an eviction that a PodDisruptionBudget does not allow now


class PlanLoop:
    """Every plan that is not finished is looked at every two seconds; finished ones start again when their spec changes."""

    def __init__(self, client: Client, now: Callable[[], float] = time.time) -> None:
        self._client = client
        self._now = now

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """One look at every plan, then at the nodes that are held for one; what fails is tried again in the next look."""
        await self._attempt("all", self._look_at_all())

    async def _look_at_all(self) -> None:
        plans = [one for one in (await self._client.list(PARTITION_PLANS))[0] if not one["metadata"].get("deletionTimestamp")]
        names = {str(one["metadata"]["uid"]): str(one["metadata"]["name"]) for one in plans}
        for plan in plans:
            await self._attempt(plan["metadata"]["name"], self._reconcile(plan, names))
        await self._let_go(plans)

    async def _attempt(self, what: str, act: Awaitable[None]) -> None:
        """A plan that cannot be carried out now holds up no other."""
        try:
            await act
        except (AimGpuError, OSError) as error:
            log.warning("plan.failed", extra={"data": {"plan": what, "reason": str(error)}})

    async def _let_go(self, plans: Sequence[Object]) -> None:
        """Nodes that are held for a plan which is gone or does not work on them."""
        known = {str(one["metadata"]["uid"]): one for one in plans}
        for node in (await self._client.list(NODES, labels=LABEL_PLAN))[0]:
            name, holder = node["metadata"]["name"], node["metadata"]["labels"][LABEL_PLAN]
            plan = known.get(holder, {})
            nodes = (plan.get("status") or {}).get("nodes") or ()
            status: Object = next((one for one in nodes if one["name"] == name), {})
            if is_under_way(status):
                continue
            log.info("plan.lets_go", extra={"data": {"node": name, "plan": holder}})
            step = let_go(plan.get("spec") or {}, status)
            await self._attempt(name, self._act(view_node(node, {}, ()), step, holder))

    async def _find_layouts(self, plan: Object) -> None:
        """An automatic plan: says what would let pending pods run and, by its policy, makes a plan for each change.

        While a plan that it made is under way nothing new is proposed: the pods may run in a moment.
        """
        spec = plan["spec"]
        policy = str(spec["auto"].get("policy") or "Propose")
        mine = [one for one in (await self._client.list(PARTITION_PLANS))[0] if _owned_by(one, plan)]
        if any((one.get("status") or {}).get("phase") not in DONE for one in mine):
            return
        pending = await self._find_pending(self._now() - float(spec["auto"].get("minPendingSeconds") or 0))
        proposals = propose(pending, await self._views(spec.get("nodeSelector") or {}))
        if policy == "Apply":
            for proposal in proposals:
                await self._carry_out(plan_for(proposal, plan), mine)
        changes = ", ".join(f"{one.layout} on {one.node}" for one in proposals)
        message = f"{len(pending)} pods wait; " + (changes or "no other layout of an idle node would let them run")
        status = {"phase": "Pending", "message": message, "proposals": [one.to_json() for one in proposals], "nodes": []}
        await self._write(plan, status if pending else {**status, "message": "no pod waits for a GPU"})

    async def _find_pending(self, before: float) -> list[PendingPod]:
        """Pods that wait since then, of any way to ask."""
        pods, _ = await self._client.list(PODS, fields="spec.nodeName=", keep=may_ask)
        claims: list[Object] = []
        if any(claims_of(pod) for pod in pods):
            claims, _ = await self._client.list(RESOURCE_CLAIMS)
        known = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in claims}
        return find_pending(pods, known, _read_time, before)

    async def _carry_out(self, wanted: Object, mine: list[Object]) -> None:
        """A plan of that name that is done was for pods before: it gives way to the new one."""
        name = wanted["metadata"]["name"]
        if any(one["metadata"]["name"] == name for one in mine):
            await self._client.delete(PARTITION_PLANS, name)
        await self._client.create(PARTITION_PLANS, wanted)
        log.info("plan.proposed", extra={"data": {"plan": name, "spec": wanted["spec"]}})

    async def _reconcile(self, plan: Object, names: Mapping[str, str]) -> None:
        """`names`: of all plans, by uid."""
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
        nodes, active, uid = [], 0, str(plan["metadata"]["uid"])
        for view in views:
            before = known.get(view.name, _pending(view.name))
            waits = before["phase"] == "Pending" and active >= int(plan["spec"].get("maxParallel") or 1)
            if before["phase"] == "Pending" and view.holder not in (None, uid):
                step = Transition(status=_waiting(view, names))
            else:
                step = Transition(status=before) if waits else advance(plan["spec"], before, view, self._now())
            nodes.append(step.status)
            if step.status["phase"] not in ("Pending", *DONE):
                active += 1
            if step.status != before:  # the intent before the act: an operator that takes over goes on from here
                later = [known.get(each.name, _pending(each.name)) for each in views[len(nodes) :]]
                await self._write(plan, self._whole([*nodes, *later]))
            await self._act(view, step, uid)
        await self._write(plan, self._whole(nodes))

    def _whole(self, nodes: list[Object]) -> Object:
        phase, message = whole_phase(nodes)
        return {"phase": phase, "message": message, "nodes": nodes}

    async def _write(self, plan: Object, status: Object) -> None:
        # A merge patch keeps what it does not name: lists of a dry run, or of what was found automatically.
        over: Object = {name: [] for name in ("evictions", "proposals") if name in (plan.get("status") or {})}
        fresh = {**over, **status, "observedGeneration": plan["metadata"].get("generation")}
        if fresh == (plan.get("status") or {}):
            return
        await self._client.patch(PARTITION_PLANS, plan["metadata"]["name"], {"status": fresh}, subresource="status")
        plan["status"] = fresh

    async def _views(self, selector: dict[str, str]) -> list[NodeView]:
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        nodes = {node["metadata"]["name"]: node for node in (await self._client.list(NODES, labels=labels))[0]}
        gpu_nodes = (await self._client.list(GPU_NODES))[0]
        holders = await find_holders(self._client, gpu_nodes)
        return [
            view_node(nodes[item["metadata"]["name"]], item, holders.get(item["metadata"]["name"], ()))
            for item in sorted(gpu_nodes, key=lambda each: str(each["metadata"]["name"]))
            if item["metadata"]["name"] in nodes
        ]

    async def _act(self, view: NodeView, step: Transition, holder: str) -> None:
        """`holder`: uid of the plan."""
        for action in step.actions:
            if action is PlanAction.EVICT:
                for pod in view.pods:
                    await self._evict(*pod.split("/", 1))
            elif action in (PlanAction.WANT, PlanAction.RESTORE):
                layouts = [{"gpu": gpu, "layout": layout} for gpu, layout in sorted(step.layouts.items())]
                await self._want(view.name, layouts)
            else:
                if action is PlanAction.SET_PROFILE:  # our own agent is to want nothing of the node meanwhile
                    await self._want(view.name, [])
                if change := node_change(view, action, step, holder):
                    view = with_node(view, await self._client.patch(NODES, view.name, change, manager=MANAGER))
            log.info("plan.acted", extra={"data": {"node": view.name, "action": action.value}})

    async def _want(self, node: str, layouts: list[Object]) -> None:
        """Without effect where the node has no agent any more."""
        with contextlib.suppress(NotFoundInCluster):
            await self._client.patch(GPU_NODES, node, {"spec": {"layouts": layouts}})

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


def _waiting(view: NodeView, names: Mapping[str, str]) -> Object:
    """One plan at a time on a node: two would change each other's layouts and let pods in too early."""
    other = names.get(str(view.holder))
    return {**_pending(view.name), "message": f"waits until the plan {other} is done here" if other else "waits to be let go"}


def _preview(views: list[NodeView]) -> Object:
    pods = [pod for view in views for pod in view.pods]
    message = f"dry run: {len(views)} nodes, {len(pods)} pods would be evicted"
    return {"phase": "Pending", "message": message, "evictions": pods, "nodes": []}
