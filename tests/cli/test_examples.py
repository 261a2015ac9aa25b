"""examples/docker, and the table of what the founding documents promised: each test and file that it names exists."""

import re
from pathlib import Path

import pytest
import yaml

from aimgpu.cli.main import run_command

ROOT = Path(__file__).parents[2]
STACK = ROOT / "examples" / "docker" / "stack.yaml"
COVERAGE = ROOT / "docs" / "reference" / "coverage.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_two_vllm_servers_fit_one_mi300x_in_docker(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "-f", str(STACK), "--gpu", "MI300X"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"vllm-1-0 +gpu0/spx-0 +95GiB", out)
    assert re.search(r"vllm-2-0 +gpu0/spx-0 +76GiB", out)


def test_the_compose_file_of_the_two_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compose", "-f", str(STACK)]) == 0
    text = capsys.readouterr().out
    assert "vllm-1 95GiB + vllm-2 76GiB = 171GiB of 191.9GiB" in text
    services = yaml.safe_load(text)["services"]
    fractions = [service["command"][service["command"].index("--gpu-memory-utilization") + 1] for service in services.values()]
    assert sum(map(float, fractions)) <= 1


def rows() -> list[list[str]]:
    lines = [line for line in COVERAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_promise_has_a_test_that_exists_or_is_written_as_missing() -> None:
    promises = [row for row in rows() if row[0] not in ("claim or command", "---")]
    assert len(promises) > 40
    for claim, *_, shown, _hardware in promises:
        named = _TEST.findall(shown)
        assert named or shown == "*missing*", claim
        for path, function in named:
            text = (ROOT / path).read_text()
            assert not function or re.search(rf"^(?:async )?def {function}\(", text, re.MULTILINE), (
                f"{claim}: {path}::{function}"
            )


def test_every_file_that_the_table_names_exists() -> None:
    text = COVERAGE.read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert not [link for link in links if not (COVERAGE.parent / link).exists()]
    assert not [path for path in re.findall(r"`((?:examples|deploy)/[\w/.-]+)`", text) if not (ROOT / path).exists()]
    every = {
        str(path.relative_to(ROOT)) for folder in ("kubernetes", "docker") for path in (ROOT / "examples" / folder).iterdir()
    }
    assert not [path for path in every if path not in text], "an example without a row"
