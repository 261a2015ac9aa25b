"""Scenario files: a topology and Asks in, the decision out.

A file says its `rule`, the `nodes` with their `gpus` and grants, the `asks`, and what to `expect`. With `limits` the Asks are
planned (moves, stops, layouts) instead of decided one by one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from aimgpu.domain import (
    Ask,
    Auto,
    Device,
    Fraction,
    Grant,
    IsolationRequirement,
    Level,
    Memory,
    PartitionKind,
    Priority,
    Spread,
    Want,
    Whole,
)
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.capacity.capacity import device_named
from aimgpu.placement.preemption.eviction_sets import Limits
from aimgpu.placement.scoring.mix import Mix
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.units import parse_bytes, parse_ppm

FOLDER = Path(__file__).with_name("scenarios")
ALL = frozenset(Level)
SHARED = frozenset({Level.RUNTIME, Level.ADVISORY, Level.NONE})


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def snapshot_of(scenario: Mapping[str, Any]) -> Snapshot:
    running: dict[str, Ask] = {}
    nodes = tuple(_node(node, running) for node in scenario["nodes"])
    return Snapshot(nodes=nodes, running=running, recent_preemptions=scenario.get("recent_preemptions", 0))


def asks_of(scenario: Mapping[str, Any]) -> list[Ask]:
    return [_ask(each) for each in scenario["asks"]]


def mix_of(scenario: Mapping[str, Any]) -> Mix | None:
    if "mix" not in scenario:
        return None
    return Mix.of(_ask({"name": "m", **each}) for each in scenario["mix"] for _ in range(each.get("count", 1)))


def limits_of(scenario: Mapping[str, Any]) -> Limits | None:
    return Limits(**scenario["limits"]) if "limits" in scenario else None


def _node(node: Mapping[str, Any], running: dict[str, Ask]) -> NodeState:
    name = node["name"]
    states = tuple(_state(gpu, name, running) for gpu in node["gpus"])
    return NodeState(
        name=name,
        devices=states,
        cpu_millis=node["cpu"] * 1000 if "cpu" in node else None,
        host_memory_bytes=parse_bytes(node["host_memory"]) if "host_memory" in node else None,
    )


def _state(gpu: Mapping[str, Any], node: str, running: dict[str, Ask]) -> DeviceState:
    device = _device(gpu)
    ids = [partition.id for layout in device.layouts for partition in layout.partitions]
    shared = frozenset(map(Level, gpu["shared_levels"])) if "shared_levels" in gpu else SHARED
    alone = frozenset(map(Level, gpu["alone_levels"])) if "alone_levels" in gpu else ALL
    foreign = {
        UNKNOWN_PARTITION if where == "unknown" else f"{device.id}/{where}": parse_bytes(size)
        for where, size in gpu.get("foreign", {}).items()
    }
    return DeviceState(
        device=device,
        grants=tuple(_grant(each, device, node, running) for each in gpu.get("grants", ())),
        foreign_bytes=foreign,
        shared_levels=dict.fromkeys(ids, shared),
        exclusive_levels=dict.fromkeys(ids, alone),
    )


def _device(gpu: Mapping[str, Any]) -> Device:
    found = SimulatedHardware([(gpu.get("product", "MI300X"), 1)]).read_devices()[0]
    device = device_named(found, gpu["id"], 0)
    layout = next(each for each in device.layouts if each.name == gpu.get("layout", device.layout.name))
    return replace(device, layout=layout, hive=gpu.get("hive"), simulated=False)


def _grant(each: Mapping[str, Any], device: Device, node: str, running: dict[str, Ask]) -> Grant:
    partition = f"{device.id}/{each['at']}" if "at" in each else device.layout.partitions[0].id
    priority = Priority(each.get("priority", "medium"))
    ppm = parse_ppm(each["compute"]) if "compute" in each else None
    exclusive = each.get("alone", False)
    size = next((part.memory_bytes for part in device.layout.partitions if part.id == partition), 0)
    memory = size if exclusive else parse_bytes(each["memory"])
    name, deployment = each["name"], each.get("deployment", each["name"])
    if not each.get("unknown", False):
        running[name] = Ask(
            name=name,
            deployment=deployment,
            want=Memory(memory_bytes=parse_bytes(each["memory"])),
            priority=priority,
            compute_ppm=ppm,
            pinned=each.get("pinned", False),
            isolation=IsolationRequirement.HARDWARE if exclusive else IsolationRequirement.NONE,
        )
    return Grant(
        id=f"{name}#0",
        instance_id=name,
        deployment=deployment,
        node=node,
        device_id=device.id,
        partition_id=partition,
        memory_bytes=memory,
        compute_ppm=ppm,
        priority=priority,
        level=Level.RUNTIME,
        exclusive=exclusive,
    )


def _ask(each: Mapping[str, Any]) -> Ask:
    return Ask(
        name=each["name"],
        deployment=each.get("deployment"),
        want=_want(each),
        footprint_bytes=parse_bytes(each["needs"]) if "needs" in each else None,
        least_bytes=parse_bytes(each["least"]) if "least" in each else None,
        divided=tuple((int(count), parse_bytes(size)) for count, size in each.get("divided", {}).items()),
        devices=each.get("devices", 1),
        compute_ppm=parse_ppm(each["compute"]) if "compute" in each else None,
        isolation=IsolationRequirement(each.get("isolation", "none")),
        priority=Priority(each.get("priority", "medium")),
        products=frozenset(each.get("products", ())),
        refused_products=frozenset(each.get("refused_products", ())),
        vendor=each.get("vendor"),
        refused_vendor=each.get("refused_vendor"),
        partition_id=each.get("at"),
        spread=Spread(each.get("spread", "pack")),
        with_deployments=frozenset(each.get("with", ())),
        not_with_deployments=frozenset(each.get("not_with", ())),
        cpu_millis=each.get("cpu", 0) * 1000,
        host_memory_bytes=parse_bytes(each["host_memory"]) if "host_memory" in each else 0,
        pinned=each.get("pinned", False),
    )


def _want(each: Mapping[str, Any]) -> Want:
    if "memory" in each:
        return Memory(memory_bytes=parse_bytes(each["memory"]))
    if "fraction" in each:
        return Fraction(ppm=parse_ppm(str(each["fraction"])))
    if "partition" in each:
        return PartitionKind(kind=each["partition"])
    if "whole" in each:
        return Whole(count=each["whole"])
    return Auto()
