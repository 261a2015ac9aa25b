"""What a hint is made from: the rules of nodes, what claims ask, and which node each pod gets. Tables, no cluster."""

from typing import Any

import pytest
from tests.kubernetes.placed_nodes import claim_body, node_body, pod_body, slice_bodies

from aimgpu.kubernetes.cluster.admission.review import gate_pod
from aimgpu.kubernetes.cluster.operator.shares.indexes import KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.status import share_status
from aimgpu.kubernetes.cluster.placer.cluster_fleet import ClusterFleet, PodChoice
from aimgpu.kubernetes.cluster.placer.gpus import read_claim
from aimgpu.kubernetes.cluster.placer.pods import PodView, read_pod
from aimgpu.kubernetes.cluster.placer.rules import ports_conflict, read_node, read_requests, read_rules, unread_rule
from aimgpu.kubernetes.vocabulary.names import GATE, HINT, TAINT_UNHEALTHY

Object = dict[str, Any]
LARGE = {"cpu": "64", "memory": "512Gi", "pods": "110"}


def terms(*rows: tuple[str, ...], kind: str = "matchExpressions") -> Object:
    found = [{"key": key, "operator": operator, "values": list(values)} for key, operator, *values in rows]
    required = {"nodeSelectorTerms": [{kind: found}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def taint(key: str, value: str = "", effect: str = "NoSchedule") -> Object:
    return {"key": key, "value": value, "effect": effect}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        (terms(("zone", "In", "a", "b")), True),
        (terms(("zone", "NotIn", "a")), False),
        (terms(("none", "NotIn", "a")), True),
        (terms(("zone", "Exists"), ("none", "DoesNotExist")), True),
        (terms(("cores", "Gt", "63")), True),
        (terms(("cores", "Lt", "64")), False),
        (terms(("zone", "Gt", "1")), False),
        (terms(("none", "Lt", "1")), False),
        (terms(("cores", "Gt", "+63")), True),
        (terms(("odd", "Gt", "1")), False),
        (terms(("huge", "Gt", "1")), False),
        (terms(("zone", "Unknown")), False),
        (terms(("metadata.name", "In", "n1"), kind="matchFields"), True),
        (terms(("metadata.name", "In", "n2"), kind="matchFields"), False),
        (terms(), False),  # a term that says nothing matches nothing
    ],
)
def test_selectors_and_affinity(spec: Object, *, allowed: bool) -> None:
    node = read_node(node_body("n1", LARGE, zone="a", cores="64", odd="1_0", huge="9" * 20))
    assert read_rules(spec).allow(node) is allowed


@pytest.mark.parametrize(
    ("taints", "tolerations", "allowed"),
    [
        ([taint("gpu", "yes")], [], False),
        ([taint("gpu", "yes")], [{"key": "gpu", "operator": "Exists"}], True),
        ([taint("gpu", "yes")], [{"key": "gpu", "value": "yes"}], True),
        ([taint("gpu", "yes")], [{"key": "gpu", "value": "no"}], False),
        ([taint("gpu", "yes")], [{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([taint("gpu"), taint("other")], [{"key": "gpu", "operator": "Exists"}], False),
        ([taint("gpu"), taint("other", "", "NoExecute")], [{"operator": "Exists"}], True),
        ([taint("gpu", "", "PreferNoSchedule")], [], True),
    ],
)
def test_taints_of_nodes(taints: list[Object], tolerations: list[Object], *, allowed: bool) -> None:
    node = read_node({**node_body("n1", LARGE), "spec": {"taints": taints}})
    assert read_rules({"tolerations": tolerations}).allow(node) is allowed


def test_a_cordoned_node_takes_what_tolerates_that() -> None:
    node = read_node({**node_body("n1", LARGE), "spec": {"unschedulable": True}})
    tolerant = {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}
    assert [read_rules(spec).allow(node) for spec in ({}, tolerant)] == [False, True]


def test_the_nodes_of_bound_volumes_are_all_to_be_met() -> None:
    node = read_node(node_body("n1", LARGE, zone="a"))
    here, there = ([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}] for zone in "ab")
    assert read_rules({}, [here]).allow(node)
    assert not read_rules({}, [here, there]).allow(node)


def test_requests_are_counted_as_kube_scheduler_does() -> None:
    def container(cpu: str, **more: Any) -> Object:
        return {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}, **more}

    init = [container("3"), container("500m", restartPolicy="Always"), container("2700m")]
    spec = {"containers": [container("1"), container("1500m")], "initContainers": init, "overhead": {"cpu": "100m"}}
    # 3.2 while the last of the init containers runs beside the one that stays; 3.0 afterwards.
    assert read_requests(spec) == {"cpu": 3300, "memory": 3 << 30, "pods": 1}
    assert read_requests({**spec, "resources": {"requests": {"cpu": "5"}}})["cpu"] == 5100
    assert read_requests({"containers": [{"resources": {"limits": {"hugepages-2Mi": "4Mi"}}}]})["hugepages-2Mi"] == 4 << 20


@pytest.mark.parametrize(
    ("used", "conflict"),
    [
        (("0.0.0.0", "TCP", 80), True),
        (("10.0.0.1", "TCP", 80), True),
        (("0.0.0.0", "UDP", 80), False),
        (("0.0.0.0", "TCP", 81), False),
    ],
)
def test_host_ports(used: tuple[str, str, int], *, conflict: bool) -> None:
    assert ports_conflict([("0.0.0.0", "TCP", 80)], [used]) is conflict
    assert not ports_conflict([("10.0.0.2", "TCP", 80)], [("10.0.0.1", "TCP", 80)])


SPREAD = {"maxSkew": 1, "topologyKey": "zone"}
NEAR = [{"topologyKey": "zone"}]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"topologySpreadConstraints": [{**SPREAD, "whenUnsatisfiable": "DoNotSchedule"}]}, "spread"),
        ({"topologySpreadConstraints": [{**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"}]}, None),
        ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": NEAR}}}, "pod affinity"),
        ({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": NEAR}}}, "anti-affinity"),
        ({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": NEAR}}}, None),
        ({"schedulingGroup": {"podGroupName": "a"}}, "group"),
    ],
)
def test_hard_rules_that_are_not_evaluated_have_a_name_and_soft_ones_do_not_matter(spec: Object, named: str | None) -> None:
    found = unread_rule(spec)
    assert found is None if named is None else named in (found or "")


class World:
    """Nodes `n1` and `n2` with a GPU each unless told otherwise, and pods that wait."""

    def __init__(self, amounts: Object | None = None, *, gpus: int = 1) -> None:
        self.fleet = ClusterFleet()
        for name in ("n1", "n2"):
            self.fleet.put_node(name, read_node(node_body(name, {**LARGE, **(amounts or {})})))
            for body in slice_bodies(name, gpus):
                self.fleet.put_slice(body["metadata"]["name"], body["spec"])

    def wait(self, name: str, cpu: str = "1", *, milli: int = 0, count: int = 1, at: str = "", **spec: Any) -> PodView:
        pod = pod_body(name, {"cpu": cpu}, f"c-{name}" if milli else "", schedulingGates=[{"name": GATE}], **spec)
        pod["metadata"] |= {"namespace": "a", "uid": name, "creationTimestamp": at or name}
        if milli:
            self.claim(name, milli, count)
        self.fleet.put_pod(("a", name), view := read_pod(pod))
        return view

    def claim(self, name: str, milli: int, count: int = 1, place: str = "", index: int = 0) -> None:
        claim = claim_body(f"c-{name}", milli, count)
        if place:
            taken = {"driver": "gpu.aim.amd.com", "pool": place, "device": self.device(place, index), "request": "gpu"}
            claim["status"] = {"allocation": {"devices": {"results": [taken]}}}
        self.fleet.put_claim(("a", f"c-{name}"), read_claim(claim))

    def device(self, node: str, index: int = 0) -> str:
        return str(slice_bodies(node, index + 1)[0]["spec"]["devices"][index]["name"])

    def bind(self, name: str, node: str, hint: str = "", milli: int = 0) -> None:
        pod = pod_body(name, {"cpu": "1"}, f"c-{name}" if milli else "", nodeName=node)
        pod["metadata"] |= {"namespace": "a", "uid": name, "annotations": {HINT: hint} if hint else {}}
        self.fleet.put_pod(("a", name), read_pod(pod))

    def choose(self, view: PodView) -> PodChoice:
        found = self.fleet.choose(view)
        assert found is not None
        return found


def test_shares_fill_one_gpu_before_the_next() -> None:
    world = World()
    assert {world.choose(world.wait(f"p{number}", milli=300)).node for number in range(3)} == {"n1"}
    assert world.choose(world.wait("whole", milli=1000)).node == "n2"
    assert "no node has room" in world.choose(world.wait("late", milli=300)).waits


@pytest.mark.parametrize(
    ("amounts", "request_", "fits"),
    [
        ({"cpu": "2"}, {"cpu": "2"}, True),
        ({"cpu": "2"}, {"cpu": "2001m"}, False),
        ({"memory": "1Gi"}, {"memory": "1025Mi"}, False),
        ({"pods": "0"}, {}, False),
        ({"hugepages-2Mi": "4Mi"}, {"hugepages-2Mi": "4Mi"}, True),
        ({"hugepages-2Mi": "4Mi"}, {"hugepages-2Mi": "6Mi"}, False),
        ({}, {"example.com/card": "1"}, False),
        ({"example.com/card": "1"}, {"example.com/card": "1"}, True),
    ],
)
def test_amounts_of_nodes(amounts: dict[str, str], request_: dict[str, str], *, fits: bool) -> None:
    world = World(amounts)
    pod = pod_body("p", request_, schedulingGates=[{"name": GATE}])
    pod["metadata"] |= {"namespace": "a", "uid": "p"}
    world.fleet.put_pod(("a", "p"), view := read_pod(pod))
    assert bool(world.choose(view).node) is fits


MOST = str(2**63 - 1)


def test_the_largest_amounts_that_kubernetes_takes_fit_nowhere_and_others_are_placed_on() -> None:
    world = World({"example.com/card": "4"})
    asked = {"cpu": MOST, "memory": MOST, "example.com/card": MOST}
    containers = [{"name": str(number), "image": "none", "resources": {"requests": asked}} for number in range(3)]
    assert world.choose(world.wait("huge", containers=containers)).waits
    assert world.choose(world.wait("cpu", cpu=MOST)).waits
    assert not world.choose(world.wait("count", milli=1000, count=2**63 - 1)).node
    for number in range(20):
        pod = pod_body(f"bound{number}", asked, nodeName="n1")
        pod["metadata"] |= {"namespace": "a", "uid": pod["metadata"]["name"]}
        world.fleet.put_pod(("a", pod["metadata"]["name"]), read_pod(pod))
    assert world.choose(world.wait("p1", milli=1000)).node == "n2"


def test_a_port_of_the_host_is_taken_once_for_each_node() -> None:
    world = World()
    ports = {"name": "web", "image": "none", "ports": [{"containerPort": 80, "hostPort": 80}]}
    found = [world.choose(world.wait(f"p{number}", containers=[ports])) for number in range(3)]
    assert {one.node for one in found[:2]} == {"n1", "n2"}
    assert found[2].waits


def test_a_guess_of_the_device_ends_with_the_allocation_wherever_that_is() -> None:
    world = World()
    assert world.choose(world.wait("p1", milli=1000)).node == "n1"
    world.claim("p1", 1000, place="n2")
    world.bind("p1", "n2", hint="n1", milli=1000)
    assert world.choose(world.wait("p2", milli=1000)).node == "n1"
    assert world.choose(third := world.wait("p3", milli=1000)).waits
    before = world.fleet.freed
    world.fleet.put_claim(("a", "c-p1"), None)
    world.fleet.put_pod(("a", "p1"), None)
    assert world.fleet.freed > before
    assert world.choose(third).node == "n2"


def test_the_guess_is_the_first_device_that_does_as_kube_scheduler_takes_it() -> None:
    """The third would fill the second GPU exactly; it goes to the first, where the fourth then has no room."""
    world = World(gpus=2)
    world.fleet.put_node("n2", None)
    assert [world.choose(world.wait(f"p{milli}", milli=milli)).node for milli in (300, 800, 200)] == ["n1"] * 3
    assert world.choose(world.wait("p600", milli=600)).waits
    assert world.choose(world.wait("p500", milli=500)).node == "n1"


def test_what_a_wrong_guess_hid_of_an_allocation_is_taken_when_the_guess_goes() -> None:
    world = World()
    assert world.choose(world.wait("p1", milli=500)).node == "n1"
    world.claim("other", 1000, place="n1")
    world.claim("p1", 500, place="n2")
    world.bind("p1", "n2", hint="n1", milli=500)
    assert world.choose(world.wait("p2", milli=300)).waits
    world.fleet.put_claim(("a", "c-other"), None)
    assert world.choose(world.wait("p3", milli=1000)).node == "n1"


def test_allocations_of_others_count_and_an_allocated_claim_goes_where_its_devices_are() -> None:
    world = World()
    world.claim("other", 1000, place="n1")
    assert world.choose(world.wait("p1", milli=500)).node == "n2"
    world.claim("p2", 1000, place="n1")
    pod = pod_body("p2", {}, "c-p2", schedulingGates=[{"name": GATE}])
    pod["metadata"] |= {"namespace": "a", "uid": "p2"}
    world.fleet.put_pod(("a", "p2"), view := read_pod(pod))
    assert "allocated already" in world.choose(view).skipped


def test_a_hint_that_kube_scheduler_dropped_takes_no_room() -> None:
    world = World({"cpu": "1"})
    assert world.choose(world.wait("p1")).node == "n1"
    pod = pod_body("p1", {"cpu": "1"})
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod["metadata"] |= {"namespace": "a", "uid": "p1", "annotations": {HINT: "n1"}}
    pod["status"] = {"nominatedNodeName": "n1"}
    world.fleet.put_pod(("a", "p1"), read_pod(pod))
    assert [world.choose(world.wait("p2")).node, bool(world.choose(world.wait("p3")).node)] == ["n2", False]
    world.fleet.put_pod(("a", "p1"), read_pod({**pod, "status": {**pod["status"], "conditions": [unschedulable]}}))
    assert world.choose(world.wait("p3")).node == "n1"


@pytest.mark.parametrize(
    ("nominated", "spec", "believed"),
    [
        ("n1", {}, True),
        ("n2", {}, False),
        ("", {}, False),
        ("", {"schedulerName": "default-scheduler", **terms(("metadata.name", "In", "n1"), kind="matchFields")}, True),
        ("", {"schedulerName": "other", **terms(("metadata.name", "In", "n1"), kind="matchFields")}, False),
        ("", {"schedulerName": "default-scheduler", **terms(("metadata.name", "In", "n2"), kind="matchFields")}, False),
    ],
)
def test_an_annotation_alone_takes_no_room(nominated: str, spec: Object, *, believed: bool) -> None:
    pod = pod_body("p", {"cpu": "1"}, **spec)
    pod["metadata"] |= {"namespace": "a", "annotations": {HINT: "n1"}}
    pod["status"] = {"nominatedNodeName": nominated}
    assert read_pod(pod).place == ("n1" if believed else "")


def test_devices_with_a_taint_are_not_chosen() -> None:
    world = World()
    spec = slice_bodies("n1", 1)[0]["spec"]
    spec["devices"][0]["taints"] = [{"key": TAINT_UNHEALTHY, "effect": "NoExecute"}]
    world.fleet.put_slice("n1-0", spec)
    assert world.choose(world.wait("p1", milli=500)).node == "n2"


def test_limits_of_our_resource_are_whole_gpus() -> None:
    world = World(gpus=4)
    limits = {"name": "main", "image": "none", "resources": {"limits": {"aim.amd.com/gpu": "3"}}}
    assert world.choose(world.wait("p1", containers=[limits])).node == "n1"
    assert world.choose(world.wait("p2", containers=[limits])).node == "n2"
    assert world.choose(world.wait("p3", containers=[limits])).waits


CEL = "device.attributes['gpu.aim.amd.com'].productName == 'MI300X'"
SIZE = "device.capacity['gpu.aim.amd.com'].memory.compareTo(quantity('{}')) == 0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"selectors": [{"cel": {"expression": CEL}}]}, ""),
        ({"selectors": [{"cel": {"expression": CEL.replace("MI300X", "H200")}}]}, "waits"),
        ({"selectors": [{"cel": {"expression": SIZE.format("1Gi")}}]}, "waits"),
        ({"selectors": [{"cel": {"expression": "device.attributes['x'].y > 1"}}]}, "a selector"),
        ({"allocationMode": "All"}, "all devices"),
        ({"tolerations": [{"operator": "Exists"}]}, "tolerates"),
        ({"capacity": {"requests": {"memory": "0"}}, "deviceClassName": "shared.gpu.aim.amd.com"}, "of nothing"),
        ({"deviceClassName": "other.example.com"}, "of class other.example.com"),
    ],
)
def test_claims_that_are_evaluated_and_those_that_are_left(change: Object, reason: str) -> None:
    world, claim = World(), claim_body("c-p", 1000)
    claim["spec"]["devices"]["requests"][0]["exactly"] |= change
    view = world.wait("p", milli=1000)
    world.fleet.put_claim(("a", "c-p"), read_claim(claim))
    choice = world.choose(view)
    assert bool(choice.node) is (reason == "")
    assert choice.waits if reason == "waits" else reason in choice.skipped


def test_a_pod_waits_for_its_claim_to_be_made() -> None:
    world = World()
    claims = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    view = world.wait("p", resourceClaims=claims)
    assert world.fleet.choose(view) is None


def test_order_is_by_priority_then_age_and_other_gates_are_waited_for() -> None:
    world = World()
    for name, at, priority in (("young", "2", 0), ("old", "1", 0), ("high", "3", 9)):
        world.wait(name, at=at, priority=priority)
    assert [view.key[1] for view in world.fleet.waiting()] == ["high", "old", "young"]
    pod = pod_body("held", {}, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}, {"name": GATE}])
    pod["metadata"] |= {"namespace": "a"}
    assert not read_pod(pod).waiting


def test_a_gate_is_added_once() -> None:
    for gates, path in (([], "/spec/schedulingGates"), ([{"name": "x"}], "/spec/schedulingGates/-")):
        assert [one["path"] for one in gate_pod({"spec": {"schedulingGates": gates}}).patch] == [path]
    assert gate_pod({"spec": {"schedulingGates": [{"name": GATE}]}}).patch == []


def test_a_share_says_why_its_pod_waits_and_where_a_hint_was_not_followed() -> None:
    pod = pod_body("p", {})
    pod["metadata"]["namespace"] = "a"
    status = share_status([pod], KnownGpus(reasons={("a", "p"): "no node has room for it now"}), {})
    assert "p: no node has room for it now" in status["conditions"][0]["message"]
    pod["metadata"]["annotations"] = {HINT: "n1"}
    pod["spec"]["nodeName"] = "n2"
    assert "p is on n2, not on n1 as hinted" in share_status([pod], KnownGpus(), {})["conditions"][0]["message"]
