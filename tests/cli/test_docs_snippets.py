"""What the docs have their reader type and copy: commands, manifests, settings and code."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.cli.test_docs import PAGES as DOCS
from tests.cli.test_docs import ROOT

from aimgpu.cli.main import cli
from aimgpu.cli.output import OutputState
from aimgpu.kubernetes.node.dra_driver.parameters import parse_parameters
from aimgpu.kubernetes.vocabulary.annotations import parse_annotations
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config

PAGES = sorted([*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])
CHART = ROOT / "deploy" / "helm" / "aim-gpu-sharing"
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"^(?:[A-Z_]+=\S* )+")
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "number": (int, float),
}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield text


def typed_lines(page: Path) -> Iterator[str]:
    """Lines of code blocks, fenced or indented, with continuation lines joined; no prompt, no comment."""
    text = page.read_text()
    indented = re.findall(r"^ {4,}(\S.*(?:\\\n.*)*)$", FENCE.sub("", text), re.MULTILINE)
    fenced = [line for block in blocks(page, "", "console", "bash", "sh") for line in block.replace("\\\n", " ").splitlines()]
    for line in (*indented, *fenced):
        bare = line.strip().removeprefix("$ ").replace("\\\n", " ")
        inner = re.search(r"\$\(((?:aimgpu|\.venv/bin/aimgpu) [^)]*)\)", bare)
        yield ASSIGNMENT.sub("", (inner[1] if inner else bare).removeprefix(".venv/bin/"))


def commands(page: Path, program: str) -> Iterator[list[str]]:
    for line in typed_lines(page):
        if line.startswith(f"{program} "):
            words = shlex.split(line, comments=True)
            end = next((at for at, word in enumerate(words) if word in {"|", ">", "&", "&&", ";"}), len(words))
            yield words[1:end]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_is_accepted_by_its_parser(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(page, "aimgpu"):
        if "..." in words or "[OPTIONS]" in words:  # a synopsis of the reference
            continue
        for word in words:
            if re.fullmatch(r"[\w./-]+\.(yaml|json|csv|gguf)", word) and not word.startswith("/"):
                (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / word).touch()
        parse(words)


def parse(words: list[str]) -> None:
    """Raises click.UsageError; runs nothing."""
    context = click.Context(cli, info_name="aimgpu", obj=OutputState(as_json=False))
    command = cli.get_command(context, words[0])
    assert command is not None, words
    rest = words[1:]
    while isinstance(command, click.Group) and rest and (inner := command.get_command(context, rest[0])) is not None:
        context = click.Context(command, info_name=command.name, parent=context)
        command, rest = inner, rest[1:]
    command.make_context(command.name, rest, parent=context)


def slugs(page: Path) -> set[str]:
    """The anchors that a forge makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            assert anchor in slugs(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_manifests_are_what_our_programs_accept(page: Path) -> None:
    for text in blocks(page, "yaml"):
        for document in yaml.safe_load_all(text):
            check_document(document)


def check_document(document: Mapping[str, Any]) -> None:
    kind, spec = document.get("kind"), document.get("spec") or {}
    annotations = (document.get("metadata") or {}).get("annotations") or {}
    if kind == "PartitionPlan":
        assert not list(breaches(plan_schema(), document, kind))
    elif kind == "Pod" and annotations:
        assert parse_annotations(annotations, {"containers": [{"name": "main"}]}) is not None
    elif kind == "InferenceService":
        assert parse_annotations(annotations, {"containers": [{"name": "kserve-container"}]}) is not None
    elif "sharing" in document and "version" in document:
        assert parse_config(yaml.safe_dump(document)).replicated
    for one in document.get("config") or spec.get("config") or ():
        parse_parameters(one["opaque"]["parameters"])


def plan_schema() -> Mapping[str, Any]:
    (version,) = yaml.safe_load((CHART / "crds" / "partitionplans.yaml").read_text())["spec"]["versions"]
    schema: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def breaches(schema: Mapping[str, Any], value: object, where: str) -> Iterator[str]:
    """Unknown and missing fields, wrong types and words; not CEL rules."""
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        yield f"{where} is no {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is none of {schema['enum']}"
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{where}.{name} is missing" for name in set(schema.get("required", ())) - value.keys())
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from breaches(schema["properties"][name], inner, f"{where}.{name}")
            elif where != "PartitionPlan" or name not in {"apiVersion", "kind", "metadata"}:
                yield f"{where}.{name} is unknown"


def test_a_wrong_plan_would_be_found() -> None:
    plan = {"spec": {"layuot": {"computeMode": "CPX"}, "maxParallel": "2"}}
    assert {"PartitionPlan.spec.layuot is unknown", "PartitionPlan.spec.maxParallel is no integer"} <= set(
        breaches(plan_schema(), plan, "PartitionPlan")
    )
    with pytest.raises(click.UsageError):
        parse(["up", "--pull-policy", "Never"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_chart_values_make_targets_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(r"--set ([a-z]\w*\.[\w.]+)=", text):
        found: Any = values
        for name in path.split("."):
            assert name in found, path
            found = found[name]
    targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^ {4}|`|sudo )make ([a-z][\w-]*)", text, re.MULTILINE):
        assert target in targets or target.startswith("bench-"), target
    for module in re.findall(r"python3? -m ((?:aimgpu|benchmarks|tools)[\w.]*)", text):
        assert find_spec(module), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_python_snippets_import_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("aimgpu"):
                module = import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), node.module
