"""The program `vllm` of a machine: found, its flags listed once, and a compile cache per model and settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.conftest import MakeRequest

from aimgpu.engines.flags import as_arguments, normalise_flags
from aimgpu.engines.vllm.compile_cache import compile_cache
from aimgpu.engines.vllm.program import find_vllm, list_flags

HELP = "usage: vllm serve\n\n  --max-num-seqs N  how many\n  -tp, --tensor-parallel-size N\n  --dtype, --data-type X\n"


def program(folder: Path, script: str, name: str = "vllm") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def counting(folder: Path, output: str = HELP, code: int = 0) -> Path:
    """Prints its help and notes that it was asked."""
    (folder / "help").write_text(output)
    return program(folder, f'echo "$@" >> {folder}/asked; cat {folder}/help; exit {code}')


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


def test_a_program_that_is_not_there_is_named_with_what_to_do() -> None:
    found = find_vllm("no-such-vllm")
    assert (found.available, found.version) == (False, None)
    assert found.reason is not None
    assert "no-such-vllm" in found.reason
    assert found.hint


def test_the_version_is_read_beside_the_program_without_running_it(tmp_path: Path) -> None:
    path = program(tmp_path / "venv" / "bin", "exit 1")
    (tmp_path / "venv/lib/python3.12/site-packages/vllm-0.26.0.dist-info").mkdir(parents=True)
    found = find_vllm(str(path))
    assert (found.available, found.version, found.where) == (True, "0.26.0", str(path))


def test_a_link_to_the_program_finds_the_version_too(tmp_path: Path) -> None:
    path = program(tmp_path / "venv" / "bin", "exit 1")
    (tmp_path / "venv/lib/python3.12/site-packages/vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    link = tmp_path / "vllm"
    link.symlink_to(path)
    assert find_vllm(str(link)).version == "0.32.0+cpu"


@pytest.mark.parametrize(("output", "version"), [("0.19.0", "0.19.0"), ("vllm 0.20.1", "0.20.1")])
def test_where_no_metadata_is_the_program_is_asked(tmp_path: Path, output: str, version: str) -> None:
    assert find_vllm(str(program(tmp_path, f"echo {output}"))).version == version


@pytest.mark.parametrize("script", ["exit 1", "true", "kill -9 $$", "echo 0.1; exit 3"])
def test_a_program_that_prints_no_version_cannot_be_used(tmp_path: Path, script: str) -> None:
    found = find_vllm(str(program(tmp_path, script)))
    assert not found.available
    assert found.reason
    assert found.hint


def test_flags_are_asked_for_once_per_program_and_version(tmp_path: Path) -> None:
    path, cache = counting(tmp_path), tmp_path / "cache"
    expected = frozenset({"max-num-seqs", "dtype", "data-type", "tensor-parallel-size"})
    assert list_flags(str(path), "0.26.0", cache) == expected
    assert list_flags(str(path), "0.26.0", cache) == expected
    assert asked(tmp_path) == 1
    list_flags(str(path), "0.27.0", cache)
    assert asked(tmp_path) == 2


def test_another_program_of_the_same_version_is_asked_itself(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one, other = counting(tmp_path), tmp_path / "other"
    other.mkdir()
    list_flags(str(one), "0.26.0", cache)
    assert list_flags(str(counting(other, "  --only-here\n")), "0.26.0", cache) == frozenset({"only-here"})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"program": 3}', '{"program": "PATH", "flags": 7}'])
def test_a_damaged_list_is_asked_for_again(tmp_path: Path, content: str) -> None:
    path, cache = counting(tmp_path), tmp_path / "cache"
    (cache / "flags").mkdir(parents=True)
    remembered = cache / "flags" / "vllm-0.26.0.json"
    remembered.write_text(content.replace("PATH", str(path)))
    found = list_flags(str(path), "0.26.0", cache)
    assert found is not None
    assert "max-num-seqs" in found
    assert set(json.loads(remembered.read_text())["flags"]) == found


@pytest.mark.parametrize(("output", "code"), [("", 0), ("no flags here", 0), (HELP, 1)])
def test_a_program_that_lists_nothing_leaves_them_unknown_and_nothing_is_remembered(
    tmp_path: Path, output: str, code: int
) -> None:
    path = counting(tmp_path, output, code)
    assert list_flags(str(path), "0.26.0", tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_costs_no_start(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    found = list_flags(str(counting(tmp_path)), "0.26.0", tmp_path / "cache")
    assert found is not None
    assert "dtype" in found


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIMGPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sizes_of_memory_share_what_was_compiled_and_other_settings_do_not(make_request: MakeRequest, cache_home: Path) -> None:
    request = make_request(model="org/My Model", model_path=Path("/models/a"))
    first = compile_cache(request, {"max-num-seqs": "8", "kv-cache-memory-bytes": "100", "gpu-memory-utilization": "0.1"})
    assert first == compile_cache(request, {"gpu-memory-utilization": "0.9", "max-num-seqs": "8"})
    assert first.parent == cache_home / "vllm"
    assert first.name.startswith("My-Model-")
    others = [
        compile_cache(request, {"max-num-seqs": "16"}),
        compile_cache(make_request(model="org/Other", model_path=Path("/models/a")), {"max-num-seqs": "8"}),
        compile_cache(make_request(model="org/My Model", model_path=Path("/models/b")), {"max-num-seqs": "8"}),
        compile_cache(replace(request, footprint=replace(request.footprint, engine_version="0.27.0")), {"max-num-seqs": "8"}),
        compile_cache(replace(request, footprint=replace(request.footprint, gpu="H200")), {"max-num-seqs": "8"}),
    ]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("model", ["../../etc/passwd", "a/..", "x" * 400, "日本", "-rf", "org/m:tag"])
@pytest.mark.usefixtures("cache_home")
def test_no_model_name_leads_out_of_the_cache(make_request: MakeRequest, cache_home: Path, model: str) -> None:
    path = compile_cache(make_request(model=model), {})
    assert path.parent == cache_home / "vllm"
    assert path.resolve().parent == (cache_home / "vllm").resolve()
    assert len(path.name.encode()) <= 255


@given(
    st.dictionaries(
        st.from_regex(r"-{0,2}[a-z]+([-_][a-z]+){0,2}", fullmatch=True), st.sampled_from(["", "true", "false", "3", "a b"])
    )
)
def test_a_flag_has_one_spelling_and_false_leaves_it_out(flags: dict[str, str]) -> None:
    normal = normalise_flags(flags)
    assert normalise_flags(normal) == normal
    arguments = as_arguments(flags)
    named = [word for word in arguments if word.startswith("--")]
    assert named == sorted(f"--{name}" for name, value in normal.items() if value != "false")
    assert len(arguments) - len(named) == sum(len(value.split()) for value in normal.values() if value not in ("true", "false"))
