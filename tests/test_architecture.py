"""The shape of the source: sizes, names, docstrings. Layers are import-linter's (`pyproject.toml`)."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from tests.tiers import LONGEST_MODULES, SLOW_MODULES

SOURCE = Path(__file__).resolve().parent.parent / "src" / "aimgpu"
ROOMS = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
MOST_MODULES = 20
MOST_LINES = 500
LONGEST_FUNCTION = 60
GENERATED = "_pb2"  # protocol buffers
SAME_IDEA = {"Arrival", "Backend"}  # protocols of qos, and the records of gateway that fulfil them


@cache
def modules() -> tuple[Path, ...]:
    return tuple(path for path in sorted(SOURCE.rglob("*.py")) if GENERATED not in path.stem and "_native" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_folder_has_more_than_twenty_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in modules():
        if path.name != "__init__.py":
            counts[str(path.parent.relative_to(SOURCE))] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_function_is_longer_than_sixty_lines() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > LONGEST_FUNCTION
    }
    assert found == set()


def test_one_class_name_means_one_thing() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in where.items() if len(places) > 1 and name not in SAME_IDEA} == {}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_package_says_what_it_is(room: Path) -> None:
    packages = [path for path in modules() if path.name == "__init__.py" and path.is_relative_to(room)]
    assert [str(path) for path in packages if not ast.get_docstring(tree_of(path))] == []


def test_most_public_functions_and_methods_have_a_docstring() -> None:
    """At least 80 %; one whose name and signature say it all may go without."""
    functions = [
        node
        for path in modules()
        for body in (tree_of(path).body, *(each.body for each in tree_of(path).body if isinstance(each, ast.ClassDef)))
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    documented = sum(ast.get_docstring(node) is not None for node in functions)
    assert documented >= 0.8 * len(functions), f"{documented} of {len(functions)}"


def test_the_test_tiers_name_files_that_exist() -> None:
    tests = Path(__file__).parent
    assert [name for name in (*SLOW_MODULES, *LONGEST_MODULES) if not (tests / name).is_file()] == []
