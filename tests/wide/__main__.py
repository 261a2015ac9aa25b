"""``make test-wide``: what takes hours or gigabytes, by hand and by schedule. Each part writes ``results/PART.json``.

    make test-wide ARGS=kubernetes KUBERNETES=v1.35.4

A record holds the commit, the versions, the duration and the counts of tests. Commit it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.engines_real import ollama_program, vllm_program
from tests.wide.coverage_fuzz import HARNESSES
from tests.wide.mutants import ROOMS
from tests.wide.records import ROOT, Recorder
from tools import package_flags

_REQUESTS = 50_000
_COUNTS = ("tests", "failures", "errors", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One call of pytest. ``variables`` and ``versions`` are asked for when it runs: the environment may choose them."""

    says: str
    arguments: tuple[str, ...]
    program: str = "pytest"
    variables: Callable[[], Mapping[str, str]] = field(default=dict)
    versions: Callable[[], Mapping[str, str]] = field(default=dict)


def _kubernetes() -> str:
    return os.environ.get("KUBERNETES", "v1.34.4")


PARTS = {
    "kubernetes": Part(
        says="DRA driver and device plugin on another Kubernetes, built first (10 CPU minutes): KUBERNETES=v1.35.4",
        arguments=(
            "tests/cluster/test_cluster.py",
            *(f"tests/kubernetes/test_{name}.py" for name in ("dra_sharing", "dra_failures", "device_plugin_cluster")),
        ),
        variables=lambda: {"AIMGPU_KUBERNETES_VERSION": _kubernetes()},
        versions=lambda: {"kubernetes": _kubernetes()},
    ),
    "engines": Part(
        says="the adapters against vLLM for the CPU (6 GB) and Ollama; others' servers for speech, vectors (6 GB); their flags",
        arguments=("--tier=wide",),
        versions=lambda: {
            "vllm": vllm_program.VERSION,
            "ollama": ollama_program.VERSION,
            **{f"flags of {package}": package_flags.newest(package) for package in package_flags.PARSERS},
        },
    ),
    "fuzz": Part(
        says="the property tests with new examples, TIMES (50) times as many",
        arguments=("-m", "hypothesis"),
        variables=lambda: {"AIMGPU_FUZZ": os.environ.get("TIMES", "50")},
        versions=lambda: {"times": os.environ.get("TIMES", "50")},
    ),
    "h11": Part(
        says=f"{_REQUESTS} mutated requests, read as h11 reads them or refused",
        arguments=("tests/gateway/test_http_reference.py", "-k", "spoiled", "--timeout=0"),
        variables=lambda: {"AIMGPU_FUZZ": str(_REQUESTS // 100)},
        versions=lambda: {"h11": version("h11"), "requests": str(_REQUESTS)},
    ),
    **{
        f"coverage-{harness}": Part(
            says=f"{harness} with inputs made up by what they reach in the code: FUZZ_SECONDS (1200)",
            arguments=(harness, "--seconds", os.environ.get("FUZZ_SECONDS", "1200")),
            program="tests.wide.coverage_fuzz",
        )
        for harness in HARNESSES
    },
    **{
        f"mutants-{room}": Part(
            says=f"changes of {room} that its own tests should notice: SEED (1), COUNT (20)",
            arguments=(room, "--seed", os.environ.get("SEED", "1"), "--count", os.environ.get("COUNT", "20")),
            program="tests.wide.mutants",
        )
        for room in ROOMS
    },
}


def main() -> int:
    """0 where every part passed."""
    parts = "; ".join(f"{name}: {part.says}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="make test-wide", description=__doc__, epilog=parts)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    chosen = parser.parse_args().parts or list(PARTS)
    return int(any([run(name, PARTS[name]) != 0 for name in chosen]))  # noqa: C419 - each runs, whatever came of the one before


def run(name: str, part: Part) -> int:
    """Run it; the exit status. What is no pytest writes its own record."""
    command = [sys.executable, "-m", part.program, *part.arguments]
    environment = os.environ | part.variables()
    if part.program != "pytest":
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    recorder = Recorder(part=name)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([*command, f"--junit-xml={report}"], cwd=ROOT, env=environment, check=False).returncode
        recorder.write(exit_status=status, found=_counts(report), versions=part.versions())
    return status


def _counts(report: Path) -> dict[str, int]:
    """Of tests by outcome; empty where pytest ended before it wrote any."""
    if not report.exists():
        return {}
    suites = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 - written by our own pytest
    totals = dict.fromkeys(_COUNTS, 0)
    for suite in suites:
        for count in _COUNTS:
            totals[count] += int(suite.get(count, "0"))
    return totals


if __name__ == "__main__":
    sys.exit(main())
