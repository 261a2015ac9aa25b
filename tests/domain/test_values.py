"""Values of the domain: sums, ranks, slots that become grants and back, and shares of a GPU's compute."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Device,
    Exactness,
    Footprint,
    Fraction,
    Grant,
    Growth,
    Instance,
    InstanceState,
    Level,
    Memory,
    Partition,
    Priority,
    ProcessIdentity,
    ServiceObjective,
    Sharing,
    Slot,
    Term,
    Want,
    Whole,
    granted_compute,
    granted_to,
)
from aimgpu.domain.compute import GrantedCompute, partition_part, unit_name
from aimgpu.hardware.simulated import SimulatedHardware, known_products
from aimgpu.units import PPM

NAMES = st.text(min_size=1, max_size=12)
BYTES = st.integers(1, 2**45)
terms = st.builds(
    Term,
    name=st.sampled_from(["weights", "kv_cache", "activations", "context"]),
    memory_bytes=st.integers(0, 2**40),
    exactness=st.sampled_from(Exactness),
    formula=st.just("given"),
)
slots = st.builds(
    Slot,
    node=NAMES,
    device_id=NAMES,
    partition_id=NAMES,
    memory_bytes=BYTES,
    compute_ppm=st.none() | st.integers(1, PPM),
    exclusive=st.booleans(),
)
PRODUCTS = [product.name for product in known_products()]


def footprint(*parts: Term, growth: Growth | None = None) -> Footprint:
    return Footprint(model="m", engine="vllm", precision="fp16", context_tokens=1, concurrency=1, terms=parts, growth=growth)


def all_devices() -> list[Device]:
    return [SimulatedHardware([(product, 1)]).read_devices()[0] for product in PRODUCTS]


@settings(max_examples=examples(40))
@given(st.lists(terms, max_size=6))
def test_a_footprint_is_the_sum_of_its_terms_and_its_least_leaves_out_the_cache(parts: list[Term]) -> None:
    found = footprint(*parts)
    assert found.total_bytes == sum(part.memory_bytes for part in parts)
    assert found.least_bytes + found.term_bytes("kv_cache") == found.total_bytes
    assert found.term_bytes("graphs") == 0
    assert found.kv_tokens is None


@settings(max_examples=examples(40))
@given(st.lists(terms, max_size=6))
def test_a_footprint_is_as_exact_as_its_least_exact_term(parts: list[Term]) -> None:
    kinds = {part.exactness for part in parts}
    worst = [kind for kind in (Exactness.ESTIMATED, Exactness.MEASURED, Exactness.EXACT) if kind in kinds]
    assert footprint(*parts).exactness == (worst[0] if worst else Exactness.EXACT)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_tokens_of_the_cache_are_those_that_fit_whole(cache_bytes: int, token_bytes: int) -> None:
    cache = Term(name="kv_cache", memory_bytes=cache_bytes, exactness=Exactness.EXACT, formula="given")
    tokens = footprint(cache, growth=Growth(token_bytes=token_bytes)).kv_tokens
    assert tokens is not None
    assert tokens * token_bytes <= cache_bytes < (tokens + 1) * token_bytes


@settings(max_examples=examples(40))
@given(slots, st.sampled_from(Priority), st.sampled_from(Level))
def test_a_slot_becomes_a_grant_and_the_grant_the_same_slot(slot: Slot, priority: Priority, level: Level) -> None:
    grant = slot.granted("g", "i", "d", priority, level)
    assert (grant.id, grant.instance_id, grant.deployment, grant.priority, grant.level) == ("g", "i", "d", priority, level)
    assert Slot.of(grant) == slot


def test_every_field_of_a_slot_goes_into_its_grant() -> None:
    """A field that is added to one of them and forgotten in the other would be lost when a model is charged."""
    assert {field.name for field in fields(Slot)} <= {field.name for field in fields(Grant)}


def test_levels_are_ranked_strongest_first() -> None:
    assert [level.value for level in sorted(Level, key=lambda level: -level.rank)] == [level.value for level in Level]


@pytest.mark.parametrize(
    ("mechanisms", "shown"), [((), None), (("interposer",), "interposer"), (("dmem", "interposer"), "dmem + interposer")]
)
def test_mechanisms_are_joined_for_people(mechanisms: tuple[str, ...], shown: str | None) -> None:
    slot = Slot(node="n", device_id="d", partition_id="d/p", memory_bytes=1)
    grant = replace(slot.granted("g", "i", "d", Priority.LOW, Level.RUNTIME), mechanisms=mechanisms)
    assert grant.mechanism == shown


@pytest.mark.parametrize(
    ("want", "devices", "count"), [(Auto(), 1, 1), (Memory(memory_bytes=1), 3, 3), (Whole(count=4), 1, 4), (Whole(), 2, 2)]
)
def test_over_how_many_gpus_a_model_is_divided(want: Want, devices: int, count: int) -> None:
    assert Ask(name="a", want=want, devices=devices).device_count == count


@settings(max_examples=examples(40))
@given(st.none() | BYTES)
def test_a_resize_stands_in_for_what_the_user_wrote_and_leaves_the_rest(resized: int | None) -> None:
    ask = Ask(name="a", want=Fraction(ppm=5), devices=2, pinned=True, priority=Priority.HIGH)
    found = Deployment(name="a", model="m", ask=ask, resized_bytes=resized).present_ask
    assert found.want == (ask.want if resized is None else Memory(memory_bytes=resized))
    assert replace(found, want=ask.want) == ask


def test_live_settings_are_taken_over_and_nothing_else() -> None:
    running = Deployment(name="a", model="m", ask=Ask(name="a", want=Auto()), context_tokens=5, replicas=1)
    wanted = Deployment(
        name="a",
        model="other",
        ask=Ask(name="a", want=Whole()),
        replicas=3,
        sharing=Sharing.FAIR,
        objective=ServiceObjective(ttft_p95_ms=5),
    )
    found = running.with_live_settings_of(wanted)
    assert (found.replicas, found.sharing, found.objective) == (3, Sharing.FAIR, wanted.objective)
    assert found.with_live_settings_of(running) == running


@pytest.mark.parametrize("state", InstanceState)
@pytest.mark.parametrize("process", [None, ProcessIdentity(pid=1, start_ticks=1, boot_id="b")])
def test_an_instance_sleeps_in_place_only_with_a_process(state: InstanceState, process: ProcessIdentity | None) -> None:
    instance = Instance(
        id="a", deployment="a", replica=0, model="m", engine="e", launcher="process", state=state, process=process
    )
    assert instance.sleeps_in_place == (state is InstanceState.SLEEPING and process is not None)


@pytest.mark.parametrize("device", all_devices(), ids=PRODUCTS)
def test_partitions_of_every_layout_are_found_by_their_id_and_none_has_more_than_the_gpu(device: Device) -> None:
    for layout in device.layouts:
        now = replace(device, layout=layout)
        assert len({partition.id for partition in layout.partitions}) == len(layout.partitions)
        for partition in layout.partitions:
            assert now.partition(partition.id) == partition
            part = partition_part(now, partition)
            assert part is None or 0 < part <= 1
        assert now.partition(f"{device.id}/none-0") is None


@settings(max_examples=examples(40))
@given(st.sampled_from(all_devices()), st.integers(1, PPM), st.data())
def test_what_was_granted_is_never_more_than_the_partition_has(device: Device, ppm: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([layout for layout in device.layouts if layout.partitions]))
    partition = data.draw(st.sampled_from(layout.partitions))
    found = granted_compute(ppm, replace(device, layout=layout), partition)
    if found is None:
        assert partition_part(replace(device, layout=layout), partition) is None
        return
    assert 0 <= found.device_ppm <= PPM
    assert found.unit_name == unit_name(device)
    if found.units is not None:
        assert 1 <= found.units <= (partition.compute_units or 0)
        assert f"{found.units} of {found.device_units} {found.unit_name}" in found.text
    shown = found.to_json()
    assert (shown["ppm"], shown["units"], shown["of"]) == (found.device_ppm, found.units, found.device_units)


def test_a_share_is_looked_up_by_its_gpu_and_partition() -> None:
    (device,) = SimulatedHardware([("MI300X", 1)]).read_devices()
    partition: Partition = device.layout.partitions[0]
    slot = Slot(node="n", device_id=device.id, partition_id=partition.id, memory_bytes=1, compute_ppm=500_000)
    found = granted_to(slot, [device])
    assert found is not None
    assert (found.units, found.text) == (152, "152 of 304 CUs (50%)")
    assert granted_to(replace(slot, device_id="gone"), [device]) is None
    assert granted_to(replace(slot, partition_id="gone"), [device]) is None
    assert granted_to(replace(slot, compute_ppm=None), [device]) is None
    assert granted_to(slot, []) is None


def test_a_share_of_a_gpu_with_unknown_units_is_a_percentage_alone() -> None:
    assert GrantedCompute(device_ppm=123_456, units=None, device_units=None, unit_name="SMs").text == "12.3%"
