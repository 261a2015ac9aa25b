"""Placement on the real API server and kube-scheduler: who is gated, what the hint does, what the operator may write, and that
the rules are kube-scheduler's own. Nodes have no kubelet: pods are bound and never run."""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import Process
from tests.cluster.waiting import TIMEOUT_SECONDS
from tests.kubernetes.accounts import NAMESPACE, make_account
from tests.kubernetes.admission import running_admission
from tests.kubernetes.placed_nodes import add_node, claim_body, node_body, pod_body, renew

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import LEASES, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.operator.access_rules import (
    cluster_role_rules,
    namespaced_rules,
    placement_rules,
    role_rules,
)
from aimgpu.kubernetes.cluster.placer.cluster_fleet import ClusterFleet
from aimgpu.kubernetes.cluster.placer.pods import read_pod
from aimgpu.kubernetes.cluster.placer.policy import placement_policy
from aimgpu.kubernetes.cluster.placer.rules import read_node
from aimgpu.kubernetes.node.dra_driver.device_classes import device_classes
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions
from aimgpu.kubernetes.vocabulary.names import GATE, HINT, OPERATOR_ACCOUNT, PLACER_LEASE, UNHINTED

_LEFT_OPEN = ".*(_SelectorTransport.__del__|<socket.socket )"
pytestmark = pytest.mark.filterwarnings(f"ignore:{_LEFT_OPEN}:pytest.PytestUnraisableExceptionWarning")
HERE = {"placement-test": "yes"}
AMOUNTS = {"cpu": "8", "memory": "64Gi", "pods": "110"}
KINDS = ("gpunodes.aim.amd.com", "gpushares.aim.amd.com", "partitionplans.aim.amd.com")
NODES_WITH_GPUS = ("placed-1", "placed-2")


@pytest.fixture(scope="module")
def operators(cluster: Cluster) -> Iterator[list[Process]]:
    """Two, with the rights and the policy of the chart."""
    cluster.apply([*custom_resource_definitions(), *device_classes()])
    cluster.wait_until_served(*KINDS)
    rules = [*cluster_role_rules(), *namespaced_rules(), *placement_rules()]
    kubeconfig = make_account(cluster, OPERATOR_ACCOUNT, rules, role_rules())
    cluster.apply(list(placement_policy(NAMESPACE)))
    command = [sys.executable, "-m", "aimgpu.kubernetes.cluster.operator", "--namespace", NAMESPACE, "--placement=hint"]
    with running_admission(cluster, placed="gpu"):
        started = [
            cluster.start(f"placer-{number}", [*command, "--placement-waiting=never"], env={"KUBECONFIG": str(kubeconfig)})
            for number in range(2)
        ]
        yield started
        for process in started:
            process.stop()
    for policy in placement_policy(NAMESPACE):
        cluster.kubectl("delete", policy["kind"], policy["metadata"]["name"])
    cluster.kubectl("delete", "crd", *KINDS)


@pytest.fixture
def team(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A namespace in which placement is on; its pods are on nodes that nobody answers for."""
    cluster.kubectl("label", "namespace", namespace, "aim.amd.com/placement=enabled")
    yield namespace
    cluster.kubectl("delete", "pod", "--all", "--force", "--grace-period=0", f"--namespace={namespace}")


def play(cluster: Cluster, scenario: Callable[[Client], Awaitable[None]], nodes: int = 2, gpus: int = 2) -> None:
    async def main() -> None:
        async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client, placed_nodes(client, nodes, gpus):
            await scenario(client)

    asyncio.run(main())


@asynccontextmanager
async def placed_nodes(client: Client, count: int, gpus: int) -> AsyncIterator[None]:
    names = NODES_WITH_GPUS[:count]
    for name in names:
        await add_node(client, node_body(name, AMOUNTS, **HERE), gpus)
    alive = asyncio.ensure_future(_keep_alive(client, names))
    try:
        yield
    finally:
        alive.cancel()
        for name in names:
            await client.delete(NODES, name)
            await client.delete_all(RESOURCE_SLICES, fields=f"spec.nodeName={name}")


async def _keep_alive(client: Client, names: tuple[str, ...]) -> None:
    while True:
        await renew(client, names)
        await asyncio.sleep(5)


async def until(read: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
    while not (found := await read()):
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{what}: not after {TIMEOUT_SECONDS:.0f} s")
        await asyncio.sleep(0.1)
    return found


async def gates_new_pods(client: Client, namespace: str) -> None:
    """Wait until admission has seen the placer's Lease renewed."""

    async def is_gated() -> bool:
        body = pod_body("probe", {}, "none")
        made = await client.request("POST", PODS.path(namespace), body=body, query={"dryRun": "All"})
        return any(gate["name"] == GATE for gate in made["spec"].get("schedulingGates") or ())

    await until(is_gated, "admission gates pods")


async def create(client: Client, namespace: str, name: str, milli: int = 500, **spec: Any) -> Object:
    await client.create(RESOURCE_CLAIMS, claim_body(f"c-{name}", milli), namespace)
    body = pod_body(name, {"cpu": "1"}, f"c-{name}", **{"nodeSelector": HERE, **spec})
    return await client.create(PODS, body, namespace)


async def bound(client: Client, namespace: str, *names: str) -> list[Object]:
    async def read() -> list[Object]:
        found = [await client.get(PODS, name, namespace) for name in names]
        return found if all(one["spec"].get("nodeName") for one in found) else []

    pods: list[Object] = await until(read, f"{', '.join(names)} bound")
    return pods


async def count(client: Client, name: str) -> int:
    lease = await client.get(LEASES, PLACER_LEASE, NAMESPACE)
    return int(lease["metadata"]["annotations"][f"aim.amd.com/{name}"])


def notes(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"].get("annotations") or {}
    return found


def test_pods_go_where_they_were_hinted_to(cluster: Cluster, team: str, operators: list[Process]) -> None:
    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        pods = []
        for name in (
            f"p{number}" for number in range(4)
        ):  # of several at once kube-scheduler may count one claim twice for a moment
            await create(client, team, name)
            pods += await bound(client, team, name)
        assert [notes(pod).get(HINT) for pod in pods] == [pod["spec"]["nodeName"] for pod in pods]
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 1  # two GPUs of one node take four halves

    play(cluster, scenario)


def test_a_pod_that_fits_nowhere_waits_until_there_is_room(cluster: Cluster, team: str, operators: list[Process]) -> None:
    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        await create(client, team, "first", 1000)
        await bound(client, team, "first")
        await create(client, team, "second", 1000)
        await create(client, team, "third", 1000)
        await bound(client, team, "second")  # so that the third was looked at
        assert (await client.get(PODS, "third", team))["spec"]["schedulingGates"] == [{"name": GATE}]

        async def is_explained() -> bool:
            share = json.loads(cluster.kubectl("get", "gpushare", "pod-third", f"--namespace={team}", "--output=json"))
            return "no node has room" in json.dumps(share.get("status"))

        await until(is_explained, "the share says why")
        await client.request("DELETE", PODS.path(team, "first"), body={"gracePeriodSeconds": 0})
        await client.delete(RESOURCE_CLAIMS, "c-first", team)
        await bound(client, team, "third")

    play(cluster, scenario, nodes=1)


def test_who_is_not_gated_and_who_is_held_by_another_gate(cluster: Cluster, team: str, operators: list[Process]) -> None:
    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        assert "schedulingGates" not in (await create(client, team, "named", nodeName="placed-1"))["spec"]
        assert "schedulingGates" not in (await create(client, team, "other", schedulerName="another"))["spec"]
        plain = await client.create(PODS, pod_body("plain", {"cpu": "1"}, nodeSelector=HERE), team)
        assert "schedulingGates" not in plain["spec"]
        kueue = {"name": "kueue.x-k8s.io/admission"}
        held = await create(client, team, "held", schedulingGates=[kueue])
        assert held["spec"]["schedulingGates"] == [kueue, {"name": GATE}]
        await create(client, team, "free")
        await bound(client, team, "free", "plain")
        assert (await client.get(PODS, "held", team))["spec"]["schedulingGates"] == [kueue, {"name": GATE}]
        await client.patch(PODS, "held", {"spec": {"schedulingGates": [{"name": GATE}]}}, team)
        (pod,) = await bound(client, team, "held")
        assert notes(pod)[HINT] == pod["spec"]["nodeName"]

    play(cluster, scenario)


def test_limits_and_rules_that_are_left_to_kube_scheduler(cluster: Cluster, team: str, operators: list[Process]) -> None:
    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        body = pod_body("limited", {}, nodeSelector=HERE)
        body["spec"]["containers"][0]["resources"] = {"limits": {"aim.amd.com/gpu": "1"}}
        await client.create(PODS, body, team)
        rule = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        spread = [{**rule, "labelSelector": {"matchLabels": {"a": "b"}}}]
        await create(client, team, "spread", topologySpreadConstraints=spread)
        limited, spreading = await bound(client, team, "limited", "spread")
        assert notes(limited)[HINT] == limited["spec"]["nodeName"]
        assert notes(spreading)[UNHINTED] == "a topology spread constraint"
        assert HINT not in notes(spreading)

    play(cluster, scenario)


@pytest.mark.parametrize("hint", ["placed-1", "gone"])
def test_a_hint_that_cannot_be_followed_is_counted(cluster: Cluster, team: str, operators: list[Process], hint: str) -> None:
    """To a node that is full, and to one that has gone: kube-scheduler looks everywhere."""

    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        before = await count(client, "placed-elsewhere")
        await client.create(PODS, pod_body("full", {"cpu": "8"}, nodeName="placed-1"), team)
        hold = [{"name": "test/hold"}]
        body = pod_body("sent", {"cpu": "1"}, nodeSelector=HERE, schedulingGates=hold)  # asks for no GPU: not gated by us
        await client.create(PODS, body, team)
        await client.patch(PODS, "sent", {"status": {"nominatedNodeName": hint}}, team, subresource="status")
        change = {"metadata": {"annotations": {HINT: hint}}, "spec": {"schedulingGates": None}}
        await client.patch(PODS, "sent", change, team)
        (pod,) = await bound(client, team, "sent")
        assert pod["spec"]["nodeName"] == "placed-2"

        async def is_counted() -> bool:
            return await count(client, "placed-elsewhere") > before

        await until(is_counted, "counted")

    play(cluster, scenario)


def test_a_standby_takes_over(cluster: Cluster, team: str, operators: list[Process]) -> None:
    async def scenario(client: Client) -> None:
        await gates_new_pods(client, team)
        leading = [one for one in operators if one.running and "placer.synced" in one.written()]
        leading[-1].kill()
        names = [f"p{number}" for number in range(4)]
        for name in names:
            await create(client, team, name)
        pods = await bound(client, team, *names)
        assert not any(pod["spec"].get("schedulingGates") for pod in pods)
        await gates_new_pods(client, team)
        await create(client, team, "last")
        (pod,) = await bound(client, team, "last")
        assert HINT in notes(pod)  # whether it could be followed is kube-scheduler's

    play(cluster, scenario)


def test_ungate_lets_pods_go(cluster: Cluster, team: str) -> None:
    """With nobody to place them, as after the operator was removed; the other gate stays."""
    cluster.apply(device_classes())

    async def scenario(client: Client) -> None:
        other = {"name": "test/hold"}
        cluster.kubectl("label", "namespace", team, "aim.amd.com/placement-")
        for name, gates in (("one", []), ("two", [other])):
            body = pod_body(name, {}, nodeSelector={"none": "none"}, schedulingGates=[{"name": GATE}, *gates])
            await client.create(PODS, body, team)
        command = [sys.executable, "-m", "aimgpu", "k8s", "ungate", "--namespace", team]
        done = await asyncio.create_subprocess_exec(
            *command, "--kubeconfig", str(cluster.outside_kubeconfig), stdout=asyncio.subprocess.PIPE
        )
        text, _ = await done.communicate()
        assert (done.returncode, len(text.splitlines())) == (0, 2)
        assert "schedulingGates" not in (await client.get(PODS, "one", team))["spec"]
        assert (await client.get(PODS, "two", team))["spec"]["schedulingGates"] == [other]

    play(cluster, scenario, nodes=0)


def test_the_policy_leaves_the_operator_a_gate_and_a_hint(cluster: Cluster, namespace: str, operators: list[Process]) -> None:
    """With the account's own token; the namespace is one in which placement is off, so that nobody else writes."""

    async def scenario(client: Client) -> None:
        access = read_kubeconfig(cluster.folder / f"{OPERATOR_ACCOUNT}.kubeconfig")
        operator = Client(replace(access, server=read_kubeconfig(cluster.outside_kubeconfig).server))
        hold = {"name": "test/hold"}
        body = pod_body("gated", {"cpu": "1"}, schedulingGates=[{"name": GATE}, hold], nodeSelector={"none": "none"})
        await client.create(PODS, body, namespace)
        live = (await client.get(PODS, "gated", namespace))["spec"]  # a list in a patch replaces what there is
        await client.create(PODS, pod_body("other", {"cpu": "1"}, schedulingGates=[hold]), namespace)
        ready = [{"type": "Ready", "status": "True"}]
        refused: list[tuple[str, Object, str]] = [
            ("gated", {"spec": {"containers": [{**live["containers"][0], "image": "evil"}]}}, ""),
            ("gated", {"spec": {"schedulingGates": [{"name": GATE}]}}, ""),
            ("gated", {"spec": {"tolerations": [*live.get("tolerations", ()), {"operator": "Exists"}]}}, ""),
            ("gated", {"spec": {"nodeSelector": {"none": "none", "more": "more"}}}, ""),
            ("gated", {"spec": {"activeDeadlineSeconds": 1}}, ""),
            ("gated", {"metadata": {"labels": {"app": "stolen"}}}, ""),
            ("gated", {"metadata": {"annotations": {"gpu-memory": "1"}}}, ""),
            ("gated", {"metadata": {"finalizers": ["example.com/keep"]}}, ""),
            ("gated", {"status": {"conditions": ready}}, "status"),
            ("gated", {"status": {"phase": "Running"}}, "status"),
            ("gated", {"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}}, "status"),
            ("other", {"status": {"nominatedNodeName": "n1"}}, "status"),
            ("other", {"metadata": {"annotations": {HINT: "n1"}}}, ""),
            ("other", {"spec": {"schedulingGates": None}}, ""),
        ]
        async with operator:

            async def is_enforced() -> bool:
                try:
                    change = refused[0][1]
                    await operator.patch(PODS, "gated", change, namespace, dry_run=True)
                except ClusterFailed as error:
                    return "only the gate of placement" in error.message
                return False

            await until(is_enforced, "the policy is enforced")
            for name, change, part in refused:
                with pytest.raises(ClusterFailed) as raised:
                    await operator.patch(PODS, name, change, namespace, subresource=part or None)
                assert raised.value.status == 403, change
            await operator.patch(PODS, "gated", {"status": {"nominatedNodeName": "n1"}}, namespace, subresource="status")
            rows = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": rows}}
            spec = {"schedulingGates": [hold], "affinity": {"nodeAffinity": required}}
            await operator.patch(PODS, "gated", {"metadata": {"annotations": {HINT: "n1"}}, "spec": spec}, namespace)

    play(cluster, scenario, nodes=0)


ZONES, KEYS, CARD = ("a", "b", "c"), ("gpu", "team"), "example.com/card"
OTHERS, ROUNDS = 20, 30  # nodes, and pods drawn for each of them


def _random_node(draw: random.Random, name: str) -> tuple[Object, list[Object]]:
    amounts = {"cpu": draw.choice(("2", "8")), "memory": draw.choice(("4Gi", "32Gi")), "pods": "110"}
    if draw.random() < 0.5:
        amounts["hugepages-2Mi"] = "64Mi"
    amounts |= {name: amount for name, amount in (("ephemeral-storage", "20Gi"), (CARD, "2")) if draw.random() < 0.5}
    cores = draw.choice(("8", "64", "64", "007", "1_0", "9" * 25))  # the last two are no numbers to kube-scheduler
    labels = {"zone": draw.choice(ZONES), "cores": cores}
    effects = ("NoSchedule", "NoExecute", "PreferNoSchedule")
    taints = [{"key": key, "value": draw.choice("xy"), "effect": draw.choice(effects)} for key in KEYS if draw.random() < 0.4]
    return node_body(name, amounts, **labels), taints


def _random_pod(draw: random.Random, name: str, node: str) -> Object:
    """Pinned to one node, so that kube-scheduler's answer is about that node."""
    rows = [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]
    if draw.random() < 0.6:
        operator = draw.choice(("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"))
        values = {"Gt": ["32"], "Lt": ["32"], "In": list(draw.sample(ZONES, 2)), "NotIn": ["a"]}.get(operator, [])
        rows.append(
            {
                "key": "cores" if operator in ("Gt", "Lt") else draw.choice(("zone", "none")),
                "operator": operator,
                "values": values,
            }
        )
    tolerations = []
    for key in KEYS:
        if draw.random() < 0.5:
            chosen: Object = {"key": key, "operator": draw.choice(("Exists", "Equal"))}
            if chosen["operator"] == "Equal":
                chosen["value"] = draw.choice("xy")
            if draw.random() < 0.3:
                chosen["effect"] = draw.choice(("NoSchedule", "NoExecute"))
            tolerations.append(chosen)
    amounts = {"cpu": draw.choice(("1m", "1m", "4")), "memory": draw.choice(("1Mi", "1Mi", "16Gi"))}
    if draw.random() < 0.15:
        amounts |= {"hugepages-2Mi": draw.choice(("2Mi", "128Mi"))}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": rows}]}}
    body = pod_body(name, amounts, tolerations=tolerations, affinity={"nodeAffinity": required})
    body["spec"]["containers"][0]["resources"]["limits"] = {key: value for key, value in amounts.items() if "huge" in key}
    if draw.random() < 0.2:
        body["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": draw.choice((7001, 7002))}]
    if draw.random() < 0.3:
        body["spec"]["nodeSelector"] = {"zone": draw.choice(ZONES)}
    _add_more(draw, body["spec"], node)
    return body


def _add_more(draw: random.Random, spec: Object, node: str) -> None:
    """What fewer pods have."""
    container = spec["containers"][0]
    if draw.random() < 0.4:
        spec["tolerations"] = [{"operator": "Exists"}]
    if draw.random() < 0.4:
        spec.pop("nodeSelector", None)
        container["resources"]["requests"] |= {"cpu": "1m", "memory": "1Mi"}
    if draw.random() < 0.25:
        first: Object = {"name": "first", "image": "none", "resources": {"requests": {"cpu": draw.choice(("1m", "5", "9"))}}}
        if draw.random() < 0.5:
            first["restartPolicy"] = "Always"
        spec["initContainers"] = [first]
    if draw.random() < 0.2:
        asked = {"cpu": draw.choice(("1m", "7")), "memory": draw.choice(("1Mi", "20Gi"))}
        spec["containers"].append({"name": "second", "image": "none", "resources": {"requests": asked}})
    if draw.random() < 0.1:
        spec["hostNetwork"], container["ports"] = True, [{"containerPort": draw.choice((7001, 7003))}]
    elif draw.random() < 0.1:
        address, protocol = draw.choice(("10.0.0.5", "127.0.0.1")), draw.choice(("TCP", "UDP"))
        container["ports"] = [{"containerPort": 80, "hostPort": 7001, "hostIP": address, "protocol": protocol}]
    if draw.random() < 0.2:
        fields = {"key": "metadata.name", "operator": draw.choice(("In", "NotIn")), "values": [node]}
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        required["nodeSelectorTerms"].append({"matchFields": [fields], "matchExpressions": [here]})
    if draw.random() < 0.1:
        container["resources"]["requests"]["ephemeral-storage"] = draw.choice(("1Gi", "50Gi"))
    if draw.random() < 0.1:
        container["resources"]["requests"][CARD] = container["resources"]["limits"][CARD] = "1"


def test_the_rules_are_kube_schedulers(cluster: Cluster, namespace: str) -> None:
    """Random pods for random nodes, one for each node at a time: no node that one allows and the other does not."""
    draw = random.Random(36)
    names = [f"drawn-{number}" for number in range(OTHERS)]

    async def main() -> None:
        async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
            for name in names:
                body, taints = _random_node(draw, name)
                await add_node(client, body, taints=taints)
            alive = asyncio.ensure_future(_keep_alive(client, tuple(names)))
            try:
                await compare(client)
            finally:
                alive.cancel()
                cluster.kubectl("delete", "pod", "--all", "--force", "--grace-period=0", f"--namespace={namespace}")
                for name in names:
                    await client.delete(NODES, name)

    async def compare(client: Client) -> None:
        for place in names:  # a port of each is taken
            taken = pod_body(f"on-{place}", {}, nodeName=place, tolerations=[{"operator": "Exists"}])
            taken["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 7001}]
            await client.create(PODS, taken, namespace)
        fleet = ClusterFleet()
        for item in (await client.list(NODES))[0]:
            fleet.put_node(item["metadata"]["name"], read_node(item))
        for pod in (await client.list(PODS))[0]:
            fleet.put_pod((pod["metadata"]["namespace"], pod["metadata"]["name"]), read_pod(pod))
        differ = []
        for number in range(ROUNDS):
            pods = [_random_pod(draw, f"p{number}-{node}", node) for node in names]
            differ += [one async for one in _differences(client, fleet, namespace, pods)]
        assert differ == []

    asyncio.run(main())


async def _differences(client: Client, fleet: ClusterFleet, namespace: str, pods: list[Object]) -> AsyncIterator[Object]:
    """Pods for which kube-scheduler decides otherwise than `fleet`. All are gone afterwards."""
    chosen = dict[str, str]()
    for body in pods:
        made = await client.create(PODS, body, namespace)
        gated = read_pod({**made, "spec": {**made["spec"], "schedulingGates": [{"name": GATE}]}})
        fleet.put_pod(gated.key, gated)
        choice = fleet.choose(gated)
        assert choice is not None
        chosen[gated.key[1]] = choice.node
        fleet.put_pod(gated.key, None)

    async def decided() -> list[Object]:
        found = [one for one in (await client.list(PODS, namespace))[0] if one["metadata"]["name"] in chosen]
        return found if sum(map(_is_decided, found)) == len(chosen) else []

    for pod in await until(decided, "kube-scheduler decided"):
        name = pod["metadata"]["name"]
        if pod["spec"].get("nodeName", "") != chosen[name]:
            yield {"chosen": chosen[name], **pod}
        await client.request("DELETE", PODS.path(namespace, name), body={"gracePeriodSeconds": 0})


def _is_decided(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return bool(pod["spec"].get("nodeName")) or any(one["type"] == "PodScheduled" for one in conditions)
