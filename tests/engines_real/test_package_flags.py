"""What presets and vLLM are given, against the parsers of packages on the index: downloaded, not installed (200 MB)."""

import ast

import pytest
from tools import package_flags
from tools.package_flags import PACKAGES, VLLM, read_flags

from aimgpu.engines.command.presets import PRESETS


@pytest.mark.parametrize("name", PACKAGES)
def test_the_newest_package_takes_every_word_of_its_preset(name: str) -> None:
    row = package_flags.preset_row(name)
    assert row.given >= 5
    assert row.missing == ()


def test_the_newest_vllm_takes_every_flag_that_it_is_given() -> None:
    row = package_flags.vllm_row(package_flags.versions_of_vllm()[0])
    assert row.given >= 20
    assert row.missing == ()


def test_a_flag_that_came_later_is_missing_in_an_older_vllm() -> None:
    missing = package_flags.vllm_flags("0.33.0") - package_flags.read_package(VLLM, "0.8.5.post1").flags
    assert "--kv-cache-memory-bytes" in missing
    assert "--max-model-len" not in missing


def test_presets_without_a_package_on_the_index_are_those_that_are_not_checked() -> None:
    assert PRESETS.keys() - PACKAGES.keys() == {"tei", "whisper.cpp"}


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ('def f(p):\n    p.add_argument("-m", "--model", default="--no")\n    g.add_argument("path")', {"-m", "--model"}),
        ("def f(plain, api_key=typer.Option(1), other=2):\n    pass", {"--api-key"}),
        (
            'class F:\n    tp_size: A[int, Arg(aliases=["--tp"])] = 1\n    kept: A[int, Arg(no_cli=True)] = 1',
            {"--tp-size", "--tp"},
        ),
    ],
)
def test_flags_are_read_from_each_kind_of_parser(source: str, flags: set[str]) -> None:
    assert set(read_flags(ast.parse(source).body[0])) == flags
