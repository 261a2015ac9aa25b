"""What people type by mistake or by malice: an error with a way out, and nothing written that should not be."""

import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aimgpu.cli.main import run_command
from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.sizing import Row, read_row

Make = Callable[..., bytes]
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
SHAPE = {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate_size": 14336}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(list(arguments)) == 2
    text = capsys.readouterr().err
    assert "hint:" in text
    return text


def _row(name: str) -> Row:
    return read_row({"id": name, "parameters": "7B"}, "the test")


@pytest.mark.parametrize(
    "name", ['x,y"\n#z', "# comment", "a b", "../../etc", "/abs/path", "~/x", "./x", "x.gguf", "a//b", "\x1b[31mred", "x" * 300]
)
def test_a_name_that_the_file_or_a_path_would_choke_on_is_refused(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One such name made every later command fail on its own file."""
    _refused(capsys, "catalogue", "add", name, "--parameters", "7B")
    assert not (home / "catalogue.csv").exists()


@pytest.mark.parametrize("setting", ["source=a\nb", "family=" + "x" * 2000, "kv_heads=0", "zzz=1", "id=other/name"])
def test_a_setting_that_could_not_be_read_back_is_refused(setting: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [f"--set={name}={value}" for name, value in {**SHAPE, "vocab_size": 128256}.items()]
    _refused(capsys, "catalogue", "add", "acme/m", "--parameters", "9B", *shape, f"--set={setting}")
    assert not (home / "catalogue.csv").exists()


def test_an_alias_cannot_make_a_known_model_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    alias = "--set=aliases=meta-llama/Llama-3.3-70B-Instruct"
    assert "but has 70.6B" in _refused(capsys, "catalogue", "add", "acme/m", "--parameters", "7B", alias)


def test_facts_of_files_are_not_mixed_with_given_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(capsys, "catalogue", "add", "acme/m", "--parameters", "7B", "--path", str(tmp_path))


def test_a_damaged_file_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "catalogue.csv").write_text("id,parameters\nacme/m,seven\n")
    assert f"{home / 'catalogue.csv'}: line 2" in _refused(capsys, "size", "Qwen/Qwen3-8B")


def test_a_cell_that_no_csv_reader_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.csv").write_text("id,parameters\n" + "x" * 200_000 + ",7B\n")
    assert "is not CSV" in _refused(capsys, "catalogue", "import", str(tmp_path / "m.csv"))


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "m.csv")
    assert "is not a file" in _refused(capsys, "catalogue", "import", str(tmp_path / "m.csv"))


def test_commands_at_once_lose_no_model(tmp_path: Path) -> None:
    names = [f"acme/m{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: CatalogueFile(tmp_path / "catalogue.csv").add([_row(name)]), names))
    assert {row.facts.name for row in CatalogueFile(tmp_path / "catalogue.csv").read()} == set(names)
    assert not list(tmp_path.glob("*.new"))


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.csv"
    CatalogueFile(file).add([_row("acme/one")])
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))  # the next longer file cannot be written whole
    try:
        with pytest.raises(OSError, match="File too large"):
            CatalogueFile(file).add([_row("acme/two")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.new"))


def test_devices_that_the_engine_would_refuse_are_refused_with_those_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    text = _refused(capsys, "size", "meta-llama/Llama-3.1-8B-Instruct", "--tensor-parallel", "3")
    assert "one of 1, 2, 4, 8, 16, 32." in text


def test_a_name_without_its_organisation_is_taken_by_size_which_says_so_and_asked_about_by_the_catalogue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["size", "qwen3-8b"]) == 0
    assert "qwen3-8b is taken as Qwen/Qwen3-8B" in capsys.readouterr().out
    assert "Did you mean `aimgpu catalogue show Qwen/Qwen3-8B`?" in _refused(capsys, "catalogue", "show", "qwen3-8b")


def test_a_size_given_for_a_known_model_is_said_to_be_unused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "Qwen/Qwen3-8B", "--parameters", "7B"]) == 0
    assert "parameters given are not used" in capsys.readouterr().out


def _local_model(folder: Path, make: Make) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(make({"w": ("BF16", [64, 64])}))
    return folder


def test_profiles_of_a_local_model_stay_in_their_folder(
    tmp_path: Path, make_safetensors: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path after a folder takes its place: profiles were written beside the model's weights."""
    model = _local_model(tmp_path / "model", make_safetensors)
    assert run_command(["profiles", "generate", "--gpu", "MI300X", "--out", str(tmp_path / "out"), "--model", str(model)]) == 0
    capsys.readouterr()
    assert {file.name for file in model.iterdir()} == {"config.json", "model.safetensors"}
    assert len(list((tmp_path / "out" / "aim" / "model").glob("*.yaml"))) == 3


def _generate(out: Path, *more: str) -> list[str]:
    return ["profiles", "generate", "--gpu", "MI300X", "--out", str(out), *more]


def test_two_models_whose_profiles_would_be_one_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("acme/m:1", "7B"), ("acme/m_1", "8B")):
        assert run_command(["catalogue", "add", name, "--parameters", count]) == 0
    text = _refused(capsys, *_generate(tmp_path / "out", "--model", "acme/m:1", "--model", "acme/m_1"))
    assert "acme/m:1-fp16 and acme/m_1-fp16 would both be acme_m_1-fp16.json" in text
    assert not (tmp_path / "out").exists()


def test_a_profile_asked_for_twice_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--model", "Qwen/Qwen3-8B", "--model", "qwen/qwen3-8b", "--precision", "fp16", "--precision", "FP16")
    assert run_command([*_generate(tmp_path / "out", *twice), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["profiles"], answer["files"]) == (1, 2)


def test_a_folder_that_cannot_be_written_is_named_with_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "--out" in _refused(capsys, *_generate(tmp_path / "file", "--model", "Qwen/Qwen3-8B"))
