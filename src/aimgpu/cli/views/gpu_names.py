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
    """For texts about a snapshot; among several nodes each GPU keeps its own name; an id with its node stays."""
    found = [(node.name, state.device) for node, state in snapshot.devices()]
    single = len(snapshot.nodes) == 1
    names = list[tuple[str, str]]()
    for node, device in found:
        short = device.id if device.id.startswith(f"{node}/") else f"gpu{device.index}"
        names.append((f"{node}/{device.id}", short if single or short == device.id else f"{node}/{short}"))
        names.append((device.id, short))
    return _rename(names)


def _rename(names: Iterable[tuple[str, str]]) -> Rename:
    known = dict(names)
    if not known:
        return str
    longest_first = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])")
    return lambda text: pattern.sub(lambda found: known[found[1]], text)
