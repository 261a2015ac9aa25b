"""Compares what aimgpu gives to servers with the parsers in their packages; --write: docs/reference/engine-versions.md.

Packages come from the index of PIP_INDEX_URL (by default pypi.org), each alone, and nothing in them is run: the parsers are
read as syntax trees. All of them are about 1.3 GB.
"""

import argparse
import ast
import hashlib
import io
import os
import re
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urljoin

from packaging.version import InvalidVersion, Version

from aimgpu.control.sizing_inputs.model_files import find_model_facts
from aimgpu.engines.command.presets import PRESETS
from aimgpu.engines.flags import normalise_flags
from aimgpu.engines.vllm import door
from aimgpu.engines.vllm.engine import QUIET_FLAG, QUIET_SINCE, VllmEngine
from aimgpu.sizing import SizingRequest, estimate_footprint
from aimgpu.sizing.adapters import AdapterFacts

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/engine-versions.md"
OLDEST_VLLM = "0.8"  # whose flags the sizing knows
LARGEST_BYTES = 600 << 20
_LINK = re.compile(r'<a href="(?P<link>[^"]+#sha256=(?P<hash>[0-9a-f]{64}))"[^>]*>(?P<name>[^<]+)</a>')
_MODELS = ("Qwen/Qwen2.5-7B-Instruct", "BAAI/bge-m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Where a package keeps its parser: functions and classes by pattern, in files by pattern. What they call counts too."""

    file: str  # how the name of the package's file on the index ends, as a pattern
    sources: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a package's parser takes."""

    version: str
    flags: frozenset[str]  # with dashes
    words: frozenset[str]  # texts beside them, such as the names of subcommands
    programs: frozenset[str]  # that it installs; empty: a source archive


VLLM = "vllm"
PARSERS = {
    "infinity-emb": Parser(file="-any.whl", sources=("infinity_emb/cli.py",), names=("v2",)),
    "lmdeploy": Parser(
        file="-cp312-*x86_64.whl",
        sources=("lmdeploy/cli/serve.py", "lmdeploy/cli/utils.py"),
        names=("SubCliServe.add_parser_api_server",),
    ),
    "sglang": Parser(
        file="-cp312-*x86_64.whl", sources=("sglang/srt/arg_groups/fields/*.py", "sglang/cli/main.py"), names=("[A-Z]*",)
    ),
    VLLM: Parser(
        file=".tar.gz",
        sources=("vllm/entrypoints/*/cli_args.py", "vllm/engine/arg_utils.py"),
        names=("make_arg_parser", "BaseFrontendArgs", "FrontendArgs"),
    ),
}
PACKAGES = {"infinity": "infinity-emb", "lmdeploy": "lmdeploy", "sglang": "sglang"}  # preset -> its package on the index


def main() -> int:
    """0 where every package takes what it is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    rows = [preset_row(name) for name in PACKAGES] + [vllm_row(version) for version in versions_of_vllm()]
    lines = [f"| {row.server} | {row.version} | {row.given} | {', '.join(row.missing) or 'none'} |" for row in rows]
    text = "\n".join([*_head(), *lines, ""])
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text)
    return int(any(row.missing for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    server: str
    version: str
    given: int  # flags and subcommands that aimgpu gives it
    missing: tuple[str, ...]  # those that its parser does not have


def preset_row(name: str) -> Row:
    """The newest package of a preset against its command."""
    given = preset_words(name)
    parsed = read_package(PACKAGES[name])
    taken = parsed.flags | parsed.words | parsed.programs
    return Row(server=name, version=parsed.version, given=len(given), missing=tuple(sorted(given - taken)))


def preset_words(name: str) -> frozenset[str]:
    """Program, subcommands and flags of a preset; not the values of its flags."""
    argv = PRESETS[name].argv
    flags = {word for word in argv if word.startswith("-")}
    first = next(place for place, word in enumerate(argv) if word.startswith("-"))
    return frozenset(flags | {word for word in argv[:first] if "{" not in word})


def vllm_row(version: str) -> Row:
    """What vLLM of this version would be given, for a chat model, an encoder and adapters, against its parser."""
    parsed = read_package(VLLM, version)
    given = vllm_flags(version)
    return Row(server=VLLM, version=version, given=len(given), missing=tuple(sorted(given - parsed.flags)))


def vllm_flags(version: str) -> frozenset[str]:
    """Those that depend on the version by the same rules as a start."""
    chat, encoder = (SizingRequest(model=find_model_facts(name), engine_version=version, tensor_parallel=2) for name in _MODELS)
    adapter = AdapterFacts(name="sql", rank=8, targets=("q_proj",), tensor_bytes=1 << 20)
    requests = [replace(encoder, tensor_parallel=1), replace(chat, graphs=False), replace(chat, kv_precision="fp8")]
    if Version(version) >= Version("0.10"):
        requests.append(replace(chat, adapters=(adapter,), device_memory_bytes=80 << 30))
    flags = {door.ARGUMENTS[0].removeprefix("--")}
    for request in requests:
        flags |= {*VllmEngine().own_flags(estimate_footprint(request)), *normalise_flags(estimate_footprint(request).flags)}
    if Version(version) >= Version(QUIET_SINCE):
        flags.add(QUIET_FLAG)
    return frozenset(f"--{flag}" for flag in flags)


def versions_of_vllm() -> list[str]:
    """The newest of each minor version, the newest first."""
    found: dict[tuple[int, int], Version] = {}
    for version in map(Version, list_files(VLLM)):
        if version >= Version(OLDEST_VLLM):
            found.setdefault((version.major, version.minor), version)
    return [str(version) for version in found.values()]


def newest(package: str) -> str:
    """Its version."""
    return next(iter(list_files(package)))


def list_files(package: str) -> dict[str, str]:
    """Version -> link of its file, the newest first; no release candidates."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + f"/{package}/"
    pattern = PARSERS[package].file
    found: dict[Version, str] = {}
    for link in _LINK.finditer(_get(index).decode()):
        version = _version_in(link["name"])
        if version is not None and not version.is_prerelease and fnmatch(link["name"], f"*{pattern}"):
            found[version] = urljoin(index, link["link"])
    return {str(version): found[version] for version in sorted(found, reverse=True)}


def _version_in(name: str) -> Version | None:
    try:
        return Version(name.removesuffix(".tar.gz").split("-")[1])
    except (InvalidVersion, IndexError):
        return None


def read_package(package: str, version: str | None = None) -> Parsed:
    """By default the newest. The archive is checked by its hash, and only its sources are read."""
    parser, files = PARSERS[package], list_files(package)
    version = version or next(iter(files))
    link, _, digest = files[version].partition("#sha256=")
    data = _get(link)
    if hashlib.sha256(data).hexdigest() != digest:
        raise SystemExit(f"{link} is not what the index says")
    texts = dict(_read_archive(data, link, (*parser.sources, "*.dist-info/entry_points.txt")))
    programs = frozenset(
        line.split("=")[0].strip() for path, text in texts.items() if path.endswith(".txt") for line in text.splitlines()
    )
    trees = [ast.parse(text) for path, text in texts.items() if path.endswith(".py")]
    flags = frozenset(flag for node in _chosen(trees, parser.names) for flag in read_flags(node))
    words = frozenset(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return Parsed(
        version=version, flags=flags, words=frozenset(word for word in words if word.isidentifier()), programs=programs
    )


def read_flags(node: ast.AST) -> Iterator[str]:
    """Of argparse, typer, and of classes whose annotated fields become flags."""
    if isinstance(node, ast.ClassDef):
        yield from (flag for field in node.body if isinstance(field, ast.AnnAssign) for flag in _flags_of_field(field))
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "add_argument":
            yield from (text for text in _texts(each.args) if text.startswith("-"))
    if isinstance(node, ast.FunctionDef):
        options = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
        yield from (_as_flag(name.arg) for name, given in options if ast.unparse(given).startswith("typer.Option("))


def _flags_of_field(field: ast.AnnAssign) -> Iterator[str]:
    kept = [each for each in ast.walk(field.annotation) if isinstance(each, ast.keyword)]
    if isinstance(field.target, ast.Name) and not any(each.arg == "no_cli" for each in kept):
        yield _as_flag(field.target.id)
        yield from (text for each in kept if each.arg == "aliases" for text in _texts(ast.walk(each.value)))


def _chosen(trees: Iterable[ast.Module], names: tuple[str, ...]) -> Iterator[ast.AST]:
    """By name, with the methods `Class.method` that they call."""
    defined: dict[str, ast.AST] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)):
        defined[node.name] = node
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)}
    chosen = [name for name in defined if any(fnmatch(name, each) for each in names)]
    for name in chosen:  # which grows
        yield defined[name]
        called = {ast.unparse(each.func) for each in ast.walk(defined[name]) if isinstance(each, ast.Call)}
        chosen += sorted(each for each in called if "." in each and each in defined and each not in chosen)


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    yield from (each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_archive(data: bytes, name: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Path without a source archive's own folder, and text."""
    if name.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            for path in wheel.namelist():
                if any(fnmatch(path, each) for each in wanted):
                    yield path, wheel.read(path).decode()
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            file = archive.extractfile(member) if any(fnmatch(path, each) for each in wanted) else None
            if file is not None:
                yield path, file.read().decode()


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=300) as answer:  # noqa: S310 - the index that the caller chose
        if int(answer.headers.get("Content-Length", "0")) > LARGEST_BYTES:
            raise SystemExit(f"{address} is larger than {LARGEST_BYTES} bytes")
        return bytes(answer.read())


def _head() -> list[str]:
    today = datetime.now(UTC).date().isoformat()
    return [
        "# Flags and versions of other programs",
        "",
        f"Generated by `.venv/bin/python tools/package_flags.py --write` on {today}.",
        "",
        "It reads the parser in each package on the index and runs nothing: that words are taken does not mean that the",
        "version was tried. Of vLLM these are the newest of each minor version; what aimgpu gives follows the version.",
        "",
        "| program | version | words that aimgpu gives it | of these not taken |",
        "| --- | --- | --- | --- |",
    ]


if __name__ == "__main__":
    sys.exit(main())
