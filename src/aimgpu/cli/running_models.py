"""Models that run: their names for the shell, asked from the daemon, and those that a killed daemon left."""

from collections.abc import Mapping
from typing import Any

import click

from aimgpu.cli.client import DaemonClient, connect
from aimgpu.errors import AimGpuError, DaemonUnreachable
from aimgpu.home import Home, find_home


def complete_running(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of models that run, for the shell."""
    try:
        instances = connect(find_home()).read_status().get("instances", [])
    except AimGpuError:
        return []
    return sorted({str(item["name"]) for item in instances if str(item["name"]).startswith(incomplete)})


def deployed_names(status: Mapping[str, Any]) -> set[str]:
    """Models that should run or do: also those that wait for room, and those that are being stopped."""
    return {str(item["name"]) for key in ("deployments", "instances", "waiting") for item in status.get(key, ())}


def connect_or_name_left(home: Home) -> DaemonClient:
    """The daemon. Without one, the models that a killed one left running are named, with what to do about them."""
    try:
        return connect(home)
    except DaemonUnreachable:
        check_none_left(home)
        raise


def check_none_left(home: Home, how_to_plan: str = "") -> None:
    """Raises DaemonUnreachable, with what to do, where a daemon was killed and models of it still run."""
    from aimgpu.wiring import make_launchers  # noqa: PLC0415 -- a third of a second, for a daemon that was killed

    left = {instance_id for launcher in make_launchers(home).values() for instance_id in launcher.find_started()}
    if left:
        raise DaemonUnreachable(
            f"no daemon runs, but these models still do: {', '.join(sorted(left))}",
            hint=f"`aimgpu down` stops them, `aimgpu up` with their stack takes them over.{how_to_plan}",
        )
