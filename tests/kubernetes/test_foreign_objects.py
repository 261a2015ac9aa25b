"""Objects that others write: whatever stands in one of them, the gateway, the page and the operator go on with the others."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kubernetes.api_server import serving, until
from tests.kubernetes.page_objects import model, node, pod, share
from tests.kubernetes.test_gateway_objects import Parts, running

from aimgpu.errors import InvalidQuantity
from aimgpu.kubernetes.api.foreign_objects import leaving_out, read_count
from aimgpu.kubernetes.api.quantities import parse_quantity
from aimgpu.kubernetes.cluster.operator.pending_pods import find_pending, needs_of
from aimgpu.kubernetes.models.gateway.model_pods import ModelPods
from aimgpu.kubernetes.models.gateway.served_models import ClusterState, devices_of, make_routes, read_model
from aimgpu.kubernetes.models.page.observed import ClusterObjects, name_models, observe
from aimgpu.kubernetes.models.serving.model_status import describe_models
from aimgpu.kubernetes.vocabulary import model_labels as labels

KEYS = (
    labels.CONCURRENCY,
    labels.CONTEXT,
    labels.REPLICAS,
    labels.KEEP,
    labels.SLO,
    labels.PRIORITY,
    labels.ENTRY,
    labels.NAME,
)
MANY_DIGITS = "9" * 5000
texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [MANY_DIGITS, "9" * 400, "abc", "-1", "1e9", "٣", "²", "{" * 3000, "[" * 200_000, '{"a":' * 900, "0", "\ud800"]
    ),
    st.integers(1, 400).map(lambda digits: "7" * digits),
    st.text(alphabet="{}[]:,-&*!|>'\"%@` \n", max_size=60),
)
annotations = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=20).map(lambda name: f"aim.amd.com/slo-{name}"), texts)


def with_annotations(found: dict[str, str], name: str = "odd") -> dict[str, Any]:
    item = model(name)
    item["metadata"]["annotations"] = found
    return item


@given(annotations)
def test_whatever_is_annotated_a_model_is_served_beside_the_others(found: dict[str, str]) -> None:
    items = [model("chat"), with_annotations(found)]
    routes = make_routes(ClusterState(models=[read_model(item) for item in items]))
    assert "chat" in {route.name for route, _ in routes}
    assert any(key.object_name == "odd" for _, key in routes)
    for route, _ in routes:
        assert route.arrival is None or 1 <= route.arrival.slots <= 10**12


@given(annotations)
def test_whatever_is_annotated_the_page_and_the_status_show_the_other_models(found: dict[str, str]) -> None:
    items = [with_annotations(found), model("chat")]
    objects = ClusterObjects(nodes=[node()], models=items, pods=[pod("chat-1")], shares=[share("chat-1")])
    assert "chat" in {one.name for one in observe(objects, cluster="all", taken_at=1.0).deployments}
    assert "chat" in {name for name, _ in name_models(items)}
    assert "chat" in {row["name"] for row in describe_models(items, [pod("chat-1")], [])}


scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


def damaged(whole: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The object with one of its values replaced, anywhere but in its metadata, which the API server checks."""

    def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        below = [path for key, each in inner for path in paths(each, (*at, key))]
        return [*([at] if at else []), *below]

    def replaced(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
        copy: dict[str, Any] = json.loads(json.dumps(whole))
        parent: Any = copy
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
        return copy

    found = [path for path in paths(whole) if path[0] != "metadata"]
    return st.builds(replaced, st.sampled_from(found), anything)


@given(share=damaged(share("odd-1")), gpu=damaged(node("n2")), waiting=damaged(pod("odd-1", served="odd")))
def test_no_damaged_share_node_or_pod_takes_the_others_from_the_page(
    share: dict[str, Any], gpu: dict[str, Any], waiting: dict[str, Any]
) -> None:
    good = globals()["share"]("chat-1")
    objects = ClusterObjects(nodes=[gpu, node()], models=[model()], pods=[waiting, pod("chat-1")], shares=[share, good])
    seen = observe(objects, cluster="all", taken_at=1.0)
    assert "n1/gpu-0" in {device.id for device in seen.devices}
    assert devices_of([share, good])["team", "chat-1"].id == "n1/gpu-0"
    with leaving_out(waiting):
        ModelPods().put(waiting)


WAITING = {
    "metadata": {"name": "p", "namespace": "team", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"containers": [{"name": "main", "resources": {"limits": {"amd.com/cpx_nps4": "1", "memory": "1Gi"}}}]},
    "status": {"conditions": [{"type": "PodScheduled", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
}


@given(damaged(WAITING))
def test_a_damaged_pod_that_waits_does_not_hide_the_others(odd: dict[str, Any]) -> None:
    found = find_pending([odd, WAITING], {}, lambda _: 0.0, 1.0)
    assert "team/p" in {one.name for one in found}


@pytest.mark.parametrize("count", ["65", "1000000000", "9223372036854775807"])
def test_a_pod_with_a_limit_beyond_every_gpu_is_left_out_and_not_written_out(count: str) -> None:
    odd = json.loads(json.dumps(WAITING))
    odd["spec"]["containers"][0]["resources"]["limits"]["amd.com/cpx_nps4"] = count
    assert needs_of(odd, {}) == ()
    odd["spec"] = {"resourceClaims": [{"name": "g", "resourceClaimName": "own"}]}
    exactly = {"deviceClassName": "gpu.aim.amd.com", "count": int(count)}
    claim = {"spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}}
    assert needs_of(odd, {("team", "own"): claim}) == ()


@given(texts | st.integers())
def test_a_quantity_is_a_bounded_number_or_refused(text: str | int) -> None:
    with contextlib.suppress(InvalidQuantity):
        assert abs(parse_quantity(text)) < 10**31


@pytest.mark.parametrize("text", ["91e", "1Exa", "1e999999999", "1e400", MANY_DIGITS, "9" * 40 + "Ei", 10**40])
def test_a_quantity_beyond_all_memory_or_without_its_exponent_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidQuantity):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "count"), [("4", 4), ("0", None), (MANY_DIGITS, None), ("²", None), ("٣", None), (None, None)]
)
def test_a_count_is_read_only_where_it_is_short_and_plain(text: str | None, count: int | None) -> None:
    assert read_count(text) == count


def test_an_annotation_of_five_thousand_digits_leaves_the_gateway_running() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            parts = Parts(api, client)
            async with running(parts.models.run()):
                parts.add_model("odd", replicas=0, concurrency=MANY_DIGITS, keep="5m")
                parts.add_model("worse", concurrency="9" * 400, context=MANY_DIGITS)
                parts.add_model("chat")
                await until(lambda: {route.name for route in parts.routes.list()} == {"odd", "worse", "chat"})

    asyncio.run(main())
