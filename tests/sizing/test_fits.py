from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import Device, Vendor
from aimgpu.sizing import ModelFacts, Row, SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.fits import find_fits, find_savings


def _facts(name: str) -> ModelFacts:
    facts = built_in().find(name)
    assert facts is not None
    return facts


def _request(name: str, **more: object) -> SizingRequest:
    return SizingRequest(model=_facts(name), vendor=Vendor.AMD, **more)  # type: ignore[arg-type]  # options of the test


def test_a_small_model_fits_the_smallest_partition_and_many_times(mi300x: Device) -> None:
    request = _request("Qwen/Qwen2.5-7B-Instruct")
    fits = find_fits(request, mi300x)
    needed = estimate_footprint(request).total_bytes
    assert fits.whole
    assert fits.devices_needed == 1
    assert fits.copies_per_device == mi300x.memory_bytes // needed
    assert [fit.kind for fit in fits.partitions] == ["cpx", "spx"]
    assert fits.partitions[0].copies == 8
    assert fits.fraction_ppm is not None
    assert fits.fraction_ppm * mi300x.memory_bytes >= needed * 1_000_000


def test_a_grant_that_is_larger_than_the_need_takes_its_own_room(mi300x: Device) -> None:
    request = _request("Qwen/Qwen2.5-7B-Instruct")
    fits = find_fits(request, mi300x, granted_bytes=mi300x.memory_bytes // 2)
    assert fits.copies_per_device == 2
    assert fits.fraction_ppm == 500_000
    assert [fit.kind for fit in fits.partitions] == ["spx"]
    assert find_fits(request, mi300x, granted_bytes=1) == find_fits(request, mi300x)


def test_a_model_that_is_larger_than_a_partition_is_not_offered_it(mi300x: Device) -> None:
    fits = find_fits(_request("meta-llama/Llama-3.3-70B-Instruct"), mi300x)
    assert [fit.kind for fit in fits.partitions] == ["spx"]
    assert fits.copies_per_device == 1


def test_a_model_that_is_larger_than_the_device_says_on_how_many_it_fits(mi300x: Device) -> None:
    request = _request("deepseek-ai/DeepSeek-V3")
    fits = find_fits(request, mi300x)
    assert not fits.whole
    assert fits.fraction_ppm is None
    assert fits.partitions == ()
    assert fits.copies_per_device == 0
    assert fits.devices_needed == 4
    assert fits.bytes_per_device <= mi300x.memory_bytes


def test_devices_that_hold_it_exactly_hold_it(mi300x: Device) -> None:
    request = _request("deepseek-ai/DeepSeek-V3")
    fits = find_fits(request, mi300x)
    exact = replace(mi300x, memory_bytes=fits.bytes_per_device)
    assert find_fits(request, exact).devices_needed == fits.devices_needed
    short = replace(mi300x, memory_bytes=fits.bytes_per_device - 1)
    assert find_fits(request, short).devices_needed != fits.devices_needed


def test_fewer_requests_at_once_are_a_saving(mi300x: Device) -> None:
    several = _request("Qwen/Qwen2.5-7B-Instruct", concurrency=8)
    (saving,) = [one for one in find_savings(several, mi300x) if one.change == "concurrency 4 instead of 8"]
    assert saving.total_bytes == estimate_footprint(replace(several, concurrency=4)).total_bytes
    alone = find_savings(_request("Qwen/Qwen2.5-7B-Instruct", concurrency=1), mi300x)
    assert not any(one.change.startswith("concurrency") for one in alone)


def test_a_model_that_no_number_of_devices_holds_says_so(mi300x: Device) -> None:
    model = ModelFacts(name="huge", source="test", parameters=10**15, precision="fp16")
    assert find_fits(SizingRequest(model=model), mi300x).devices_needed is None


def test_savings_are_true_and_each_is_smaller(mi300x: Device) -> None:
    request = _request("Qwen/Qwen3-8B", concurrency=4)
    total = estimate_footprint(request).total_bytes
    savings = find_savings(request, mi300x)
    assert {saving.change for saving in savings} >= {"context 4096 instead of 8192", "weights in int4", "a KV cache in fp8"}
    for saving in savings:
        assert saving.total_bytes + saving.saved_bytes == total
        assert saving.saved_bytes > 0


@given(
    row=st.sampled_from(built_in().rows),
    precision=st.sampled_from(["fp16", "int8", "int4"]),
    context=st.integers(1, 262_144),
    concurrency=st.integers(1, 64),
)
def test_no_partition_that_is_offered_is_smaller_than_the_need(
    mi300x: Device, row: Row, precision: str, context: int, concurrency: int
) -> None:
    request = SizingRequest(
        model=row.facts,
        precision=precision,
        context_tokens=context,
        concurrency=concurrency,
        vendor=Vendor.AMD,
    )
    needed = estimate_footprint(request).total_bytes
    fits = find_fits(request, mi300x)
    assert all(fit.memory_bytes >= needed and fit.copies >= 1 for fit in fits.partitions)
    assert fits.whole == (needed <= mi300x.memory_bytes)
