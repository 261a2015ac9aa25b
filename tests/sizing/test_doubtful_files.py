"""Files that are damaged, incomplete or made to harm: refused at once and by name, or sized with a remark."""

import io
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import SizingRequest, estimate_footprint, read_gguf, read_safetensors
from aimgpu.sizing.formats.config import read_config

Make = Callable[..., bytes]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 128,
}
GGUF = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 4}


def _folder(path: Path, files: dict[str, bytes]) -> str:
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name, data in files.items():
        (path / name).write_bytes(data)
    return str(path)


def _index(*names: str) -> dict[str, bytes]:
    weight_map = {f"tensor.{number}": name for number, name in enumerate(names)}
    return {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def test_a_pipe_in_the_place_of_weights_is_refused_at_once(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {})
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidModelFile, match="is not a file"):
        find_model_facts(folder)


def test_a_pipe_in_the_place_of_a_part_of_a_gguf_is_refused_at_once(tmp_path: Path, tiny_gguf: bytes) -> None:
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(tiny_gguf)
    os.mkfifo(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(InvalidModelFile, match="is not a file"):
        find_model_facts(str(tmp_path / "m-00001-of-00002.gguf"))


def test_a_gguf_that_cannot_be_used_is_named(tmp_path: Path, tiny_gguf: bytes) -> None:
    alone = tmp_path / "cut-short.gguf"
    alone.write_bytes(tiny_gguf[: len(tiny_gguf) // 2])
    with pytest.raises(InvalidModelFile, match=re.escape(str(alone))):
        find_model_facts(str(alone))


def test_of_several_gguf_files_the_damaged_one_is_named(tmp_path: Path, tiny_gguf: bytes) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(tiny_gguf)
    second.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InvalidModelFile, match=re.escape(second.name)):
        find_model_facts(str(first))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "sub/model.safetensors", ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidModelFile, match="does not lie beside it"):
        find_model_facts(_folder(tmp_path, _index(name)))


def test_an_index_of_very_many_files_is_refused_before_any_is_sought(tmp_path: Path) -> None:
    many = _index(*(f"{number}.safetensors" for number in range(100_000)))
    with pytest.raises(InvalidModelFile, match="lists 100000 weight files"):
        find_model_facts(_folder(tmp_path, many))


def test_a_file_that_the_index_lists_and_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match="model-00001-of-00002"):
        find_model_facts(_folder(tmp_path, _index("model-00001-of-00002.safetensors")))


def test_a_missing_part_is_named_where_no_index_lists_it(tmp_path: Path, make_safetensors: Make) -> None:
    part = make_safetensors({"model.embed_tokens.weight": ("BF16", [128, 64])})
    with pytest.raises(InvalidModelFile, match=r"model-00001-of-00002\.safetensors is missing"):
        find_model_facts(_folder(tmp_path, {"model-00002-of-00002.safetensors": part}))


def test_far_fewer_weights_than_the_layers_of_the_config_are_remarked(tmp_path: Path, make_safetensors: Make) -> None:
    part = make_safetensors({"model.embed_tokens.weight": ("BF16", [2, 64])})
    facts = find_model_facts(_folder(tmp_path, {"model.safetensors": part}))
    assert "may be missing" in estimate_footprint(SizingRequest(model=facts)).notes[0]


def test_tensors_that_lie_over_each_other_are_refused(make_gguf: Make) -> None:
    entry = {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(20)
    with pytest.raises(InvalidModelFile, match="over each other"):
        read_safetensors(io.BytesIO(data), len(data))
    doubled = make_gguf(GGUF, {"a": ((4096,), 0, 0), "b": ((4096,), 0, 16384)})  # both begin at byte 0
    with pytest.raises(InvalidModelFile, match="over each other"):
        read_gguf(io.BytesIO(doubled), len(doubled))


def test_many_large_headers_are_refused_before_the_first_is_read(tmp_path: Path) -> None:
    """They are no JSON, which nobody gets to see."""
    first = tmp_path / "model-00001-of-00099.safetensors"
    with first.open("wb") as file:
        file.write(struct.pack("<Q", 15 << 20))
        file.truncate(16 << 20)
    for number in range(2, 100):
        os.link(first, tmp_path / f"model-{number:05d}-of-00099.safetensors")
    with pytest.raises(InvalidModelFile, match=r"headers of the weight files up to .*00003-of-00099\S* have 47185920 bytes"):
        find_model_facts(_folder(tmp_path, {}))


def test_more_heads_than_the_hidden_size_are_no_shape() -> None:
    assert read_config(json.dumps(CONFIG | {"num_attention_heads": 100_000}))[0] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_number_that_is_none_is_refused(make_gguf: Make, value: float) -> None:
    data = make_gguf(GGUF | {"llama.block_count": value}, {"a": ((32,), 0, 128)})
    with pytest.raises(InvalidModelFile, match="block_count"):
        read_gguf(io.BytesIO(data), len(data))


@pytest.mark.parametrize("dtype", [[], {}, None, 5])
def test_a_type_that_is_no_text_is_refused(dtype: object) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, 32]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(32)
    with pytest.raises(InvalidModelFile, match="unknown type"):
        read_safetensors(io.BytesIO(data), len(data))


def test_a_tensor_that_is_listed_twice_is_not_lost_from_the_sum() -> None:
    """JSON keeps the last of two entries with one name; the bytes of the first would go uncounted."""
    entry = '"w": {{"dtype": "BF16", "shape": [4, 4], "data_offsets": [{}, {}]}}'
    header = ("{" + entry.format(0, 32) + ", " + entry.format(32, 64) + "}").encode()
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    with pytest.raises(InvalidModelFile, match="fill 32 of its 64 bytes"):
        read_safetensors(io.BytesIO(data), len(data))


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "a\nb.safetensors"])
def test_an_index_with_names_that_no_file_has_is_refused(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path, _index(name))
    with pytest.raises(InvalidModelFile, match=r"does not lie beside it|is not an index"):
        find_model_facts(folder)


def test_the_home_of_somebody_unknown_is_refused() -> None:
    with pytest.raises(InvalidModelFile, match="home folder that does not exist"):
        find_model_facts("~nobody-of-this-name/model")


def test_a_dot_is_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModelFile, match=r"holds no config\.json"):
        find_model_facts(".")


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_a_zero_in_the_config_is_not_a_cache_without_bytes(key: str) -> None:
    zero, _ = read_config(json.dumps({**CONFIG, key: 0}))
    plain, _ = read_config(json.dumps(CONFIG))
    assert zero == plain
