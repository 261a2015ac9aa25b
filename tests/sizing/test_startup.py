"""The room that starting takes, and what becomes of memory beyond the need."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.domain import Ask, Auto, Deployment, Exactness, Footprint, Vendor
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint
from aimgpu.sizing.correction import Measurement, learn_startup
from aimgpu.sizing.engines.table import ENGINE_SIZINGS
from aimgpu.sizing.startup import with_more_startup
from aimgpu.sizing.surplus import spend_surplus
from aimgpu.units import GIB, MIB

MODEL = "Qwen/Qwen2.5-7B-Instruct"


def request(**given_options: object) -> SizingRequest:
    facts = built_in().find(MODEL)
    assert facts is not None
    options = {"model": facts, "engine_version": "0.26.0", "gpu": "H200-141", "vendor": Vendor.NVIDIA, **given_options}
    return SizingRequest(**options)  # type: ignore[arg-type]  # options of the test


def sized(*, concurrency: int | None = None) -> Footprint:
    deployment = Deployment(name="chat", model=MODEL, ask=Ask(name="chat", want=Auto()), concurrency=concurrency)
    return SizingBasis(versions={"vllm": "0.26.0"}).size(deployment, "vllm", None, None)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "ollama"])
def test_every_engine_that_we_start_has_room_to_start(engine: str) -> None:
    footprint = estimate_footprint(request(engine=engine, engine_version=None))
    assert footprint.term_bytes("startup") >= 64 * MIB
    assert footprint.terms[-1].name == "startup"


def test_what_a_model_took_before_replaces_the_constant() -> None:
    estimated = estimate_footprint(request()).term_bytes("startup")
    learned = estimate_footprint(request(learned_startup_bytes=900 * MIB, learned_startup_runs=2))
    term = learned.terms[-1]
    assert term.exactness is Exactness.MEASURED
    assert term.memory_bytes == 964 * MIB
    assert term.inputs["estimated_bytes"] == estimated
    nothing = estimate_footprint(request(learned_startup_bytes=1))
    assert nothing.term_bytes("startup") == pytest.approx(max(estimated // 2, 64 * MIB), abs=1)


def test_a_model_learns_from_its_own_starts_only() -> None:
    kind = request().kind
    rows = [
        Measurement(
            model=model,
            engine="vllm",
            engine_version="0.26.0",
            family=kind.family,
            gpu="H200-141",
            term="startup",
            estimated_bytes=1,
            measured_bytes=size,
            at=at,
        )
        for model, size, at in ((MODEL, 100, 1), (MODEL, 300, 2), ("other", 900, 3))
    ]
    assert learn_startup(rows, kind, MODEL) == (300, 2)
    assert learn_startup(rows, kind, "new") is None


def test_more_room_for_starting_changes_nothing_else() -> None:
    before = estimate_footprint(request())
    after = with_more_startup(before, 100)
    assert after.total_bytes == before.total_bytes + 100
    assert after.terms[:-1] == before.terms[:-1]
    assert after.flags == before.flags


def test_concurrency_left_out_is_the_engines_own_as_far_as_one_context_serves_it() -> None:
    own = sized()
    assert own.concurrency == 32  # of 8192 tokens, 256 each
    assert own.flags["--max-num-seqs"] == "32"
    assert own.term_bytes("kv_cache") == sized(concurrency=1).term_bytes("kv_cache")
    assert sized(concurrency=4).concurrency == 4


def test_a_large_grant_becomes_kv_cache_and_vllms_own_number_of_requests() -> None:
    filled = spend_surplus(replace(sized(), gpu="H200-141"), 96 * GIB)
    assert filled.total_bytes == 96 * GIB
    assert filled.concurrency == 1024
    assert filled.flags["--max-num-seqs"] == "1024"
    assert int(filled.flags["--kv-cache-memory-bytes"]) == filled.term_bytes("kv_cache") > 60 * GIB
    assert filled.kv_tokens is not None
    assert filled.kv_tokens > 1_000_000
    assert int(filled.flags["--max-num-batched-tokens"]) >= 1024


@given(st.integers(1, 4096), st.one_of(st.none(), st.integers(1, 256)), st.integers(0, 200 * GIB))
def test_a_grant_is_filled_and_never_exceeded(context: int, concurrency: int | None, surplus: int) -> None:
    asked = request(context_tokens=context, concurrency=concurrency or 1)
    need = estimate_footprint(ENGINE_SIZINGS["vllm"].own_concurrency(asked) if concurrency is None else asked)
    filled = spend_surplus(need, need.total_bytes + surplus)
    assert filled.total_bytes == need.total_bytes + surplus
    assert all(after.memory_bytes >= before.memory_bytes for before, after in zip(need.terms, filled.terms, strict=True))
    assert filled.concurrency >= need.concurrency
    if concurrency is not None:
        assert filled.concurrency == concurrency


def test_engines_that_cannot_use_more_are_left_as_they_are() -> None:
    for options in ({"engine": "transformers"}, {"engine_version": "0.9.0"}):
        need = estimate_footprint(request(**options))
        assert spend_surplus(need, need.total_bytes + 10 * GIB) == need
