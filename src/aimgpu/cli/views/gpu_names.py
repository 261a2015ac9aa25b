"""One name for a GPU wherever people read it: `gpu0`, and `gpu0/spx-0` for a partition of it. JSON keeps the exact ids."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aimgpu.domain import Device
    from aimgpu.placement import Snapshot

Rename = Callable[[str], str]


def names_in_status(status: Mapping[str, Any]) -> Rename:
    """For texts of the daemon."""
    return _rename((str(gpu["id"]), f"gpu{gpu['index']}") for gpu in status.get("gpus", ()) if "index" in gpu)


def names_of(devices: "Iterable[Device]") -> Rename:
    """For texts about the GPUs of one machine."""
    return _rename((device.id, f"gpu{device.index}") for device in devices)


def names_in_snapshot(snapshot: "Snapshot") -> Rename:
    """For texts about a snapshot; among several nodes each GPU keeps the name of its own."""
    found = [(node.name, state.device) for node, state in snapshot.devices()]
    single = len(snapshot.nodes) == 1
    names = {f"{node}/{device.id}": f"gpu{device.index}" if single else f"{node}/gpu{device.index}" for node, device in found}
    return _rename([*names.items(), *((device.id, f"gpu{device.index}") for _, device in found)])


def _rename(names: Iterable[tuple[str, str]]) -> Rename:
    known = dict(names)
    if not known:
        return str
    longest_first = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])")
    return lambda text: pattern.sub(lambda found: known[found[1]], text)
