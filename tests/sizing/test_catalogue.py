from dataclasses import fields

import pytest

from aimgpu.errors import InvalidInput
from aimgpu.sizing import Row, SizingRequest, built_in, combine, estimate_footprint, read_rows, write_rows
from aimgpu.sizing.model import Architecture
from aimgpu.sizing.shape import embedding_parameters, layer_parameters
from aimgpu.sizing.weights import weight_bytes

ROWS = built_in().rows
# Names that people copied from older lists -> the model that is meant.
OLD_NAMES = {
    "CohereForAI/aya-expanse-8B": "CohereLabs/aya-expanse-8b",
    "CohereForAI/aya-expanse-32B": "CohereLabs/aya-expanse-32b",
    "deepseek-ai/Distill-Llama-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "google/gemma-3-1B": "google/gemma-3-1b-it",
    "google/gemma-3-4B": "google/gemma-3-4b-it",
    "google/gemma-3-12B": "google/gemma-3-12b-it",
    "google/gemma-3-27B": "google/gemma-3-27b-it",
    "meta-llama/Llama-3.2-11B-Instruct": "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "meta-llama/Llama-4-Scout-17B": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistralai/Mistral-Small-3.1-24B": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mistralai/Mistral-Large": "mistralai/Mistral-Large-Instruct-2411",
    "Qwen/Qwen3-4B-Instruct": "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B-Instruct": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B-Instruct": "Qwen/Qwen3-14B",
    "Qwen/Qwen3-30B-Instruct": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-32B-Instruct": "Qwen/Qwen3-32B",
}
# Names of an older list of 38 models that were right as they stood; the three tables are all of it.
KEPT_NAMES = (
    "deepseek-ai/DeepSeek-R1-0528",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai/DeepSeek-R1-Zero",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3-0324",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "OdiaGenAI-LLM/qwen_1.5_odia_7b",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-235B-A22B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "unsloth/Llama-3.2-11B-Vision",
)
# A size that was never published -> the models that may be meant, each with a row of its own.
NEVER_PUBLISHED = {"unsloth/Llama-3.2-30B-Vision": ("unsloth/Llama-3.2-11B-Vision", "unsloth/Llama-3.2-90B-Vision")}


def test_there_are_at_least_eighty_models_each_with_its_source_and_shape() -> None:
    assert len(ROWS) >= 80
    for row in ROWS:
        assert row.facts.source.startswith("catalogue: https://huggingface.co/")
        assert row.facts.architecture is not None
        assert row.facts.name.count("/") == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.facts.name))
def test_parameters_agree_with_the_shape(row: Row) -> None:
    """Hybrids and gated encoders hold matrices that the plain arithmetic does not know, so they may have more."""
    architecture = row.facts.architecture
    assert architecture is not None
    counted = embedding_parameters(architecture) + layer_parameters(architecture) + architecture.encoder_parameters
    beyond_arithmetic = architecture.state_elements or architecture.family in ("nomic_bert", "llama4")
    assert counted <= row.facts.parameters * 1.02
    assert counted >= row.facts.parameters * (0.79 if beyond_arithmetic else 0.965)
    if row.facts.active_parameters is not None:
        assert row.facts.active_parameters < row.facts.parameters


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.facts.name))
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_no_footprint_is_under_the_raw_weights(row: Row, precision: str) -> None:
    footprint = estimate_footprint(SizingRequest(model=row.facts, precision=precision))
    assert (
        footprint.total_bytes
        > weight_bytes(row.facts, precision)
        >= row.facts.parameters * {"fp16": 2, "int8": 1, "int4": 0.5}[precision]
    )


@pytest.mark.parametrize(("old", "real"), OLD_NAMES.items())
def test_old_names_find_the_one_model_that_is_meant(old: str, real: str) -> None:
    facts = built_in().find(old)
    assert facts is not None
    assert facts.name == real


def test_a_mixture_of_experts_is_sized_by_all_its_experts() -> None:
    facts = built_in().find("deepseek-ai/DeepSeek-V3")
    assert facts is not None
    assert facts.parameters > 680e9
    assert estimate_footprint(SizingRequest(model=facts)).total_bytes > 680e9


def test_the_whole_older_list_is_here_with_true_sizes() -> None:
    assert len(OLD_NAMES) + len(KEPT_NAMES) + len(NEVER_PUBLISHED) == 38
    for name in KEPT_NAMES:
        facts = built_in().find(name)
        assert facts is not None
        assert facts.name == name


@pytest.mark.parametrize(("name", "meant"), NEVER_PUBLISHED.items())
def test_a_name_that_no_model_has_is_not_guessed_and_the_candidates_are_named(name: str, meant: tuple[str, ...]) -> None:
    assert built_in().find(name) is None
    for candidate in meant:
        assert candidate in (built_in().remark(name) or "")
        facts = built_in().find(candidate)
        assert facts is not None
        assert facts.name == candidate


def test_no_name_means_two_models() -> None:
    seen: dict[str, str] = {}
    for row in ROWS:
        for name in (row.facts.name, *row.aliases):
            assert seen.setdefault(name.casefold(), row.facts.name) == row.facts.name, name


def test_what_is_written_reads_back_the_same() -> None:
    assert list(read_rows(write_rows(ROWS))) == list(ROWS)


def test_comment_lines_and_short_counts_are_read() -> None:
    text = "# mine\nmodel_id,params\n\n# another\nacme/small,1.5B\nacme/large,70B\n"
    assert [(row.facts.name, row.facts.parameters) for row in read_rows(text)] == [
        ("acme/small", 1_500_000_000),
        ("acme/large", 70_000_000_000),
    ]


def test_a_users_row_overrides_the_package() -> None:
    mine = list(read_rows("id,parameters,source\nQwen/Qwen3-8B,9B,measured\n"))
    facts = combine(ROWS, mine).find("qwen/qwen3-8b")
    assert facts is not None
    assert facts.parameters == 9_000_000_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("id,parameters,mem_fp16_gb\na/b,8B,12\n", "under its raw weights of 16.0 GB"),
        ("id,parameters,mem_int4_gb\na/b,123B,60\n", "under its raw weights"),
        ("id,parameters,mem_fp16_gb\na/b,8B,nan\n", "under its raw weights"),
        ("id,parameters\n,8B\n", "has no id"),
        ("id,parameters\na/b,\n", "not a parameter count"),
        ("id,parameters\na/b,-8B\n", "not a parameter count"),
        ("id,parameters,layers\na/b,8B,32\n", "lacks hidden_size"),
        ("id,parameters,precision\na/b,8B,fp17\n", "not a precision"),
        ("id,size\na/b,8B\n", "lacks the column parameters"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        list(read_rows(text))


def test_fewer_parameters_than_the_experts_hold_are_refused() -> None:
    row = next(row for row in ROWS if row.facts.name == "deepseek-ai/DeepSeek-V3")
    with pytest.raises(InvalidInput, match=r"line 2 .*all experts must be in memory"):
        list(read_rows(write_rows([row]).replace(str(row.facts.parameters), "37000000000")))


def test_a_huge_file_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(InvalidInput, match="4 MiB"):
        list(read_rows("x" * (5 << 20)))


def test_every_number_of_an_architecture_has_its_column() -> None:
    header = write_rows([]).strip().split(",")
    assert {field.name for field in fields(Architecture)} <= set(header)


def test_every_name_of_the_package_could_be_added_by_a_user() -> None:
    """The rules for names are those of real ones."""
    again = combine(read_rows(write_rows(ROWS)))
    assert [(row.facts.name, row.aliases) for row in again.rows] == [(row.facts.name, row.aliases) for row in ROWS]
