"""The clients that people use, unchanged, against the running gateway. Each call of each client is a test."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import Programs, node_folder, python_environment

HERE = Path(__file__).parent
OWN = (
    "anthropic_python",
    "ollama_python",
    "openai_python",
)  # others build upon them, and take long to install
GROUPS = {"guidellm_python": "guidellm", **dict.fromkeys(OWN, "own")}


def _python_calls() -> list[Any]:
    return [
        pytest.param(path.stem, node.name, marks=() if path.stem in OWN else pytest.mark.rest)
        for path in sorted((HERE / "python").glob("*_python.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(one, ast.Name) and one.id == "call" for one in node.decorator_list)
    ]


def _node_calls() -> list[tuple[str, str]]:
    return [
        (path.stem, name)
        for path in sorted((HERE / "node").glob("*_node.mjs"))
        for name in re.findall(r"^  async (\w+)\(", path.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize(("program", "call"), _python_calls())
def test_python_client(programs: Programs, program: str, call: str) -> None:
    def command() -> list[str]:
        return [str(python_environment(GROUPS.get(program, "clients"))), str(HERE / "python" / f"{program}.py")]

    assert (failure := programs.failure(program, call, command)) is None, failure


@pytest.mark.parametrize(("program", "call"), _node_calls())
def test_node_client(programs: Programs, program: str, call: str) -> None:
    assert (failure := programs.failure(program, call, lambda: ["node", str(node_folder() / f"{program}.mjs")])) is None, (
        failure
    )


def test_as_many_calls_are_tried_as_were_promised() -> None:
    """43 of OpenAI's client and 24 of Ollama's were the first survey."""
    programs = [one.values[0] for one in _python_calls()]
    assert programs.count("openai_python") >= 43
    assert programs.count("ollama_python") >= 24
