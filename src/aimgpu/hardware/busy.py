"""The error for processes that keep a layout from being changed."""

from collections.abc import Mapping

from aimgpu.errors import PartitionBusy


def processes_in_the_way(device_id: str, layout: str, processes: Mapping[int, str | None]) -> PartitionBusy:
    """`processes`: names by pid, of those that are not managed here."""
    names = ", ".join(f"pid {pid} ({name})" if name else f"pid {pid}" for pid, name in processes.items())
    return PartitionBusy(
        f"cannot set {layout} on {device_id}: {names} in the way",
        hint="They were not started by aimgpu: stop them, then try again. Nothing was changed.",
    )
