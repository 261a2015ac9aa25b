"""Layouts and changes of layout, for people and programs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from aimgpu.cli.output import Cell, Column, print_table
from aimgpu.cli.views.gpu_names import Rename
from aimgpu.domain import Device, Layout, Vendor
from aimgpu.domain.layouts import find_layout
from aimgpu.errors import UnknownLayout
from aimgpu.units import format_bytes


def describe_layouts(device: Device) -> dict[str, Any]:
    """The layouts of a GPU as JSON."""
    return {
        "id": device.id,
        "index": device.index,
        "product": device.product,
        "simulated": device.simulated,
        "software": device.software,
        "layout": device.layout.name,
        "layouts": [
            {
                "name": layout.name,
                "current": layout.name == device.layout.name,
                "needs_reload": layout.memory_mode != device.layout.memory_mode,
                **_describe_layout(device, layout),
            }
            for layout in device.layouts
        ],
        "profiles": [
            {
                "kind": profile.kind,
                "starts": list(profile.starts),
                "at_most": profile.at_most,
                "memory_bytes": profile.memory_bytes,
                "compute_units": profile.compute_units,
            }
            for profile in device.profiles
        ],
    }


def describe_step(device: Device, before: str, after: str) -> dict[str, Any]:
    """The partitions that go and those that come."""
    return {
        "partitions_before": _describe_named(device, before),
        "partitions_after": _describe_named(device, after),
    }


def print_layouts(gpus: Sequence[Mapping[str, Any]], *, every: bool) -> None:
    """The same as a table."""
    rows: list[list[str | Cell]] = []
    for gpu in gpus:
        shown = gpu["layouts"] if every else _distinct(gpu["layouts"])
        for number, layout in enumerate(shown):
            name = (
                f"{gpu['product']} ({'software' if gpu.get('software') else 'sim'})"
                if gpu["simulated"]
                else str(gpu["product"])
            )
            note = Cell("now", "green") if layout["current"] else "driver reload" if layout["needs_reload"] else ""
            first = [f"gpu{gpu['index']}", name] if number == 0 else ["", ""]
            rows.append([*first, str(layout["name"]), str(layout["what"]), note])
        if len(shown) < len(gpu["layouts"]):
            hidden = len(gpu["layouts"]) - len(shown)
            rows.append(["", "", f"and {hidden} that only begin elsewhere: --all", "", ""])
    print_table([Column("GPU", fold=False), Column("PRODUCT", fold=False), "LAYOUT", "PARTITIONS", ""], rows)
    for gpu in gpus:
        if gpu["profiles"]:
            kinds = ", ".join(profile["kind"] for profile in gpu["profiles"])
            click.echo(f"gpu{gpu['index']}: any set of these that fits can be asked for too, with or without @start: {kinds}.")


def print_change(change: Mapping[str, Any], rename: Rename) -> None:
    """What a change would stop and bring back."""
    note = " (simulated)" if change["simulated"] else ""
    if change["before"] == change["after"]:
        click.echo(f"Nothing to do: {rename(change['device'])}{note} is {change['after']}.")
        return
    click.echo(f"{rename(change['device'])}{note}: {change['before']} -> {change['after']}")
    for word, key in (("Removes", "partitions_before"), ("Creates", "partitions_after")):
        if change[key] is not None:
            click.echo(f"{word}: {change[key]['what']}.")
    others = [rename(device) for device in change["devices"] if device != change["device"]]
    if others:
        click.echo(f"The memory mode goes to the whole hive, so these change too: {', '.join(others)}.")
    if change["needs_reload"]:
        click.echo("Needs a driver reload, which stops all GPU work on this machine: pass --reload-driver.")
    click.echo(f"Stops: {', '.join(change['stops']) or 'nothing of ours'}.")
    if change["stops"]:
        click.echo(f"Starts again afterwards: {', '.join(change['returns']) or 'nothing'}.")
    for lost in change["does_not_fit"]:
        click.secho(f"Stays stopped: {rename(lost['why'])}", fg="yellow")
    for process in change["in_the_way"]:
        name = f" ({process['name']})" if process["name"] else ""
        why = f"of {process['instance']}, whose daemon is gone" if process["instance"] else "and not ours to stop"
        click.secho(f"In the way, {why}: pid {process['pid']}{name}", fg="red")


def print_changed(before: Device, after: Device) -> None:
    """What a change came to."""
    name = f"gpu{after.index} ({'simulated ' if after.simulated else ''}{after.product})"
    if before.layout.name == after.layout.name:
        click.echo(f"{name}: is {after.layout.name}; nothing to do.")
    else:
        click.echo(f"{name}: {before.layout.name} -> {after.layout.name}, as read back.")


def _describe_named(device: Device, name: str) -> dict[str, Any] | None:
    """None for a layout that cannot be predicted, such as one with a divided instance."""
    if name == device.layout.name:
        return _describe_layout(device, device.layout)
    try:
        return _describe_layout(device, find_layout(device, name))
    except UnknownLayout:
        return None


def _describe_layout(device: Device, layout: Layout) -> dict[str, Any]:
    return {
        "partitions": [
            {"kind": part.kind, "memory_bytes": part.memory_bytes, "compute_units": part.compute_units}
            for part in layout.partitions
        ],
        "what": _what(layout, "CU" if device.vendor is Vendor.AMD else "SM"),
    }


def _distinct(layouts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One of those with the same partitions; the current one stands for its like."""
    found: dict[tuple[str, object], Mapping[str, Any]] = {}
    for layout in layouts:
        same = (layout["what"], layout["name"].partition("@")[1] or layout["name"])
        if same not in found or layout["current"]:
            found[same] = layout
    return list(found.values())


def _what(layout: Layout, unit: str) -> str:
    """Such as "6 x 24GiB 38 CU, 2 x 23.9GiB 38 CU"."""
    if not layout.partitions:
        return "known once it is in effect"
    same = Counter((part.kind, part.memory_bytes, part.compute_units) for part in layout.partitions)
    return ", ".join(
        f"{count} x {format_bytes(size)}" + (f" {units} {unit}" if units is not None else "")
        for (_, size, units), count in sorted(same.items(), key=lambda item: (-item[0][1], item[0][0]))
    )
