"""A grant above the need of llama.cpp or Ollama becomes slots and context within the grant; what was given stays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Footprint, Vendor
from aimgpu.sizing import ModelFacts, SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.engines.llamacpp_growth import FEW_SLOTS, MOST_SLOTS, OLLAMA_FREE_BYTES
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.startup import with_more_startup
from aimgpu.sizing.surplus import describe_service, spend_surplus
from aimgpu.units import GIB, MIB

MODELS = {row.facts.name: row.facts for row in built_in().rows}
UNKNOWN = ModelFacts(name="mine", source="given", parameters=7_000_000_000, precision="fp16")
SMALL = MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"]
MIDDLE = MODELS["Qwen/Qwen2.5-7B-Instruct"]


def request(model: ModelFacts, engine: str, context: int | None, concurrency: int | None, **options: object) -> SizingRequest:
    asked = SizingRequest(model=model, engine=engine, context_tokens=context, concurrency=concurrency or 1, **options)  # type: ignore[arg-type]
    return ENGINE_SIZINGS[engine].own_concurrency(asked) if concurrency is None else asked


@st.composite
def requests(draw: st.DrawFn) -> tuple[SizingRequest, bool, bool]:
    """A request, and whether its concurrency and its context were left out."""
    engine = draw(st.sampled_from(("llamacpp", "ollama")))
    versions = {"llamacpp": (None, "b3000", "b9450", "2026.10.11549"), "ollama": (None, "0.33.0")}
    context, concurrency = draw(st.none() | st.integers(1, 200_000)), draw(st.none() | st.integers(1, 64))
    asked = request(
        draw(st.sampled_from([*MODELS.values(), UNKNOWN])),
        engine,
        context,
        concurrency,
        engine_version=draw(st.sampled_from(versions[engine])),
        vendor=draw(st.sampled_from(Vendor)),
        flash_attention=draw(st.sampled_from((None, True, False))),
        kv_precision=draw(st.sampled_from((None, "q8_0"))),
        tensor_parallel=draw(st.sampled_from((1, 2))),
    )
    return asked, concurrency is None, context is None


def as_if_given(asked: SizingRequest, footprint: Footprint) -> Footprint:
    """The estimate of what was chosen, had the user given it."""
    return estimate_footprint(
        replace(asked, context_tokens=footprint.context_tokens, concurrency=footprint.concurrency, free_slots=False)
    )


@settings(max_examples=examples(60))
@given(requests(), st.integers(-2 * GIB, 200 * GIB), st.integers(0, 50 * GIB))
def test_what_is_chosen_fits_the_grant_grows_with_it_and_changes_nothing_that_was_given(
    drawn: tuple[SizingRequest, bool, bool], surplus: int, more: int
) -> None:
    asked, free_slots, free_context = drawn
    need = estimate_footprint(asked)
    granted = need.total_bytes + surplus
    filled, richer = spend_surplus(need, granted), spend_surplus(need, granted + more)
    assert filled.total_bytes <= max(granted, need.total_bytes)
    assert need.total_bytes <= filled.total_bytes <= richer.total_bytes
    assert need.concurrency <= filled.concurrency <= richer.concurrency
    assert need.context_tokens <= filled.context_tokens <= richer.context_tokens
    if not free_slots:
        assert richer.concurrency == asked.concurrency
    if not free_context:
        assert richer.context_tokens == asked.context_tokens
    kept_free = OLLAMA_FREE_BYTES if asked.engine == "ollama" and filled.flags != need.flags else 0
    same = as_if_given(asked, filled)
    assert (filled.total_bytes, filled.flags) == (same.total_bytes + kept_free, same.flags)


@settings(max_examples=examples(60))
@given(requests(), st.integers(0, 200 * GIB))
def test_one_step_more_would_not_fit_or_is_beyond_the_bound(drawn: tuple[SizingRequest, bool, bool], surplus: int) -> None:
    asked, free_slots, free_context = drawn
    need = estimate_footprint(asked)
    filled = spend_surplus(need, need.total_bytes + surplus)
    trained = asked.model.architecture.max_context if asked.model.architecture else 0
    reached = [step for step in need.larger if step.total_bytes <= need.total_bytes + surplus]
    left = need.larger[len(reached) :]
    if left:
        assert left[0].total_bytes > need.total_bytes + surplus
        assert left[0].concurrency in range(filled.concurrency, filled.concurrency + 3)
        assert left[0].context_tokens <= filled.context_tokens * 9 // 8 + 1
    elif need.larger:
        last = need.larger[-1]
        assert (filled.concurrency, filled.context_tokens) == (last.concurrency, last.context_tokens)
        assert not free_slots or last.concurrency in (1, MOST_SLOTS)
        assert not free_context or last.context_tokens == max(trained, need.context_tokens)
    else:
        assert filled is need


@pytest.mark.parametrize("engine", ["llamacpp", "ollama"])
def test_slots_come_first_then_context_then_more_slots(engine: str) -> None:
    need = estimate_footprint(request(MIDDLE, engine, None, None))
    assert (need.concurrency, need.context_tokens) == (1, 8192)
    seen = [(step.concurrency, step.context_tokens) for step in need.larger]
    assert seen[: FEW_SLOTS - 1] == [(slots, 8192) for slots in range(2, FEW_SLOTS + 1)]
    contexts = [context for slots, context in seen[FEW_SLOTS - 1 :] if slots == FEW_SLOTS]
    assert contexts[:3] == [9216, 10240, 11264]
    assert contexts[-1] == 32768
    assert seen[-1] == (MOST_SLOTS, 32768)
    assert sorted(seen) == sorted(set(seen))


def test_the_engines_flags_follow() -> None:
    need = estimate_footprint(request(SMALL, "llamacpp", 2048, None))
    filled = spend_surplus(need, need.total_bytes + 512 * MIB)
    assert filled.concurrency == int(filled.flags["--parallel"]) > 8
    assert filled.flags["--ctx-size"] == str(2048 * filled.concurrency)
    need = estimate_footprint(request(SMALL, "ollama", 2048, None))
    filled = spend_surplus(need, need.total_bytes + GIB + 512 * MIB)
    assert filled.concurrency == int(filled.flags["OLLAMA_NUM_PARALLEL"]) > 8
    assert filled.flags["OLLAMA_CONTEXT_LENGTH"] == "2048"


@pytest.mark.parametrize(
    ("model", "engine", "slots"),
    [
        (UNKNOWN, "llamacpp", 1),  # a cache that is a guess
        (MODELS["BAAI/bge-m3"], "llamacpp", 1),  # no cache at all
        (MODELS["meta-llama/Llama-3.2-11B-Vision-Instruct"], "ollama", 1),  # served one at a time by Ollama
        (MODELS["meta-llama/Llama-3.2-11B-Vision-Instruct"], "llamacpp", MOST_SLOTS),
    ],
)
def test_models_that_cannot_use_more_slots_get_none(model: ModelFacts, engine: str, slots: int) -> None:
    need = estimate_footprint(request(model, engine, 1024, None))
    assert spend_surplus(need, need.total_bytes + 500 * GIB).concurrency == slots


def test_in_host_memory_a_grant_changes_nothing_and_the_note_says_so() -> None:
    need = replace(estimate_footprint(request(SMALL, "llamacpp", 2048, None)), in_host_memory=True)
    assert spend_surplus(need, 48 * GIB) is need
    note = str(describe_service(need, 48 * GIB).unused_text)
    assert "of 48GiB unused: it runs in host memory here; ask for 1." in note


def test_after_a_start_that_missed_memory_fewer_slots_are_tried() -> None:
    need = estimate_footprint(request(SMALL, "llamacpp", 2048, None))
    granted = need.total_bytes + 512 * MIB
    again = spend_surplus(with_more_startup(need, 256 * MIB), granted)
    assert 1 < again.concurrency < spend_surplus(need, granted).concurrency
    assert again.total_bytes <= granted
