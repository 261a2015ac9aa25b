"""Carries out PartitionPlans: looks at the nodes of a plan, takes one step on each, writes the plan's status."""

import asyncio
import contextlib
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aimgpu.errors import AimGpuError, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, as_it_is
from aimgpu.kubernetes.api.resources import DEFINITIONS, NODES, PODS, RESOURCE_CLAIMS
from aimgpu.kubernetes.cluster.operator.config_manager import wrong_applier
from aimgpu.kubernetes.cluster.operator.evictions import evict
from aimgpu.kubernetes.cluster.operator.gpu_holders import find_holders
from aimgpu.kubernetes.cluster.operator.node_views import (
    MANAGER,
    is_under_way,
    let_go,
    node_change,
    view_node,
    wanted_of,
    with_node,
)
from aimgpu.kubernetes.cluster.operator.pending_pods import find_pending
from aimgpu.kubernetes.cluster.operator.plan_phases import advance, may_begin, pods_in_the_way, target_layouts, whole_phase
from aimgpu.kubernetes.cluster.operator.plan_proposals import plan_for, propose
from aimgpu.kubernetes.cluster.operator.plan_vocabulary import DONE, NodeView, PlanAction, Transition
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, may_ask, node_of
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES, PARTITION_PLANS
from aimgpu.kubernetes.vocabulary.names import AGENT_ACCOUNT, AGENT_LABEL, LABEL_PLAN

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_TROUBLES_SHOWN = 8


class PlanLoop:
    """Plans are looked at when something changes that they depend on, and every two seconds while one is under way.

    Finished ones start again when their spec changes. Nothing is read before something changes; what a step depends on is then
    read from the server itself, since a mirror may be older than what this loop wrote.
    """

    def __init__(self, client: Client, namespace: str, now: Callable[[], float] = time.time) -> None:
        """`namespace`: of the node agents."""
        self._client = client
        self._namespace = namespace
        self._now = now
        self._kept: dict[str, str] = {}  # pods that could not be evicted, with what keeps them
        self._plans_seen = Mirror(client, PARTITION_PLANS, as_it_is, on_change=self.wake)
        self._nodes_seen = Mirror(client, NODES, _what_matters, on_change=self.wake)
        self._woken = asyncio.Event()
        self._goes_on = False  # whether time alone may change something

    def wake(self, _key: Key, before: object, now: object) -> None:
        """What a mirror reports."""
        if before != now:
            self._woken.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for mirror in (self._plans_seen, self._nodes_seen):
                group.create_task(mirror.run())
                await mirror.synced.wait()
            while True:
                self._woken.clear()
                await self.look()
                await asyncio.sleep(_LOOK_SECONDS)
                if not self._goes_on:
                    await self._woken.wait()

    async def look(self) -> None:
        """One look at every plan, then at the nodes that are held for one; what fails is tried again in the next look."""
        self._goes_on = False
        if self._plans_seen.synced.is_set() and not self._has_work():
            return
        await self._attempt("all", self._look_at_all())

    def _has_work(self) -> bool:
        """Whether a plan is not finished, or a node is held for one."""
        held = any(LABEL_PLAN in node["labels"] for node in self._nodes_seen.kept.values())
        return held or not all(map(_is_finished, self._plans_seen.kept.values()))

    async def _look_at_all(self) -> None:
        plans = [one for one in await self._plans() if not one["metadata"].get("deletionTimestamp")]
        names = {str(one["metadata"]["uid"]): str(one["metadata"]["name"]) for one in plans}
        for plan in plans:
            await self._attempt(plan["metadata"]["name"], self._reconcile(plan, names))
        await self._let_go(plans)

    async def _plans(self) -> list[Object]:
        """None where the kind was removed: what was under way then is let go."""
        try:
            return (await self._client.list(PARTITION_PLANS))[0]
        except NotFoundInCluster:
            if await self._client.find(DEFINITIONS, f"{PARTITION_PLANS.plural}.{PARTITION_PLANS.group}") is not None:
                raise
            return []

    async def _attempt(self, what: str, act: Awaitable[None]) -> None:
        """A plan that cannot be carried out now holds up no other."""
        try:
            await act
        except (AimGpuError, OSError) as error:
            self._goes_on = True
            log.warning("plan.failed", extra={"data": {"plan": what, "reason": str(error)}})
        except Exception:  # the last edge
            self._goes_on = True
            log.exception("plan.crashed", extra={"data": {"plan": what}})

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
            await self._attempt(name, self._act(view_node(node, {}), step, holder))

    async def _find_layouts(self, plan: Object) -> None:
        """An automatic plan: says what would let pending pods run and, by its policy, makes a plan for each change.

        While a plan that it made is under way nothing new is proposed: the pods may run in a moment.
        """
        spec = plan["spec"]
        policy = str(spec["auto"].get("policy") or "Propose")
        mine = [one for one in (await self._client.list(PARTITION_PLANS))[0] if _owned_by(one, plan)]
        if any((one.get("status") or {}).get("phase") not in DONE for one in mine):
            return
        pods, claims = await self._unplaced()
        waiting = find_pending(pods, claims, _read_time, self._now())
        pending = find_pending(pods, claims, _read_time, self._now() - float(spec["auto"].get("minPendingSeconds") or 0))
        self._goes_on = self._goes_on or len(pending) < len(waiting)
        proposals = propose(pending, await self._views(spec.get("nodeSelector") or {}))
        if policy == "Apply":
            for proposal in proposals:
                await self._carry_out(plan_for(proposal, plan), mine)
        changes = ", ".join(f"{one.layout} on {one.node}" for one in proposals)
        message = f"{len(pending)} pods wait; " + (changes or "no other layout of an idle node would let them run")
        status = {"phase": "Pending", "message": message, "proposals": [one.to_json() for one in proposals], "nodes": []}
        await self._write(plan, status if pending else {**status, "message": "no pod waits for a GPU"})

    async def _unplaced(self) -> tuple[list[Object], dict[Key, Object]]:
        """Pods without a node, of any way to ask, and the claims that they may name."""
        pods, _ = await self._client.list(PODS, fields="spec.nodeName=", keep=may_ask)
        claims: list[Object] = []
        if any(claims_of(pod) for pod in pods):
            claims, _ = await self._client.list(RESOURCE_CLAIMS)
        return pods, {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in claims}

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
            await self._write(plan, await self._preview(plan["spec"], views, status if not changed else {}))
            return
        silent = await self._silent_nodes()
        nodes: dict[str, Object] = {view.name: known.get(view.name, _pending(view.name)) for view in views}
        most, uid = int(plan["spec"].get("maxParallel") or 1), str(plan["metadata"]["uid"])
        for view in views:
            before = nodes[view.name]
            others = [one for name, one in nodes.items() if name != view.name]
            waits = before["phase"] == "Pending" and not may_begin(others, most)
            if before["phase"] == "Pending" and view.holder not in (None, uid):
                step = Transition(status=_waiting(view, names))
            elif before["phase"] == "Pending" and view.name in silent:
                message = f"waits for its node agent: pod {silent[view.name]} is not ready"
                step = Transition(status={**_pending(view.name), "message": message})
            else:
                step = Transition(status=before) if waits else advance(plan["spec"], before, view, self._now())
            nodes[view.name] = step.status
            if step.status != before:  # the intent before the act: an operator that takes over goes on from here
                await self._write(plan, _whole(list(nodes.values()), most))
            targets, _ = target_layouts(plan["spec"], view.gpus)
            await self._act(replace(view, pods=pods_in_the_way(plan["spec"], targets, view)), step, uid)
        self._goes_on = self._goes_on or any(one["phase"] not in DONE for one in nodes.values())
        await self._write(plan, _whole(list(nodes.values()), most))

    async def _silent_nodes(self) -> dict[str, str]:
        """Nodes whose agent is there and does not answer, with its pod: after the pods were evicted nobody would act."""
        pods, _ = await self._client.list(PODS, self._namespace, labels=AGENT_LABEL)
        by_node: dict[str, list[Object]] = {}
        for pod in pods:
            if pod["spec"].get("serviceAccountName") == AGENT_ACCOUNT:
                by_node.setdefault(node_of(pod), []).append(pod)
        return {node: str(own[0]["metadata"]["name"]) for node, own in by_node.items() if not any(map(_is_ready, own))}

    async def _preview(self, spec: Mapping[str, Any], views: Sequence[NodeView], before: Object) -> Object:
        """Nothing is changed: evictions are asked for as a dry run, once for the same pods, so that what keeps one is known."""
        pods, troubles = list[str](), list[str]()
        for view in views:
            targets, problem = target_layouts(spec, view.gpus, view.fixed)
            problem = problem or wrong_applier(spec, view)
            if problem is not None:
                troubles.append(f"{view.name}: {problem}")
                continue
            pods += pods_in_the_way(spec, targets, view)
        summary = f"dry run: {len(views)} nodes, {len(pods)} pods would be evicted"
        if pods and before.get("evictions") == pods and str(before.get("message")).startswith(summary):
            return {**before, "nodes": []}
        verdicts = [await evict(self._client, *pod.split("/", 1), dry_run=True) for pod in pods]
        troubles += [f"{pod}: {keeps}" for pod, keeps in zip(pods, verdicts, strict=True) if keeps is not None]
        message = "; ".join([summary, *troubles[:_TROUBLES_SHOWN]])
        return {"phase": "Pending", "message": message, "evictions": pods, "nodes": []}

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
        held = {pod for pods in holders.values() for pod in pods}
        self._kept = {pod: text for pod, text in self._kept.items() if pod in held}
        return [
            view_node(nodes[item["metadata"]["name"]], item, holders.get(item["metadata"]["name"], {}), self._kept)
            for item in sorted(gpu_nodes, key=lambda each: str(each["metadata"]["name"]))
            if item["metadata"]["name"] in nodes
        ]

    async def _act(self, view: NodeView, step: Transition, holder: str) -> None:
        """`holder`: uid of the plan."""
        for action in step.actions:
            if action is PlanAction.EVICT:
                for pod in view.pods:
                    if (keeps := await evict(self._client, *pod.split("/", 1))) is not None:
                        self._kept[pod] = keeps
            elif action in (PlanAction.WANT, PlanAction.RESTORE):
                await self._want(view.name, step.layouts)
            else:
                if action is PlanAction.SET_PROFILE:  # our own agent is to want nothing of the node meanwhile
                    await self._want(view.name, None)
                if change := node_change(view, action, step, holder):
                    view = with_node(view, await self._client.patch(NODES, view.name, change, manager=MANAGER))
            log.info("plan.acted", extra={"data": {"node": view.name, "action": action.value}})

    async def _want(self, node: str, layouts: Mapping[str, str] | None) -> None:
        """Write the wanted layouts of these GPUs, keep those of others. None removes all. Skips a node without an agent."""
        with contextlib.suppress(NotFoundInCluster):
            wanted: dict[str, str] = {}
            if layouts is not None:
                wanted = {**wanted_of(await self._client.get(GPU_NODES, node)), **layouts}
            entries = [{"gpu": gpu, "layout": layout} for gpu, layout in sorted(wanted.items())]
            await self._client.patch(GPU_NODES, node, {"spec": {"layouts": entries}})


def _what_matters(node: Object) -> Object:
    """Of a node, whose conditions change all the time."""
    spec = node.get("spec") or {}
    return {
        "labels": node["metadata"].get("labels") or {},
        "unschedulable": spec.get("unschedulable"),
        "taints": spec.get("taints"),
    }


def _is_finished(plan: Object) -> bool:
    status = plan.get("status") or {}
    return status.get("observedGeneration") == plan["metadata"].get("generation") and status.get("phase") in DONE


def _owned_by(plan: Object, owner: Object) -> bool:
    return any(one.get("uid") == owner["metadata"]["uid"] for one in plan["metadata"].get("ownerReferences") or ())


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _read_time(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def _pending(name: str) -> Object:
    return {"name": name, "phase": "Pending"}


def _waiting(view: NodeView, names: Mapping[str, str]) -> Object:
    """One plan at a time on a node: two would change each other's layouts and let pods in too early."""
    other = names.get(str(view.holder))
    return {**_pending(view.name), "message": f"waits until the plan {other} is done here" if other else "waits to be let go"}


def _whole(nodes: list[Object], most: int) -> Object:
    phase, message = whole_phase(nodes, most)
    return {"phase": phase, "message": message, "nodes": nodes}
