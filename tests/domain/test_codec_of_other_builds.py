"""What other builds wrote: fields that are not known are kept aside and written back, wrong values name their place."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.domain.test_codec import deployments, instances
from tests.examples import examples

from aimgpu.domain import Ask, Auto, Deployment, Device, Grant, Instance, InstanceState, Level, Priority
from aimgpu.domain.codec import decode, encode, merge_unknown, split_known
from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware

LATER = st.dictionaries(
    st.from_regex(r"\Alater_[a-z]{1,8}\Z"),
    st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
)


def with_later_fields(encoded: dict[str, Any], later: dict[str, Any], at: list[str]) -> dict[str, Any]:
    """A copy with more fields, in the object at this path of keys."""
    changed = copy.deepcopy(encoded)
    inner = changed
    for key in at:
        inner = inner[key]
    inner.update(later)
    return changed


def paths(encoded: dict[str, Any]) -> list[list[str]]:
    """Where a later version may add fields: the value itself, and each object in it."""
    found: list[list[str]] = [[]]
    for name, item in encoded.items():
        if isinstance(item, dict):
            found.append([name])
            if name == "ask":
                (want,) = item["want"]
                found += [["ask", "want", want]]
    return found


@settings(max_examples=examples(20))
@given(deployments, LATER, st.data())
def test_fields_of_a_later_version_are_kept_aside_and_written_back(
    deployment: Deployment, later: dict[str, Any], data: st.DataObject
) -> None:
    encoded = encode(deployment)
    written = with_later_fields(encoded, later, data.draw(st.sampled_from(paths(encoded))))
    known, unknown = split_known(Deployment, written)
    assert decode(Deployment, known, "it") == deployment
    assert merge_unknown(encode(deployment), unknown) == written


@settings(max_examples=examples(20))
@given(instances, LATER)
def test_an_instance_that_a_later_version_wrote_is_read_and_kept(instance: Instance, later: dict[str, Any]) -> None:
    written = with_later_fields(encode(instance), later, [])
    known, unknown = split_known(Instance, written)
    assert decode(Instance, known, "it") == instance
    assert merge_unknown(encode(instance), unknown) == written


@settings(max_examples=examples(20))
@given(deployments, deployments, LATER)
def test_what_was_kept_aside_survives_a_change_of_the_value(
    before: Deployment, after: Deployment, later: dict[str, Any]
) -> None:
    _, unknown = split_known(Deployment, with_later_fields(encode(before), later, []))
    written = merge_unknown(encode(after), unknown)
    assert {name: written[name] for name in later} == later
    assert decode(Deployment, split_known(Deployment, written)[0], "it") == after


@settings(max_examples=examples(20))
@given(deployments)
def test_where_nothing_is_unknown_nothing_is_kept_aside(deployment: Deployment) -> None:
    encoded = encode(deployment)
    assert split_known(Deployment, encoded) == (encoded, {})
    assert merge_unknown(encoded, {}) is encoded


def test_what_is_known_is_never_overwritten_by_what_was_kept_aside() -> None:
    assert merge_unknown({"a": 1, "b": {"c": 2}}, {"a": 9, "b": {"c": 9, "d": 3}, "e": 4}) == {
        "a": 1,
        "b": {"c": 2, "d": 3},
        "e": 4,
    }
    assert merge_unknown([1, 2], {"a": 1}) == [1, 2]


@pytest.mark.parametrize("value", [None, 5, "text", [], [{"a": 1}]])
def test_what_is_no_object_is_left_to_the_decoder(value: object) -> None:
    assert split_known(Deployment, value) == (value, {})
    assert split_known(tuple[Grant, ...], value) == (value, {})


@pytest.mark.parametrize("product", ["MI300X", "MI355X", "H200-141"])
def test_a_gpu_with_all_its_layouts_and_profiles_reads_back(product: str) -> None:
    (device,) = SimulatedHardware([(product, 1)]).read_devices()
    assert decode(Device, encode(device), "gpu") == device


ASK = encode(Ask(name="a", want=Auto()))
GRANT = encode(
    Grant(
        id="g",
        instance_id="i",
        deployment="d",
        node="n",
        device_id="d",
        partition_id="p",
        memory_bytes=1,
        compute_ppm=None,
        priority=Priority.LOW,
        level=Level.NONE,
    )
)
INSTANCE = encode(
    Instance(id="i", deployment="d", replica=0, model="m", engine="e", launcher="process", state=InstanceState.READY)
)


@pytest.mark.parametrize(
    ("kind", "written", "change", "message"),
    [
        (Ask, ASK, {"priority": "urgent"}, "it.priority is not one of high, medium, low"),
        (Ask, ASK, {"priority": None}, "it.priority is not one of high, medium, low"),
        (Ask, ASK, {"priority": ["high"]}, "it.priority is not one of high, medium, low"),
        (Ask, ASK, {"spread": {}}, "it.spread is not one of pack, spread"),
        (Ask, ASK, {"devices": True}, "it.devices is not of type int"),
        (Ask, ASK, {"devices": 1.0}, "it.devices is not of type int"),
        (Ask, ASK, {"pinned": 1}, "it.pinned is not of type bool"),
        (Ask, ASK, {"products": "MI300X"}, "it.products is not a list"),
        (Ask, ASK, {"products": [1]}, r"it.products\[0\] is not of type str"),
        (Ask, ASK, {"want": {"memory": {"memory_bytes": "1"}}}, "it.want.memory.memory_bytes is not of type int"),
        (Ask, ASK, {"want": {"memory": {}}}, "it.want.memory: "),
        (Ask, ASK, {"want": {"auto": {}, "whole": {}}}, "it.want is not one of auto, memory"),
        (Ask, ASK, {"want": "auto"}, "it.want is not one of auto, memory"),
        (Grant, GRANT, {"level": "iron"}, "it.level is not one of hardware, driver"),
        (Grant, GRANT, {"mechanisms": ["a", 1]}, r"it.mechanisms\[1\] is not of type str"),
        (Instance, INSTANCE, {"process": {"pid": 1}}, "it.process: "),
        (Instance, INSTANCE, {"process": 7}, "it.process is not an object"),
        (Instance, INSTANCE, {"grants": [None]}, r"it.grants\[0\] is not an object"),
        (Instance, INSTANCE, {"nickname": "x", "age": 1}, "it is not an object without age, nickname"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_is_allowed(
    kind: type, written: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        decode(kind, {**written, **change}, "it")


def test_an_enum_on_its_own_is_refused_in_the_same_words() -> None:
    with pytest.raises(InvalidInput, match="it is not one of high, medium, low"):
        decode(Priority, ["high"], "it")


@settings(max_examples=examples(20))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ASK, "auto", "memory", "x"]), inner, max_size=4)
        ),
        max_leaves=10,
    )
)
def test_any_json_is_an_ask_or_a_complaint(value: object) -> None:
    complaint = refusal_of(value)
    assert complaint is None or complaint.startswith("it")


def refusal_of(value: object) -> str | None:
    try:
        decode(Ask, value, "it")
    except InvalidInput as error:
        return error.message
    return None
