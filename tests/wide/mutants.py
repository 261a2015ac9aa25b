"""`make mutants ROOM=gateway SEED=1 COUNT=20`: change one thing of a room at a time, and see whether its own tests notice.

Kinds: a comparison, a negation, `and`/`or`, arithmetic, a constant, a call that is left out, a returned value. Each mutant
runs in a copy of the checkout, the room's tests that name the changed module first. The record lists every survivor with its
line: whether one means the same as before, a reader has to tell.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.wide.records import ROOT, Recorder

ROOMS = (
    "domain",
    "ledger",
    "control",
    "qos",
    "placement",
    "gateway",
    "isolation",
    "sizing",
    "hardware",
    "engines",
    "daemon",
    "runtime",
)
_SECONDS = 900  # for the tests of one mutant: longer is a hang, which counts as noticed
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file; `text` is the whole file with it."""

    path: Path
    line: int
    kind: str
    text: str


def main() -> int:
    """0: enough were noticed."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--least", type=int, default=0, help="percent that must be noticed")
    given = parser.parse_args()
    recorder = Recorder(part=f"mutants-{given.room}")
    chosen = choose(given.room, given.seed, given.count)
    survivors, killed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".tools", "__pycache__", "*.pyc", ".*_cache")
        )
        for mutant in chosen:
            noticed = is_noticed(mutant, given.room, copy)
            killed += noticed
            where = f"{mutant.path}:{mutant.line} {mutant.kind}"
            sys.stdout.write(f"{'noticed ' if noticed else 'SURVIVED'} {where}\n")
            sys.stdout.flush()
            survivors += [] if noticed else [where]
    percent = 100 * killed // max(len(chosen), 1)
    found = {"seed": given.seed, "mutants": len(chosen), "noticed": killed, "percent": percent, "survivors": survivors}
    recorder.write(exit_status=int(percent < given.least), found=found, versions={})
    sys.stdout.write(f"{killed} of {len(chosen)} noticed ({percent} %)\n")
    return int(percent < given.least)


def choose(room: str, seed: int, count: int) -> list[Mutant]:
    """The same for the same seed and the same sources."""
    found = [(path, place) for path in sorted((ROOT / "src" / "aimgpu" / room).rglob("*.py")) for place in _places(path)]
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [mutant for path, place in chosen if (mutant := _mutate(path, place)) is not None]


def is_noticed(mutant: Mutant, room: str, copy: Path) -> bool:
    """Whether a test of the room fails with it. Those that name the module are asked first: most mutants end there."""
    target = copy / mutant.path
    before = target.read_text()
    target.write_text(mutant.text)
    try:
        tests = sorted((copy / "tests" / room).rglob("test_*.py"))
        named = [test for test in tests if mutant.path.stem in test.read_text()]
        return any(_fails(paths, copy) for paths in (named, tests) if paths)
    finally:
        target.write_text(before)


def _fails(tests: list[Path], copy: Path) -> bool:
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tier=test", "-p", "no:cacheprovider", *map(str, tests)]
    try:
        status = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return True
    return status not in (0, 5)  # 5: none of them is of this tier


def _places(path: Path) -> Iterator[tuple[int, str]]:
    """What could be changed: the number of a node in the order of `ast.walk`, and how."""
    tree = ast.parse(path.read_text())
    # `frozen=True` of a dataclass and the like: what they forbid, no test does.
    decorating = {id(one) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ()) for one in ast.walk(each)}
    for number, node in enumerate(ast.walk(tree)):
        match node:
            case _ if id(node) in decorating:
                continue
            case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
                yield number, "comparison"
            case ast.BoolOp():
                yield number, "and/or"
            case ast.UnaryOp(op=ast.Not()):
                yield number, "not"
            case ast.BinOp(op=operator) if type(operator) in _SWAPPED:
                yield number, "arithmetic"
            case ast.Constant(value=bool() | int()):
                yield number, "constant"
            case ast.Expr(value=ast.Call()):
                yield number, "call left out"
            case ast.Return(value=ast.expr()):
                yield number, "returns None"


def _mutate(path: Path, place: tuple[int, str]) -> Mutant | None:
    tree = ast.parse(path.read_text())
    number, kind = place
    node = list(ast.walk(tree))[number]
    match node:
        case ast.Compare(ops=[operator]):
            node.ops = [_SWAPPED[type(operator)]()]  # type: ignore[list-item]
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator):
            node.op = _SWAPPED[type(operator)]()  # type: ignore[assignment]
        case ast.UnaryOp():
            node.op = ast.UAdd() if not isinstance(node.op, ast.Not) else ast.Not()
            node.operand = ast.UnaryOp(op=ast.Not(), operand=node.operand)
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as value):
            node.value = value + 1
        case ast.Expr():
            node.value = ast.Constant(value=None)
        case ast.Return():
            node.value = ast.Constant(value=None)
        case _:
            return None
    line = getattr(node, "lineno", 0)
    return Mutant(path=path.relative_to(ROOT), line=line, kind=kind, text=ast.unparse(ast.fix_missing_locations(tree)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
