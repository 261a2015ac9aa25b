"""A GPU as a bar of text: one segment per model, others' processes, and what is free."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from aimgpu.units import format_bytes

_WIDTH = 72
_COLOURS = ("blue", "yellow", "cyan", "magenta", "red", "green", "bright_blue", "bright_magenta")


def draw_gpu(gpu: Mapping[str, Any], *, colour: bool) -> Iterator[str]:
    """A line about the GPU, and its bar; without colour, segments are distinguished by `|`."""
    busy = "" if gpu["utilization_percent"] is None else f", busy {gpu['utilization_percent']}%"
    measured = "" if gpu["measured_bytes"] is None else f", {format_bytes(gpu['measured_bytes'], up=True)} measured"
    title = f"gpu{gpu['index']}  {gpu['name']}  {gpu['layout']}{busy}"
    yield f"{title}: {format_bytes(gpu['granted_bytes'], up=True)} granted{measured}, {format_bytes(gpu['free_bytes'])} free"
    whole = sum(part["memory_bytes"] for part in gpu["partitions"]) or 1
    yield "  [" + "|".join(_draw_partition(part, whole, colour=colour) for part in gpu["partitions"]) + "]"


def _draw_partition(part: Mapping[str, Any], whole: int, *, colour: bool) -> str:
    width: int = max(1, round(_WIDTH * part["memory_bytes"] / whole))
    pieces = [(share["model"], share["memory_bytes"]) for share in part["shares"]]
    if part["foreign_bytes"]:
        pieces.append(("others", part["foreign_bytes"]))
    text, used = "", 0
    for name, size in pieces:
        length = min(width - used, max(1, round(width * size / part["memory_bytes"])))
        if length > 0:
            text += _segment(name, length, colour=colour)
            used += length
    return text + "·" * (width - used)


def _segment(name: str, length: int, *, colour: bool) -> str:
    if colour:
        styled: str = click.style(name[:length].ljust(length), fg="black", bg=_COLOURS[sum(name.encode()) % len(_COLOURS)])
        return styled
    return name[: length - 1].ljust(length - 1, "=") + "|"
