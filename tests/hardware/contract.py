"""What every hardware backend must do, whatever stands behind it. A test module calls these with its own backend."""

from aimgpu.domain import Device
from aimgpu.hardware.protocols import DeviceReader, Hardware, Identifier, UsageReader


def check_reading(reader: DeviceReader) -> tuple[Device, ...]:
    """Ids are unique and stable, the current layout is listed, partitions name their device and fit into it."""
    devices = reader.read_devices()
    assert [device.id for device in reader.read_devices()] == [device.id for device in devices]
    assert len({device.id for device in devices}) == len(devices)
    assert [device.index for device in devices] == list(range(len(devices)))
    for device in devices:
        assert device.layout.name in {layout.name for layout in device.layouts}
        assert len({layout.name for layout in device.layouts}) == len(device.layouts)
        for layout in device.layouts:
            # A driver may keep a part of an unpartitioned device for itself that its partitions then have.
            assert layout.memory_bytes <= device.memory_bytes + (device.reserved_bytes or 0)
            assert len({partition.id for partition in layout.partitions}) == len(layout.partitions)
            for partition in layout.partitions:
                assert partition.device_id == device.id
                assert partition.id == f"{device.id}/{partition.kind}-{partition.index}"
                assert partition.kind == partition.kind.lower()
                assert partition.memory_bytes > 0
        for partition in device.layout.partitions:
            assert device.partition(partition.id) is partition
    return devices


def check_usage(hardware: UsageReader, devices: tuple[Device, ...]) -> None:
    """There is one usage a device, and what it says by partition names partitions that are there."""
    usages = hardware.read_usage()
    assert [usage.device_id for usage in usages] == [device.id for device in devices]
    for usage, device in zip(usages, devices, strict=True):
        known = {partition.id for partition in device.layout.partitions}
        assert set(usage.used_bytes_by_partition) <= known
        assert usage.used_bytes is None or usage.used_bytes >= 0
        assert usage.utilization_percent is None or 0 <= usage.utilization_percent <= 100


def check_identity(identifier: Identifier, devices: tuple[Device, ...]) -> None:
    """Every partition is told apart from every other by what its workload is given."""
    seen = set()
    for device in devices:
        for partition in device.layout.partitions:
            identity = identifier.identify(device, partition)
            assert identity.environment["AIM_PARTITION_ID"] == str(partition.index)
            assert identity.environment["AIM_PARTITION_STABLE_ID"] == partition.id
            assert all(isinstance(value, str) for value in identity.environment.values())
            seen.add(tuple(sorted(identity.environment.items())))
    assert len(seen) == sum(len(device.layout.partitions) for device in devices)


def check_every_layout(hardware: Hardware, device_id: str) -> None:
    """Every layout that is listed can be applied, and what is read back is what the list had foretold."""
    listed = _find(hardware, device_id).layouts
    for layout in listed:
        returned = hardware.apply_layout(device_id, layout.name, reload_driver=True)
        read = _find(hardware, device_id)
        assert returned == read
        assert read.layout.name == layout.name
        assert [(p.id, p.memory_bytes, p.compute_units) for p in read.layout.partitions] == [
            (p.id, p.memory_bytes, p.compute_units) for p in layout.partitions
        ]
        assert {each.name for each in read.layouts} == {each.name for each in listed}


def _find(hardware: DeviceReader, device_id: str) -> Device:
    return next(device for device in hardware.read_devices() if device.id == device_id)
