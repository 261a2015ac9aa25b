"""Refusals that the page shows name what can be done there, where the command line's words would mean nothing to its reader."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import aimgpu
from aimgpu.errors import Conflict

ROOT = Path(aimgpu.__file__).parent
ROOMS = ("control", "placement", "domain", "hardware", "engines", "web", "kubernetes/models/page", "kubernetes/models/serving")
COMMAND_WORDS = re.compile(r"(^|[\s`(])--[a-z]{3,}|`?aimgpu [a-z]+")
ELSEWHERE = {  # never on the page, or only a terminal helps
    "control/dependencies.py": "a variable of the daemon's environment, read when it starts",
    "control/loop.py": "the daemon is stopping: it is started from a terminal",
    "control/what_if.py": "files of `aimgpu plan`",
    "control/sizing_inputs/catalogue_file.py": "`aimgpu catalogue`",
    "control/stack/yaml_nodes.py": "an empty stack file: the form always has a model",
    "engines/overrides.py": "a variable that must be set before the daemon starts",
    "engines/vllm/engine.py": "a flag of vLLM, of a model that aimgpu did not start",
    "hardware/amd/hardware.py": "a kernel without the driver",
    "hardware/amd/reload.py": "how a container is started",
    "web/authority.py": "a link to the page is printed in a terminal",
    "web/deploy_check.py": "a link to the page is printed in a terminal",
    "kubernetes/models/page/control_api.py": "files of another machine: applied from there",
    "kubernetes/models/serving/cluster_view.py": "`aimgpu logs --on kubernetes`",
}


def refusals() -> Iterator[tuple[str, int, bool]]:
    """File, line and whether it has page words, for each error whose hint has words of the command line."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
                if isinstance(call, ast.Call) and ast.unparse(call.func) not in ("Availability", "Finding"):
                    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
                    if COMMAND_WORDS.search(words.get("hint", "")):
                        yield str(path.relative_to(ROOT)), call.lineno, "page_hint" in words


def test_a_refusal_in_words_of_the_command_line_has_words_for_the_page() -> None:
    found = list(refusals())
    assert found
    missing = [f"{path}:{line}" for path, line, on_page in found if not on_page and path not in ELSEWHERE]
    assert missing == [], "give them a page_hint"
    assert {path for path, _, _ in found} >= set(ELSEWHERE), "listed without need"


def test_the_page_reads_its_own_words_beside_those_of_the_command_line() -> None:
    assert Conflict("no", hint="Pass --x.", page_hint="Tick x.").to_json() == {
        "code": "conflict",
        "message": "no",
        "hint": "Pass --x.",
        "page_hint": "Tick x.",
    }
    assert Conflict("no", hint="Wait.").to_json() == {"code": "conflict", "message": "no", "hint": "Wait."}
