from collections.abc import Callable

import pytest

from aimgpu.domain import Device, Grant, Layout, Level, Partition, Priority, Vendor
from aimgpu.units import GIB


def build_device(*, partitions: int = 1, simulated: bool = False, vendor: Vendor = Vendor.NVIDIA) -> Device:
    kind = "whole" if partitions == 1 else "part"
    parts = tuple(
        Partition(
            id=f"gpu0/{kind}-{index}",
            device_id="gpu0",
            index=index,
            kind=kind,
            memory_bytes=80 * GIB // partitions,
            compute_units=304 // partitions,
            uuid=f"GPU-{index}",
            start=index if partitions > 1 and vendor is Vendor.NVIDIA else None,
        )
        for index in range(partitions)
    )
    layout = Layout(name=kind, compute_mode=None, memory_mode=None, partitions=parts)
    return Device(
        id="gpu0",
        index=0,
        vendor=vendor,
        product="TEST-80",
        market_name=None,
        memory_bytes=80 * GIB,
        compute_units=304,
        layout=layout,
        layouts=(layout,),
        simulated=simulated,
    )


def build_grant(device: Device, *, level: Level = Level.NONE, exclusive: bool = False, **changes: object) -> Grant:
    partition = device.layout.partitions[0]
    values: dict[str, object] = {
        "id": "grant-1",
        "instance_id": "chat-0",
        "deployment": "chat",
        "node": "here",
        "device_id": device.id,
        "partition_id": partition.id,
        "memory_bytes": 10 * GIB,
        "compute_ppm": None,
        "priority": Priority.MEDIUM,
        "level": level,
        "exclusive": exclusive,
    }
    return Grant(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_device() -> Callable[..., Device]:
    return build_device


@pytest.fixture
def make_grant() -> Callable[..., Grant]:
    return build_grant
