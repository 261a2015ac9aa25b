"""Seats: devices that stand for "a pod that KAI placed here". Pure."""

from collections.abc import Sequence
from typing import Any

from aimgpu.domain import Device
from aimgpu.kubernetes.api.quantities import format_quantity
from aimgpu.kubernetes.vocabulary import names

SEATS_PER_NODE = 64  # pods with a part of a GPU; one slice holds this many devices
_PREFIX = "kai-"


def is_seat(device: str) -> bool:
    """Whether a device of an allocation is a seat."""
    return device.startswith(_PREFIX) and device.removeprefix(_PREFIX).isdecimal()


def build_seat_slices(devices: Sequence[Device], node: str) -> list[dict[str, Any]]:
    """One slice of plain devices: KAI 0.12 allocates neither capacity nor counters. A node without GPUs has no seats."""
    seats = [_seat(number, devices) for number in range(SEATS_PER_NODE)] if devices else []
    return [{"driver": names.DRIVER, "nodeName": node, "devices": seats}]


def _seat(number: int, devices: Sequence[Device]) -> dict[str, Any]:
    smallest = min(devices, key=lambda device: device.memory_bytes)
    attributes = {
        names.TYPE: {"string": names.TYPE_SEAT},
        "productName": {"string": smallest.product},
        "current": {"bool": True},
    }
    # What a fraction is a fraction of, for admission; KAI does not look at it.
    capacity = {names.MEMORY: {"value": format_quantity(smallest.memory_bytes)}}
    return {"name": f"{_PREFIX}{number}", "attributes": attributes, "capacity": capacity}
