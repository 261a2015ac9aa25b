"""Writes what a benchmark measured to benchmarks/results/NAME.json; docs quote from these files only."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def write_result(
    name: str,
    figures: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    packages: Sequence[str] = (),
    command: str | None = None,
) -> Path:
    """`packages`: distributions whose versions matter to the figures."""
    result = {
        "command": command or f"python -m benchmarks.{name.replace('-', '_')}.run {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "date": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in packages}},
        "figures": dict(figures),
        "rows": [dict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(to_text(result))
    return path


def to_text(result: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that two results can be compared line by line."""
    return _lines(result, 0) + "\n"


def _lines(value: Any, depth: int) -> str:  # noqa: ANN401 - JSON
    inner = " " * (depth + 1)
    if isinstance(value, Mapping) and any(isinstance(one, (Mapping, list)) for one in value.values()):
        items = [f"{inner}{json.dumps(name)}: {_lines(one, depth + 1)}" for name, one in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        return "[\n" + ",\n".join(inner + json.dumps(one) for one in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


def _commit() -> str | None:
    """The checkout that was measured; a plus where it had changes."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    found = subprocess.run(asked, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def describe_machine() -> dict[str, Any]:
    """What a reader needs to compare: processor, cores, memory, and how busy the machine was."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
