"""Completion of the names of running models, asked from the daemon; silent where there is none."""

import click

from aimgpu.cli.client import connect
from aimgpu.errors import AimGpuError
from aimgpu.home import find_home


def complete_running(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of models that run, for the shell."""
    try:
        instances = connect(find_home()).read_status().get("instances", [])
    except AimGpuError:
        return []
    return sorted({str(item["name"]) for item in instances if str(item["name"]).startswith(incomplete)})
