"""Staying beside a daemon until it ends or is interrupted."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aimgpu.cli.daemon_process import RunningDaemon, has_ended
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.errors import DaemonUnreachable

if TYPE_CHECKING:
    import subprocess

_LOOK_SECONDS = 2.0
_POLL_SECONDS = 0.05


def wait_and_tell(daemon: RunningDaemon, status: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Until the daemon ends; a model that fails or comes back after this status gets a line."""
    states = read_states(status)
    while not _ended(daemon.process):
        with suppress(DaemonUnreachable):  # it may be ending just now: the next look at the process shows it
            now = read_states(daemon.client.read_status())
            for name, state in now.items():
                if states.get(name) != state:
                    say(f"{name}: {state}")
            states = now
    if daemon.process.returncode != 0:
        raise DaemonUnreachable(
            f"the daemon ended with status {daemon.process.returncode}; its models may still run",
            hint=f"`aimgpu up` takes them over, `aimgpu down` stops them. Its log is {daemon.log_file}.",
        )
    left = ProcessLauncher(daemon.log_file.parent).find_started()  # by a daemon that got a signal, not by `aimgpu down`
    say("The daemon ended, its models go on: `aimgpu up` takes them over, `aimgpu down` stops them." if left else "Stopped.")


def read_states(status: Mapping[str, Any]) -> dict[str, str]:
    """By model (and replica, from the second on): its state, with the reason where there is one."""
    states = {}
    for item in status.get("instances", []):
        name = f"{item['name']}#{item['replica']}" if item.get("replica") else str(item["name"])
        reason = item.get("reason")
        states[name] = f"{item['state']}: {reason}" if reason else str(item["state"])
    return states | {str(item["name"]): f"queued: {item['reason']}" for item in status.get("waiting", ())}


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + _LOOK_SECONDS
    while not (ended := has_ended(process)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return ended
