"""Routes from Deployments and EndpointSlices: slots divided between gateways, names, promises, and what wrong values do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import ByClass, Priority, QueueSettings
from aimgpu.gateway.routes import RouteTable, ServedModel
from aimgpu.kubernetes.models.gateway.followed_queue import own_part
from aimgpu.kubernetes.models.gateway.model_pods import ModelPods
from aimgpu.kubernetes.models.gateway.model_scaler import note_interval
from aimgpu.kubernetes.models.gateway.served_models import ClusterState, ReplicaShare, devices_of, make_routes, read_model


def deployment(name: str, namespace: str = "a", created: int = 1, replicas: int = 1, **annotations: str) -> dict[str, Any]:
    found = {f"aim.amd.com/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"aim.amd.com/served-model": name},
            "annotations": found,
            "creationTimestamp": f"2026-01-01T00:00:{created:02}Z",
        },
        "spec": {"replicas": replicas},
    }


def endpoints(name: str, *pods: str, namespace: str = "a", ready: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{name}-x", "namespace": namespace, "labels": {"aim.amd.com/served-model": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": [f"10.0.0.{n}"], "conditions": {"ready": ready}, "targetRef": {"name": pod}}
            for n, pod in enumerate(pods, 1)
        ],
    }


def routes(*deployments: dict[str, Any], **state: Any) -> dict[str, ServedModel]:
    models = [read_model(item) for item in deployments]
    state = {"short_names": ("a", "b"), **state}
    return {route.name: route for route, _ in make_routes(ClusterState(models=models, **state))}


@given(slots=st.integers(1, 100), gateways=st.integers(1, 8), pods=st.integers(1, 5))
def test_gateways_divide_the_slots_of_a_model_among_them(slots: int, gateways: int, pods: int) -> None:
    names = [f"pod{n}" for n in range(pods)]
    taken: dict[str, int] = {}
    for index in range(gateways):
        share = ReplicaShare(index=index, count=gateways)
        served = routes(deployment("m", concurrency=str(slots)), slices=[endpoints("m", *names)], share=share)["m"]
        assert served.backends  # every gateway can serve every model
        for backend in served.backends:
            taken[backend.instance_id] = taken.get(backend.instance_id, 0) + backend.slots
    if slots >= gateways:
        assert taken == {f"a/{name}": slots for name in names}
    else:
        assert sum(taken.values()) <= max(slots * pods, 0) + gateways


def test_a_model_without_ready_pods_is_waited_for_only_where_it_comes() -> None:
    found = routes(
        deployment("starting"),
        deployment("asleep", replicas=0, keep="10m", replicas_="2"),
        deployment("stopped", replicas=0),
        slices=[endpoints("starting", "p", ready=False)],
    )
    assert (found["starting"].state, found["asleep"].state, found["stopped"].state) == ("loading", "sleeping", "sleeping")
    assert found["starting"].arrival is not None
    assert found["asleep"].arrival is not None
    assert found["stopped"].arrival is None


def pod(
    *, ready: bool = False, ready_at: str = "", ending: bool = False, kind: str = "containerStatuses", **state: Any
) -> dict[str, Any]:
    metadata = {"name": "m-1", "namespace": "a", "labels": {"aim.amd.com/served-model": "m"}}
    ended = {"terminated": {"exitCode": 3, "message": "a line of the log"}}
    return {
        "metadata": {**metadata, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {})},
        "status": {
            kind: [{"name": "engine", "state": state, "lastState": ended}],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": ready_at or "2026-01-01T00:00:00Z"}],
        },
    }


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
def test_a_pod_in_a_crash_loop_fails_until_it_is_ready_or_ends(kind: str) -> None:
    problems, model = ModelPods(), ("a", "m")
    problems.put(pod(running={}))
    assert problems.problem_of(model) is None
    problems.put(pod(kind=kind, waiting={"reason": "CrashLoopBackOff", "message": "back-off 10s"}))
    assert problems.problem_of(model) == "m-1: CrashLoopBackOff: back-off 10s (it ended with status 3)"  # no line of its log
    problems.put(pod(running={}))
    assert problems.problem_of(model) is not None, "it runs for a while each time"
    problems.put(pod(running={}, ready=True))
    assert problems.problem_of(model) is None
    problems.put(pod(kind=kind, waiting={"reason": "CrashLoopBackOff"}))
    problems.put(pod(kind=kind, waiting={"reason": "CrashLoopBackOff"}, ending=True))
    assert problems.problem_of(model) is None


def unplaced(reason: str = "Unschedulable") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "cannot allocate all claims"}
    return {"metadata": pod()["metadata"], "status": {"conditions": [condition]}}


def test_a_start_takes_as_long_as_its_containers_and_neither_the_wait_for_a_gpu_nor_a_later_flap() -> None:
    pods, model = ModelPods(), ("a", "m")
    pods.put(unplaced())  # for an hour
    pods.put(pod(waiting={"reason": "ContainerCreating"}))
    assert not pods.is_starting(model)
    running = {"startedAt": "2026-01-01T01:00:00Z"}
    pods.put(pod(running=running))
    assert pods.is_starting(model)
    pods.put(pod(running=running, ready=True, ready_at="2026-01-01T01:00:40Z"))
    assert pods.start_seconds == {model: 40.0}
    pods.put(pod(running=running))
    pods.put(pod(running=running, ready=True, ready_at="2026-01-01T09:00:00Z"))
    assert pods.start_seconds == {model: 40.0}
    again = {"startedAt": "2026-01-02T00:00:00Z"}
    pods.put(pod(running=again))
    pods.put(pod(running=again, ready=True, ready_at="2026-01-02T00:00:25Z"))
    assert pods.start_seconds == {model: 25.0}


def test_a_model_has_no_room_while_no_node_takes_any_of_its_pods() -> None:
    pods, model = ModelPods(), ("a", "m")
    pods.put(unplaced("SchedulingGated"))
    assert pods.no_room_of(model) is None
    pods.put(unplaced())
    assert pods.no_room_of(model) == "cannot allocate all claims"
    pods.put(pod(running={"startedAt": "2026-01-01T01:00:00Z"}))
    assert pods.no_room_of(model) is None


@pytest.mark.parametrize(
    ("short_names", "expected"),
    [
        ((), {"a/m": "a", "b/m": "b", "c/only": "c"}),
        (("a",), {"m": "a", "b/m": "b", "c/only": "c"}),
        (("b", "a"), {"m": "b", "a/m": "a", "c/only": "c"}),
        (("*",), {"a/m": "a", "b/m": "b", "only": "c"}),
        (("a", "*"), {"m": "a", "b/m": "b", "only": "c"}),
        (("elsewhere",), {"a/m": "a", "b/m": "b", "c/only": "c"}),
    ],
)
def test_a_short_name_belongs_to_the_listed_namespace_whoever_is_older(
    short_names: tuple[str, ...], expected: dict[str, str]
) -> None:
    for ages in ((2, 5), (5, 2)):
        given = [deployment("m", "b", created=ages[0]), deployment("m", "a", created=ages[1]), deployment("only", "c")]
        slices = [endpoints(name, "p", namespace=place) for name, place in (("m", "a"), ("m", "b"), ("only", "c"))]
        found = routes(*given, slices=slices, short_names=short_names)
        assert {name: one.backends[0].instance_id.partition("/")[0] for name, one in found.items()} == expected
        table = RouteTable(found.values())
        for namespace, name in (("a", "m"), ("b", "m"), ("c", "only")):
            served = table.find(f"{namespace}/{name}")
            assert served is not None
            assert served.backends[0].instance_id == f"{namespace}/p", "the whole name always finds its own"


def test_a_served_name_cannot_claim_another_namespace() -> None:
    found = routes(deployment("m", "a"), deployment("thief", "b", served_model_name="a/m"), short_names=("a",))
    assert set(found) == {"m", "b/thief"}


def test_a_key_for_a_whole_name_lists_and_finds_the_model_by_it() -> None:
    (served,) = routes(deployment("m", "a"), short_names=("a",)).values()
    table = RouteTable([served])
    assert (served.name, served.aliases) == ("m", ("a/m",))
    assert table.find("a/m") is served
    assert table.list() == (served,)


def test_promises_are_read_from_one_annotation_or_from_several() -> None:
    one = routes(deployment("m", slo='{"ttft_p95": "500ms"}', qos_priority="high"))["m"]
    several = routes(deployment("m", slo_ttft_p95="500ms"))["m"]
    assert one.objective == several.objective
    assert one.priority is Priority.HIGH
    assert one.first_byte_promise == 0.5


def test_values_that_make_no_sense_are_left_out_and_the_model_stays() -> None:
    found = routes(
        deployment("m", slo="{", qos_priority="urgent", keep="soon", concurrency="-1"), slices=[endpoints("m", "p")]
    )["m"]
    assert found.backends[0].slots == 1
    assert found.objective is None
    assert found.priority is Priority.MEDIUM


def test_simulated_gpus_are_named_as_such_and_known_by_their_node() -> None:
    share = {
        "metadata": {"namespace": "a"},
        "status": {"replicas": [{"pod": "p", "node": "n1", "gpu": "gpu0", "simulated": True}]},
    }
    found = routes(deployment("m"), slices=[endpoints("m", "p")], devices=devices_of([share]))["m"]
    assert found.simulated
    assert found.backends[0].device_id == "n1/gpu0"


@given(st.floats(0.1, 1e6))
def test_use_is_noted_more_often_than_a_model_falls_asleep(keep_seconds: float) -> None:
    assert 1.0 <= note_interval(keep_seconds) <= 15.0


@given(st.integers(1, 5), st.integers(1, 1000), st.integers(1, 1000))
def test_gateways_together_keep_to_the_bounds_of_the_queue(count: int, per_gpu: int, most: int) -> None:
    wanted = QueueSettings(per_gpu=per_gpu, most_queued=ByClass(low=most), longest_wait_ms=ByClass(low=5))
    parts = [own_part(wanted, ReplicaShare(index=index, count=count)) for index in range(count)]
    assert sum(part.per_gpu or 0 for part in parts) == max(per_gpu, count)
    assert sum(part.most_queued.low or 0 for part in parts) == max(most, count)
    assert {part.longest_wait_ms for part in parts} == {wanted.longest_wait_ms}
    assert {part.most_queued.high for part in parts} == {None}
