"""What people and logs write: rows of a catalogue, parameter counts, versions, lines of a log, measurements."""

import contextlib
import json
import math
from collections.abc import Iterator
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.domain import Exactness, Term
from aimgpu.errors import InvalidInput, InvalidQuantity
from aimgpu.sizing import ModelFacts, ModelKind, Row, built_in, combine, parse_parameter_count, read_row, read_rows, write_rows
from aimgpu.sizing.catalogue import GB, check_against
from aimgpu.sizing.correction import Correction, MeasuredKind, Measurement, apply_correction, from_json, kind_of, learn, to_json
from aimgpu.sizing.log_lines import read_log_lines
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.shape import least_parameters
from aimgpu.sizing.version import at_least, llamacpp_build
from aimgpu.units import GIB, MIB, PPM


@contextlib.contextmanager
def refused_with_hint() -> Iterator[None]:
    """It may be refused; then with what to do."""
    hints: list[str | None] = []
    try:
        yield
    except InvalidInput as error:
        hints.append(error.hint)
    assert all(hints)


# --- rows ---

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}(/[A-Za-z][A-Za-z0-9._-]{0,8})?", fullmatch=True).filter(
    lambda name: not name.lower().endswith(".gguf")
)
SMALL = st.integers(1, 64)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    shape = None
    if draw(st.booleans()):
        shape = Architecture(
            family=draw(st.sampled_from(("llama", "qwen3", "unknown"))),
            kind=draw(st.sampled_from(ModelKind)),
            layers=draw(SMALL),
            hidden_size=draw(SMALL),
            heads=draw(SMALL),
            kv_heads=draw(SMALL),
            head_dim=draw(SMALL),
            intermediate_size=draw(SMALL),
            vocab_size=draw(SMALL),
            tied_embeddings=draw(st.booleans()),
            attention_layers=draw(st.sampled_from((None, 0, 1))),
            experts=draw(st.sampled_from((0, 4))),
        )
    parameters = draw(st.integers(10**9, 10**13)) + (least_parameters(shape) if shape else 0)
    precision = draw(st.sampled_from(("bf16", "fp8", "int4", "q4_k_m", "fp32")))
    listed = ((("fp16" if precision == "bf16" else precision), parameters * 5),) if draw(st.booleans()) else ()
    return Row(
        facts=ModelFacts(
            name=draw(NAMES),
            source="catalogue: a test",
            parameters=parameters,
            active_parameters=draw(st.sampled_from((None, 10**8))),
            precision=precision,
            architecture=shape,
            listed_memory=listed,
        ),
        aliases=tuple(draw(st.lists(NAMES, max_size=2))),
    )


@settings(max_examples=examples(80))
@given(st.lists(rows(), max_size=4))
def test_what_is_written_is_read_back_the_same(found: list[Row]) -> None:
    assert list(read_rows(write_rows(found))) == found


@settings(max_examples=examples(150))
@given(st.text(alphabet='id,parameters\nmem_fp16_gb"#8B/ax.\r\x00\t\u2028é-e+', max_size=60))
def test_any_text_is_rows_or_refused_with_what_to_do(text: str) -> None:
    for start in ("", "id,parameters,mem_fp16_gb,layers\n"):
        with refused_with_hint():
            assert all(row.facts.parameters > 0 for row in read_rows(start + text))


@pytest.mark.parametrize(
    "memory", ["1e999999", "1e400000000", "9" * 900, "inf", "-inf", "nan", "snan", "-5", "0", "16GB", "sixteen", "1,6", "0x20"]
)
def test_memory_that_no_model_takes_is_refused_with_its_line(memory: str) -> None:
    with pytest.raises(InvalidInput, match="line 2 of the catalogue") as caught:
        list(read_rows(f'id,parameters,memory_gb\na/b,8B,"{memory}"\n'))
    assert caught.value.hint


@pytest.mark.parametrize("memory", ["16", "16.0", "17.123456789", "1e2", "1000000"])
def test_memory_is_kept_to_the_byte(memory: str) -> None:
    (row,) = read_rows(f"id,parameters,mem_fp16_gb\na/b,8B,{memory}\n")
    assert row.facts.listed_memory == (("fp16", int(Decimal(memory) * GB)),)
    assert list(read_rows(write_rows([row]))) == [row]


@pytest.mark.parametrize("column", ["layers", "heads", "vocab_size", "experts", "active_parameters", "sliding_window"])
@pytest.mark.parametrize("value", ["-1", "1.5", "1e3", "ten", "\u0663", "9" * 16, "0x10", "1 000"])
def test_a_number_that_is_none_is_refused_by_its_column(column: str, value: str) -> None:
    shape = dict.fromkeys(("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size"), "4")
    with pytest.raises(InvalidInput, match=f"{column} is"):
        read_row({"id": "a/b", "parameters": "8B", **shape, column: value}, "a row")


@pytest.mark.parametrize(
    "name", ["../etc", "/a", "a//b", "a b", "a/", ":a", "-a", "a.gguf", "x" * 201, "a\\b", "a/../b", "~/m"]
)
def test_a_name_that_could_be_a_path_is_refused_as_id_and_as_alias(name: str) -> None:
    for cells in ({"id": name, "parameters": "8B"}, {"id": "a/b", "aliases": name.replace(" ", "\u00a0"), "parameters": "8B"}):
        with pytest.raises(InvalidInput):
            read_row(cells, "a row")


def test_the_line_of_a_wrong_row_is_its_line_in_the_file_past_comments_and_blanks() -> None:
    text = "\ufeff# models\n\nid,parameters\n# one\na/b,8B\n\n\nc/d,none\n"
    with pytest.raises(InvalidInput, match=r"line 8 .*c/d"):
        list(read_rows(text))


def test_later_rows_win_under_every_name_and_the_earlier_are_gone() -> None:
    first, second = (
        next(iter(read_rows(f"id,parameters,aliases\nA/B,{size},{alias}\n"))) for size, alias in (("8B", "old"), ("9B", "new"))
    )
    both = combine([first], [second])
    assert [row.facts.parameters for row in both.rows] == [9 * 10**9]
    assert both.find(" a/b ") == both.find("NEW") == second.facts
    assert both.near("b") == ("A/B",)
    assert both.near("absent") == ()
    with pytest.raises(InvalidInput, match="would be under its raw weights"):
        check_against(both, [first])
    check_against(combine([first]), [second])


@pytest.mark.parametrize("row", built_in().rows[::7], ids=lambda row: str(row.facts.name))
def test_a_row_of_the_package_cannot_be_listed_again_with_a_tenth_of_its_parameters(row: Row) -> None:
    small = read_row({"id": row.facts.name.upper(), "parameters": str(row.facts.parameters // 10)}, "a row")
    with pytest.raises(InvalidInput, match="is listed with"):
        check_against(built_in(), [small])


# --- counts and versions ---


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), (" 1.5b ", 15 * 10**8), ("135M", 135 * 10**6), ("1T", 10**12), ("123456.123456 B", 123456123456000)],
)
def test_a_count_is_read_as_people_write_it(text: str, count: int) -> None:
    assert parse_parameter_count(text) == count
    assert parse_parameter_count(str(count)) == count


@pytest.mark.parametrize(
    "text", ["1.000000      Bgarbage", "7B 7B", "7 B and more", "1.B", ".5B", "7K", "7e9", "1_000", "\u0667B", "7B\x00", "0.0B"]
)
def test_what_only_begins_as_a_count_is_none(text: str) -> None:
    with pytest.raises(InvalidQuantity):
        parse_parameter_count(text)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_versions_compare_by_their_numbers_whatever_stands_around_them(one: list[int], other: list[int]) -> None:
    first, second = (".".join(map(str, numbers)) for numbers in (one, other))
    assert at_least(first, second) == (tuple(one) >= tuple(other))
    assert at_least(f"v{first}", second) == at_least(f"{first} (V1)", second) == at_least(first, second)


@pytest.mark.parametrize("text", ["", "latest", "2026", "0.5.1", "b", "b999", "20260", "x" * 1000])
def test_what_names_no_build_is_no_build(text: str) -> None:
    assert llamacpp_build(text) in (0, 20260)
    assert llamacpp_build(None) == 0


# --- logs ---

LINES = {
    "vllm": "INFO 01-01 Model loading took 14.99 GiB and 3.2 seconds",
    "llamacpp": "load_tensors:      CUDA0 model buffer size =  4155.99 MiB",
}


@settings(max_examples=examples(100))
@given(engine=st.sampled_from(["vllm", "llamacpp", "ollama", "transformers", "none"]), noise=st.lists(st.text(max_size=80)))
def test_noise_in_a_log_adds_nothing_and_hides_nothing(engine: str, noise: list[str]) -> None:
    line = LINES.get(engine, "")
    found = read_log_lines(engine, [*noise, line, *noise])
    assert found == read_log_lines(engine, [line])
    assert all(size >= 0 for size in found.values())


@pytest.mark.parametrize("number", ["1e9", "9" * 12, "-4.0", "1.2.3", "nan", "", "1" * 5000])
def test_a_number_that_no_log_prints_is_not_taken_for_memory(number: str) -> None:
    found = read_log_lines("vllm", [f"Model loading took {number} GiB"])
    assert all(size <= 10**9 * GIB for size in found.values())
    assert read_log_lines("llamacpp", [f"CUDA0 KV buffer size = {number} MiB"]).get("kv_cache", 0) <= 10**9 * MIB


@pytest.mark.parametrize("device", ["CPU", "CUDA_Host", "CPU_Mapped", "BLAS", "ROCm_Host"])
def test_buffers_of_the_host_are_not_on_the_gpu(device: str) -> None:
    lines = [f"load: {device} model buffer size = 100.00 MiB", "load: ROCm0 model buffer size = 7.00 MiB"]
    assert read_log_lines("llamacpp", lines) == {"weights": 7 * MIB}


# --- measurements ---


def measured(ratio: float, *, at: int = 0, term: str = "activations", **other: str) -> Measurement:
    return Measurement(
        model="m",
        engine=other.get("engine", "vllm"),
        engine_version=other.get("version", "0.11"),
        family="llama",
        gpu="H200-141",
        term=term,
        estimated_bytes=GIB,
        measured_bytes=round(GIB * ratio),
        at=at,
    )


KIND = MeasuredKind(engine="vllm", engine_version="0.11", family="llama", gpu="H200-141")


@settings(max_examples=examples(80))
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=40), st.integers(0, 10 * GIB))
def test_a_correction_lies_between_the_runs_and_within_its_bounds(ratios: list[float], estimated: int) -> None:
    found = learn([measured(ratio, at=number) for number, ratio in enumerate(ratios)], KIND)["activations"]
    assert 0.5 <= found.ppm / PPM <= 2
    assert found.runs == min(len(ratios), 32)
    if len(ratios) < 3:
        assert found.ppm >= PPM
    term = Term(name="activations", memory_bytes=estimated, exactness=Exactness.ESTIMATED, formula="f")
    corrected = apply_correction(term, found)
    assert corrected.memory_bytes == math.ceil(Decimal(estimated) * found.ppm / PPM)
    exact = Term(name="weights", memory_bytes=estimated, exactness=Exactness.EXACT, formula="f")
    assert apply_correction(exact, Correction(ppm=2 * PPM, runs=9)) is exact


def test_only_the_newest_runs_count_in_whatever_order_they_were_written() -> None:
    runs = [measured(1.8, at=number) for number in range(40)] + [measured(1.2, at=100 + number) for number in range(32)]
    assert learn(reversed(runs), KIND)["activations"].ppm == 1_200_000
    assert learn(runs, KIND) == learn(reversed(runs), KIND)
    assert learn([measured(1.8, engine="ollama"), measured(1.8, version="0.12")], KIND) == {}
    assert kind_of(runs[0]) == KIND


@pytest.mark.parametrize("field", ["estimated_bytes", "measured_bytes", "at", "model", "engine", "term"])
@pytest.mark.parametrize("value", [None, -1, "many", [], {}, float("inf"), float("nan"), 1 << 60], ids=repr)
def test_a_damaged_measurement_is_refused_or_read_as_what_it_is(field: str, value: object) -> None:
    (row,) = to_json([measured(1.5)])
    damaged = json.loads(json.dumps(row | {field: value}))
    with refused_with_hint():
        (found,) = from_json([damaged])
        assert isinstance(getattr(found, field), str if field in ("model", "engine", "term") else int)
        return
    assert field in ("estimated_bytes", "measured_bytes", "at")


@pytest.mark.parametrize("rows", [None, {}, "x", [3], [None], [{}], [{"model": "m"}]], ids=repr)
def test_a_file_of_measurements_of_another_shape_is_refused_with_what_to_do(rows: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_json(rows)
    assert "estimates go on without it" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["", " ", "fp", "q4", "int16", "fp16 fp16", "bf-16", "q4_k_m.gguf"])
def test_a_precision_that_nobody_knows_names_those_there_are(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_precision(name)
    assert "q4_k_m" in str(caught.value.hint)
