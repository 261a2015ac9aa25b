"""More of anything never needs less, over every model of the catalogue, every engine and both vendors."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Device, Footprint, Vendor
from aimgpu.errors import InvalidInput
from aimgpu.sizing import ENGINES, ModelFacts, SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.correction import Correction
from aimgpu.sizing.fits import find_divisions, find_fits, find_savings
from aimgpu.sizing.formats.gguf_mixes import GGUF_MIXES
from aimgpu.sizing.formats.gguf_types import GGUF_TYPES
from aimgpu.sizing.precision import KV_TYPES, PRECISIONS, find_kv_type, find_precision
from aimgpu.sizing.startup import with_more_startup
from aimgpu.sizing.surplus import describe_service, spend_surplus
from aimgpu.sizing.weights import weight_bytes
from aimgpu.units import GIB, MIB

MODELS = [row.facts for row in built_in().rows]
UNKNOWN = ModelFacts(name="mine", source="given", parameters=7_000_000_000, precision="fp16")
VERSIONS = {
    "vllm": (None, "0.8.5", "0.10.2", "0.17.0", "1.0"),
    "llamacpp": (None, "b3000", "b6000", "b9450", "2026.10.11549"),
    "ollama": (None, "0.5.1"),
    "transformers": (None, "4.40", "4.52", "5.17"),
}


@st.composite
def requests(draw: st.DrawFn) -> SizingRequest:
    engine = draw(st.sampled_from(ENGINES))
    return SizingRequest(
        model=draw(st.sampled_from([*MODELS, UNKNOWN])),
        engine=engine,
        engine_version=draw(st.sampled_from(VERSIONS[engine])),
        vendor=draw(st.sampled_from(Vendor)),
        gpu=draw(st.sampled_from((None, "H200-141", "A100-80", "MI300X"))),
        context_tokens=draw(st.integers(1, 200_000)),
        concurrency=draw(st.integers(1, 64)),
        flash_attention=draw(st.sampled_from((None, True, False))),
        graphs=draw(st.booleans()),
    )


def total(asked: SizingRequest, **changes: object) -> int:
    return estimate_footprint(replace(asked, **changes)).total_bytes  # type: ignore[arg-type]


def check_sense(footprint: Footprint) -> None:
    """Every term is from nothing up, and the names are those that others look for."""
    names = [term.name for term in footprint.terms]
    assert len(set(names)) == len(names)
    assert {"weights", "kv_cache", "activations", "engine", "context"} <= set(names)
    assert all(isinstance(term.memory_bytes, int) and term.memory_bytes >= 0 for term in footprint.terms)
    assert footprint.least_bytes + footprint.term_bytes("kv_cache") == footprint.total_bytes


@settings(max_examples=examples(60))
@given(requests(), st.integers(1, 100_000), st.integers(1, 64))
def test_a_longer_context_and_more_requests_never_need_less(asked: SizingRequest, tokens: int, more: int) -> None:
    footprint = estimate_footprint(asked)
    check_sense(footprint)
    assert total(asked, context_tokens=asked.context + tokens) >= footprint.total_bytes
    assert total(asked, concurrency=asked.concurrency + more) >= footprint.total_bytes


@settings(max_examples=examples(50))
@given(requests(), st.integers(1, 8192), st.integers(1, 8192))
def test_a_longer_prompt_and_a_larger_batch_never_need_less(asked: SizingRequest, tokens: int, more: int) -> None:
    assume(asked.context > 1)
    prompt = min(tokens, asked.context - 1)
    assert total(asked, prompt_tokens=prompt + 1) >= total(asked, prompt_tokens=prompt)
    assert total(asked, batched_tokens=tokens + more) >= total(asked, batched_tokens=tokens)


@settings(max_examples=examples(50))
@given(requests(), st.sampled_from(sorted(PRECISIONS)), st.sampled_from(sorted(PRECISIONS)))
def test_more_bits_a_weight_never_need_fewer_bytes_of_weights(asked: SizingRequest, one: str, other: str) -> None:
    small, large = sorted((one, other), key=lambda name: find_precision(name).weight_bytes)
    assert weight_bytes(asked.model, small) <= weight_bytes(asked.model, large) or {small, large} & {"mxfp4"}
    if "mxfp4" not in (small, large):  # which leaves all but experts at 16 bits
        sizes = [estimate_footprint(replace(asked, precision=name)).term_bytes("weights") for name in (small, large)]
        slack = 64 * MIB if asked.engine == "transformers" else 0  # early versions rounded every tensor up
        assert sizes[0] <= sizes[1] + slack or {small, large} <= {"int4", "awq", "nf4", "nvfp4", "fp8", "int8"}


@settings(max_examples=examples(50))
@given(requests(), st.sampled_from(sorted(KV_TYPES)), st.sampled_from(sorted(KV_TYPES)))
def test_more_bits_a_cached_element_never_need_a_smaller_cache(asked: SizingRequest, one: str, other: str) -> None:
    small, large = sorted((one, other), key=KV_TYPES.__getitem__)
    caches = []
    for name in (small, large):
        try:
            find_kv_type(name, asked.engine)
        except InvalidInput:
            return
        caches.append(estimate_footprint(replace(asked, kv_precision=name)).term_bytes("kv_cache"))
    assert caches[0] <= caches[1]


@settings(max_examples=examples(40))
@given(requests())
def test_graphs_a_second_device_and_the_vendor_change_what_they_should(asked: SizingRequest) -> None:
    assert total(asked, graphs=False) <= total(asked, graphs=True)
    assert total(asked, vendor=Vendor.AMD) > total(asked, vendor=Vendor.NVIDIA) - 100 * MIB
    alone = estimate_footprint(asked)
    for devices in (2, 4):
        each = estimate_footprint(replace(asked, tensor_parallel=devices))
        check_sense(each)
        assert each.term_bytes("weights") <= alone.term_bytes("weights")
        assert each.term_bytes("weights") * devices >= alone.term_bytes("weights") * 0.99 - GIB
        assert each.term_bytes("kv_cache") <= alone.term_bytes("kv_cache")


@settings(max_examples=examples(40))
@given(requests(), st.integers(500_000, 2_000_000), st.integers(500_000, 2_000_000))
def test_what_was_learned_changes_estimates_in_its_own_direction(asked: SizingRequest, one: int, other: int) -> None:
    less, more = sorted((one, other))
    for term in ("activations", "engine", "graphs"):
        sizes = [total(asked, corrections={term: Correction(ppm=ppm, runs=5)}) for ppm in (less, more)]
        assert sizes[0] <= sizes[1]


@settings(max_examples=examples(60))
@given(requests(), st.integers(0, 4 * GIB), st.integers(1, GIB))
def test_a_start_that_took_more_is_given_more_and_a_missed_one_exactly_what_it_missed(
    asked: SizingRequest, learned: int, added: int
) -> None:
    assert total(asked, learned_startup_bytes=learned + added) >= total(asked, learned_startup_bytes=learned)
    footprint = estimate_footprint(asked)
    assert with_more_startup(footprint, added).total_bytes == footprint.total_bytes + added


@settings(max_examples=examples(40))
@given(requests(), st.integers(-2 * GIB, 200 * GIB))
def test_a_larger_grant_is_spent_to_the_byte_and_serves_no_less(asked: SizingRequest, surplus: int) -> None:
    footprint = estimate_footprint(replace(asked, sequences=None if surplus % 2 else asked.concurrency))
    granted = footprint.total_bytes + surplus
    filled = spend_surplus(footprint, granted)
    check_sense(filled)
    if surplus <= 0 or footprint.growth is None or "--kv-cache-memory-bytes" not in footprint.flags:
        assert filled is footprint
        return
    assert filled.total_bytes == granted
    assert filled.concurrency >= footprint.concurrency
    assert filled.term_bytes("kv_cache") >= footprint.term_bytes("kv_cache")
    assert filled.flags["--kv-cache-memory-bytes"] == str(filled.term_bytes("kv_cache"))
    assert int(filled.flags["--max-num-batched-tokens"]) >= filled.concurrency == int(filled.flags["--max-num-seqs"])
    service = describe_service(footprint, granted)
    assert f"{filled.concurrency} request" in str(service.text)
    assert (service.kv_cache_bytes, service.unused_bytes) == (filled.term_bytes("kv_cache"), 0)


# --- every type of file ---


@pytest.mark.parametrize("name", sorted({*GGUF_MIXES, *GGUF_TYPES} - {"f64", "i64", "i32", "f32"}))
def test_a_file_of_every_type_is_smaller_than_one_of_32_bits_and_larger_than_one_bit_a_weight(name: str) -> None:
    model = next(model for model in MODELS if model.name == "meta-llama/Llama-3.1-8B-Instruct")
    size = weight_bytes(model, name)
    assert model.parameters // 8 < size < model.parameters * 4
    for engine in ("llamacpp", "ollama"):
        footprint = estimate_footprint(SizingRequest(model=model, engine=engine, precision=name.upper()))
        check_sense(footprint)
        assert footprint.precision == find_precision(name).name
        assert abs(footprint.term_bytes("weights") - size) <= size * 0.2  # the embedding of an untied model stays on the host


@pytest.mark.parametrize("model", MODELS[::4], ids=lambda model: str(model.name))
@pytest.mark.parametrize("name", ["iq1_s", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "f16"])
def test_a_mix_of_more_bits_is_never_the_smaller_file(model: ModelFacts, name: str) -> None:
    order = ["iq1_s", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "f16"]
    larger = order[order.index(name) + 1 :]
    assert all(weight_bytes(model, name) < weight_bytes(model, other) for other in larger)


# --- where it fits ---


@settings(max_examples=examples(60))
@given(asked=requests(), gib=st.integers(8, 300))
def test_what_is_said_to_fit_fits_and_what_is_said_to_save_saves(mi300x: Device, asked: SizingRequest, gib: int) -> None:
    device = replace(mi300x, memory_bytes=gib * GIB)
    fits = find_fits(asked, device)
    needed = total(asked)
    assert fits.whole == (needed <= device.memory_bytes)
    assert fits.copies_per_device == device.memory_bytes // needed
    assert (fits.fraction_ppm is None) != fits.whole
    assert all(fit.memory_bytes >= needed and fit.copies >= 1 for fit in fits.partitions)
    if fits.devices_needed is not None:
        assert fits.bytes_per_device <= device.memory_bytes
    for count, each in find_divisions(asked, device.memory_bytes):
        assert total(asked, tensor_parallel=count) == each <= device.memory_bytes
    for saving in find_savings(asked, device):
        assert saving.total_bytes + saving.saved_bytes == needed
        assert 0 < saving.saved_bytes < needed
        assert saving.whole == (saving.total_bytes <= device.memory_bytes)
