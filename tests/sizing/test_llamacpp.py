"""Buffers that published logs of llama.cpp and Ollama tell, every layer on the GPU, and those of its wheel on this machine."""

import pytest
from benchmarks.sizing.llamacpp import BufferPoint, buffer_figures, buffers_off_mib, read_buffer_points

from aimgpu.domain import Exactness, Footprint
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.version import llamacpp_build
from aimgpu.sizing.weights import weight_bytes
from aimgpu.units import MIB


def _size(name: str, precision: str, context: int, **more: object) -> Footprint:
    facts = built_in().find(name)
    assert facts is not None
    options = {"engine": "llamacpp", **more}
    request = SizingRequest(model=facts, precision=precision, context_tokens=context, **options)  # type: ignore[arg-type]
    return estimate_footprint(request)


def _mib(footprint: Footprint, term: str) -> float:
    return next(one.memory_bytes for one in footprint.terms if one.name == term) / MIB


@pytest.mark.parametrize(
    ("name", "context", "options", "logged"),
    [
        # Ollama on ROCm without flash attention, November 2025
        ("Qwen/Qwen2.5-7B-Instruct", 8192, {"flash_attention": False}, (4168.09, 448.0, 492.0)),
        # llama-server on gfx906 with a q4_0 cache, May 2026
        ("Qwen/Qwen3-8B", 8192, {"kv_precision": "q4_0"}, (4455.34, 324.0, 304.75)),
        # llama-cpp-python 0.3.34 on gfx1100 without flash attention
        ("Qwen/Qwen3-32B", 16384, {"flash_attention": False}, (18423.65, 4096.0, 2136.01)),
    ],
)
def test_a_q4_k_m_file_takes_what_logs_say(
    name: str, context: int, options: dict[str, object], logged: tuple[float, float, float]
) -> None:
    footprint = _size(name, "q4_k_m", context, **options)
    weights, cache, compute = logged
    assert _mib(footprint, "kv_cache") == cache
    assert _mib(footprint, "weights") == pytest.approx(weights, abs=10)
    assert _mib(footprint, "activations") == pytest.approx(compute, abs=25)


def test_a_long_context_widens_the_mask_of_early_builds() -> None:
    """Ollama on gfx1151, Llama 3.2 3B at 131,072 tokens with flash attention: 408 MiB of compute buffer, 14,336 of cache."""
    footprint = _size("meta-llama/Llama-3.2-3B-Instruct", "q4_k_m", 131_072)
    assert _mib(footprint, "kv_cache") == 14336
    assert _mib(footprint, "activations") == pytest.approx(408, abs=1)


def _points(*, held_out: bool) -> list[BufferPoint]:
    return [point for point in read_buffer_points() if point.held_out is held_out]


@pytest.mark.parametrize("point", read_buffer_points(), ids=lambda point: point.id)
def test_published_buffers_are_met_within_150_mib(point: BufferPoint) -> None:
    assert abs(buffers_off_mib(point)["total"]) <= 150


def test_the_half_that_nobody_looked_at_is_met_as_well_as_the_other() -> None:
    assert len(_points(held_out=True)) >= 12
    assert buffer_figures(_points(held_out=True))["llamacpp_mean_mib"] <= 30
    assert buffer_figures(read_buffer_points())["llamacpp_heldout_worst_mib"] <= 100


def test_the_head_of_early_builds_is_reserved_for_a_whole_batch_and_of_later_ones_for_a_token() -> None:
    early = _size("HuggingFaceTB/SmolLM2-135M-Instruct", "q4_1", 2048, engine_version="b9272")
    later = _size("HuggingFaceTB/SmolLM2-135M-Instruct", "q4_1", 2048, engine_version="2026.10.11549")
    assert _mib(early, "activations") > 96
    assert _mib(later, "activations") == pytest.approx(
        16.64, abs=1.2
    )  # what the wheel of that version prints; its CPU holds one tensor more


def test_an_encoder_leaves_its_embedding_on_the_host() -> None:
    """bge-small-en-v1.5 in F16 on CUDA: 40.73 MiB of model buffer."""
    footprint = _size("BAAI/bge-small-en-v1.5", "f16", 512)
    assert _mib(footprint, "weights") == pytest.approx(40.73, abs=1)
    assert _mib(footprint, "kv_cache") == 0


def test_slots_have_their_whole_context_each() -> None:
    one = _size("Qwen/Qwen3-8B", "q8_0", 4096, concurrency=1)
    four = _size("Qwen/Qwen3-8B", "q8_0", 4096, concurrency=4)
    assert _mib(four, "kv_cache") == 4 * _mib(one, "kv_cache")
    assert four.flags["--ctx-size"] == str(4 * 4096)
    assert four.flags["--parallel"] == "4"


def test_a_window_keeps_only_what_it_looks_back_at() -> None:
    """Gemma 3 27B at 32,768 tokens: 10 layers keep all, 52 keep window and micro-batch, padded to 256 cells."""
    footprint = _size("google/gemma-3-27b-it", "q4_k_m", 32768)
    per_layer_and_cell = 2 * 16 * 128 * 2
    assert _mib(footprint, "kv_cache") == (10 * 32768 + 52 * 1536) * per_layer_and_cell / MIB
    cache = next(term for term in footprint.terms if term.name == "kv_cache")
    assert cache.exactness is Exactness.EXACT


def test_slots_that_share_one_context_keep_a_window_each() -> None:
    """Gemma 3 4B with four slots on 8192 cells: 5 layers keep them all, 29 keep four windows and one micro-batch."""
    footprint = _size("google/gemma-3-4b-it", "q4_k_m", 8192, concurrency=4, shared_cache=True)
    per_layer_and_cell = 2 * 4 * 256 * 2
    assert _mib(footprint, "kv_cache") == (5 * 8192 + 29 * 4608) * per_layer_and_cell / MIB
    assert footprint.flags["--ctx-size"] == "8192"
    assert "--kv-unified" in footprint.flags


def test_before_there_were_windows_every_layer_kept_the_whole_context() -> None:
    early = _size("google/gemma-3-1b-it", "q4_k_m", 4096, engine_version="b5100")
    assert _mib(early, "kv_cache") == 104


def test_a_quantised_cache_is_copied_by_later_builds_where_flash_attention_reads_it() -> None:
    early = _size("Qwen/Qwen3-8B", "q4_k_m", 65536, kv_precision="q8_0", engine_version="b9470")
    later = _size("Qwen/Qwen3-8B", "q4_k_m", 65536, kv_precision="q8_0", engine_version="b9500")
    assert _mib(later, "activations") - _mib(early, "activations") > 100


def test_a_vision_tower_is_charged_only_where_it_is_loaded() -> None:
    """Gemma 3 4B in Q4_K_M: the published file has 2.49 GB, the tower comes in another."""
    alone = _size("google/gemma-3-4b-it", "q4_k_m", 8192)
    assert _mib(alone, "weights") == pytest.approx(2374, abs=15)
    assert any("--mmproj" in note for note in alone.notes)
    bundled = _size("google/gemma-3-4b-it", "q4_k_m", 8192, engine="ollama")
    assert _mib(bundled, "weights") > _mib(alone, "weights") + 700


def test_rows_that_no_block_fits_are_stored_in_a_type_that_fits() -> None:
    """Gemma 3 1B in Q4_K_M has rows of 1152 weights: 762.54 MiB of model buffer on CUDA."""
    assert _mib(_size("google/gemma-3-1b-it", "q4_k_m", 4096), "weights") == pytest.approx(762.54, abs=1)


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("b9272", 9272),
        ("9918", 9918),
        ("2026.10.11549", 11549),
        ("2026-10", 9952),
        ("2026-06-01", 9410),
        ("2025-06-30", 5429),
        ("2026", 0),
        ("0.12.6", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_a_build_is_read_from_what_people_write(version: str | None, build: int) -> None:
    assert llamacpp_build(version) == build


# Bits a weight of Llama 3.1 8B in files of llama.cpp's own quantize (its tools/quantize/README.md).
PUBLISHED_BITS = {
    "iq1_s": 2.0042,
    "iq1_m": 2.1460,
    "iq2_xxs": 2.3824,
    "iq2_xs": 2.5882,
    "iq2_s": 2.7403,
    "iq2_m": 2.9294,
    "q2_k_s": 2.9697,
    "q2_k": 3.1593,
    "iq3_xxs": 3.2548,
    "iq3_xs": 3.4977,
    "q3_k_s": 3.6429,
    "iq3_s": 3.6606,
    "iq3_m": 3.7628,
    "q3_k_l": 4.2979,
    "q4_k_s": 4.6672,
    "q4_k_m": 4.8944,
    "q5_k_s": 5.5704,
    "q5_k_m": 5.7036,
    "q6_k": 6.5633,
    "q8_0": 8.5008,
}


@pytest.mark.parametrize(("mix", "bits"), PUBLISHED_BITS.items())
def test_a_file_of_every_mix_has_the_bits_that_were_published(mix: str, bits: float) -> None:
    facts = built_in().find("meta-llama/Llama-3.1-8B-Instruct")
    assert facts is not None
    assert weight_bytes(facts, mix) * 8 / facts.parameters == pytest.approx(bits, abs=0.0002)
    assert float(find_precision(mix).weight_bytes) * 8 == pytest.approx(bits, rel=0.01)  # where no shape is known
