"""GPUs for people and programs: one row a partition, then the processes on them."""

from collections.abc import Mapping
from shutil import get_terminal_size
from typing import Any

import click

from aimgpu.cli.machine_view import Machine
from aimgpu.cli.output import Cell, Column, is_terminal, print_table, table_width
from aimgpu.domain import DeviceUsage, Partition
from aimgpu.placement import DeviceState
from aimgpu.placement.fit import free_bytes
from aimgpu.units import format_bytes

COLUMNS = (
    Column("GPU", fold=False),
    Column("PRODUCT", fold=False),
    Column("LAYOUT", fold=False),
    Column("PARTITION", fold=False),
    Column("UNITS", right=True, fold=False),
    Column("MEMORY", right=True, fold=False),
    Column("GRANTED", right=True, fold=False),
    Column("MEASURED", right=True, fold=False),
    Column("FOREIGN", right=True, fold=False),
    Column("FREE", right=True, fold=False),
    Column("BUSY", right=True, fold=False),
    Column("LEVEL", fold=False),
)


def describe_machine(machine: Machine) -> dict[str, Any]:
    """GPUs and partitions with what is granted, measured and free."""
    return {
        "simulated": machine.simulated,
        "daemon": machine.daemon,
        "stranded": machine.stranded,
        "gpus": [_describe_gpu(state, machine) for state in machine.states],
        "findings": list(machine.findings),
    }


def name_product(gpu: Mapping[str, Any]) -> str:
    """For a narrow column; one that is not a card is named as what it is."""
    note = " (software)" if gpu.get("software") else " (sim)" if gpu["simulated"] else ""
    return f"{gpu['product']}{note}"


def print_machine(machine: Mapping[str, Any]) -> None:
    """The same as a table."""
    gpus = machine["gpus"]
    if machine["simulated"]:
        what = "SOFTWARE" if gpus[0]["software"] else "SIMULATED"
        click.secho(
            f"{what} GPU ({len(gpus)} x {gpus[0]['product']}): nothing here is on real hardware.", fg="yellow", bold=True
        )
    rows = [row for gpu in gpus for row in _rows(gpu)]
    if is_terminal() and table_width(COLUMNS, rows) > get_terminal_size().columns:
        for gpu in gpus:
            _print_narrow(gpu)
    else:
        print_table(COLUMNS, rows)
    _print_processes(gpus)
    for gpu in gpus:
        if gpu["pending_memory_mode"]:
            click.echo(f"gpu{gpu['index']}: {gpu['pending_memory_mode']} was asked for and waits for a driver reload.")
    for finding in machine["findings"]:
        if finding.serious:
            click.secho(f"{finding.text}. {finding.hint or ''}".rstrip(), fg="red")
    click.echo(f"\n{_who_grants(machine)}LEVEL is what a model could get: alone on a partition / sharing it.")


def _who_grants(machine: Mapping[str, Any]) -> str:
    if machine["daemon"]:
        return ""
    if machine["stranded"]:
        left = ", ".join(machine["stranded"])
        return f"No daemon runs, but models of one do ({left}): `aimgpu up` takes them over, `aimgpu down` ends them.\n"
    return "No daemon runs: nothing is granted. "


def _describe_gpu(state: DeviceState, machine: Machine) -> dict[str, Any]:
    device, usage = state.device, machine.usage.get(state.device.id)
    granting = machine.daemon or bool(machine.stranded)
    return {
        "id": device.id,
        "index": device.index,
        "vendor": device.vendor.value,
        "product": device.product,
        "market_name": device.market_name,
        "simulated": device.simulated,
        "software": device.software,
        "layout": device.layout.name,
        "compute_mode": device.layout.compute_mode,
        "memory_mode": device.layout.memory_mode,
        "pending_memory_mode": device.pending_memory_mode,
        "layouts": [layout.name for layout in device.layouts],
        "hive": device.hive,
        "memory_bytes": device.memory_bytes,
        "compute_units": device.compute_units,
        "measured_bytes": usage.used_bytes if usage else None,
        "utilization_percent": usage.utilization_percent if usage else None,
        "partitions": [_describe_partition(part, state, usage, granting=granting) for part in device.layout.partitions],
        "processes": [
            {
                "pid": process.pid,
                "name": process.name,
                "memory_bytes": process.memory_bytes,
                "partition": process.partition_id,
                "instance": machine.owners.get(process.pid),
                "ours": process.pid in machine.owners or process.pid in machine.helpers,
            }
            for process in (usage.processes if usage else ())
        ],
    }


def _describe_partition(part: Partition, state: DeviceState, usage: DeviceUsage | None, *, granting: bool) -> dict[str, Any]:
    granted = sum(grant.memory_bytes for grant in state.grants if grant.partition_id == part.id)
    foreign = state.foreign_on(part)
    alone = len(state.device.layout.partitions) == 1
    measured = usage.used_bytes_by_partition.get(part.id, usage.used_bytes if alone else None) if usage else None
    return {
        "id": part.id,
        "kind": part.kind,
        "memory_bytes": part.memory_bytes,
        "compute_units": part.compute_units,
        "render_node": part.render_node,
        "uuid": part.uuid,
        "granted_bytes": granted if granting else None,
        "measured_bytes": measured,
        "foreign_bytes": foreign,
        "free_bytes": max(0, free_bytes(state, part)),
        "level_alone": state.best_level(part.id, exclusive=True).value,
        "level_shared": state.best_level(part.id, exclusive=False).value,
    }


def _rows(gpu: Mapping[str, Any]) -> list[list[str | Cell]]:
    busy = gpu["utilization_percent"]
    first = [
        f"gpu{gpu['index']}",
        name_product(gpu),
        str(gpu["layout"]),
    ]
    rows: list[list[str | Cell]] = []
    for number, part in enumerate(gpu["partitions"]):
        rows.append(
            [
                *(first if number == 0 else ["", "", ""]),
                str(part["id"]).rpartition("/")[2],
                str(part["compute_units"] or "-"),
                format_bytes(part["memory_bytes"]),
                _size(part["granted_bytes"]),
                _size(part["measured_bytes"]),
                Cell(_size(part["foreign_bytes"]), "red") if part["foreign_bytes"] else "-",
                format_bytes(part["free_bytes"]),
                f"{busy}%" if busy is not None and number == 0 else "-" if number == 0 else "",
                f"{part['level_alone']} / {part['level_shared']}",
            ]
        )
    return rows or [[*first, "none", *["-"] * (len(COLUMNS) - len(first) - 1)]]  # MIG is on and nothing is made yet


def _print_narrow(gpu: Mapping[str, Any]) -> None:
    """What all partitions have in common stands above them, so that the table fits a narrow terminal."""
    rows = _rows(gpu)
    levels = dict.fromkeys(str(row[-1]) for row in rows)
    busy = "" if gpu["utilization_percent"] is None else f"  {gpu['utilization_percent']}% busy"
    click.secho("  ".join(str(cell) for cell in rows[0][:3]) + f"{busy}  level: {', '.join(levels)}", bold=True)
    print_table(COLUMNS[3:-2], [row[3:-2] for row in rows])


def _print_processes(gpus: list[Mapping[str, Any]]) -> None:
    rows = [
        (
            str(process["pid"]),
            str(process["name"] or "-"),
            f"gpu{gpu['index']}" + (f"/{str(process['partition']).rpartition('/')[2]}" if process["partition"] else ""),
            _size(process["memory_bytes"]),
            str(process["instance"] or ("ours" if process["ours"] else "foreign")),
        )
        for gpu in gpus
        for process in gpu["processes"]
    ]
    if rows:
        click.echo()
        columns = (Column("PID", right=True), "PROCESS", "GPU/PARTITION", Column("MEMORY", right=True), "WHOSE")
        print_table(columns, rows)


def _size(count: int | None) -> str:
    """Of what is granted or in use."""
    return "-" if count is None else format_bytes(count, up=True)
