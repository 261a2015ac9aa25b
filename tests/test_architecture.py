"""The shape of the source: names and docstrings. Layers are import-linter's (`pyproject.toml`)."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.tiers import FOLDERS, LONGEST_MODULES, MODULES
from tests.wide.__main__ import PARTS

SOURCE = Path(__file__).resolve().parent.parent / "src" / "aimgpu"
ROOMS = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
GENERATED = "_pb2"  # protocol buffers
SAME_IDEA = {"Arrival", "Backend"}  # protocols of qos, and the records of gateway that fulfil them


@cache
def modules() -> tuple[Path, ...]:
    return tuple(path for path in sorted(SOURCE.rglob("*.py")) if GENERATED not in path.stem and "_native" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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


def test_the_test_tiers_name_files_and_folders_that_exist() -> None:
    tests = Path(__file__).parent
    assert [name for name in (*MODULES, *LONGEST_MODULES) if not (tests / name).is_file()] == []
    assert [name for name in FOLDERS if not (tests / name).is_dir()] == []


def test_the_schedule_runs_every_part_of_test_wide() -> None:
    workflow = yaml.safe_load((Path(__file__).parents[1] / ".github" / "workflows" / "wide.yaml").read_text(encoding="utf-8"))
    assert set(workflow["jobs"]["test-wide"]["strategy"]["matrix"]["part"]) == set(PARTS)
