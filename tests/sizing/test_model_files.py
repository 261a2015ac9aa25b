from pathlib import Path

import pytest

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.errors import InvalidModelFile, InvalidQuantity, UnknownModel
from aimgpu.sizing import parse_parameter_count


def test_a_file_is_better_than_the_catalogue(tmp_path: Path, tiny_gguf: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf)
    facts = find_model_facts("meta-llama/Llama-3.1-8B-Instruct", path)
    assert facts.source == "GGUF header"
    assert facts.tensor_bytes == 139520
    assert facts.name == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_path_given_as_the_model_is_read(tmp_path: Path, tiny_gguf: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf)
    assert find_model_facts(str(path)).source == "GGUF header"


def test_names_match_without_regard_to_case_but_never_by_suffix() -> None:
    assert find_model_facts("META-LLAMA/llama-3.1-8b-instruct").parameters == 8_030_261_248
    with pytest.raises(UnknownModel):
        find_model_facts("Llama-3.1-8B-Instruct")
    with pytest.raises(UnknownModel):
        find_model_facts("other/meta-llama/Llama-3.1-8B-Instruct")


def test_a_parameter_count_is_the_last_resort_and_without_one_the_refusal_says_what_to_give() -> None:
    assert find_model_facts("mine", parameters=parse_parameter_count("1.5B")).parameters == 1_500_000_000
    with pytest.raises(UnknownModel) as caught:
        find_model_facts("mine")
    assert "--parameters" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "B", "-1B", "1e9", "7BB", "0B", "9" * 40])
def test_nonsense_is_no_parameter_count(text: str) -> None:
    with pytest.raises(InvalidQuantity):
        parse_parameter_count(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match="absent"):
        find_model_facts(str(tmp_path / "absent.gguf"))
