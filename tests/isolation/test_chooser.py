from collections.abc import Callable
from dataclasses import replace

import pytest

from aimgpu.domain import Device, Grant, Level, Partition, Vendor
from aimgpu.errors import NotAllowed
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.protocols import Enforcement, Isolator, Offer

MakeDevice = Callable[..., Device]
MakeGrant = Callable[..., Grant]


class RecordingMechanism:
    """A mechanism that gives what it is told and remembers what was asked of it."""

    def __init__(self, name: str, level: Level | None, *, gives: Level | None = None) -> None:
        self.name = name
        self._level = level
        self._gives = gives
        self.enforced: list[str] = []
        self.released: list[str] = []

    def offer(self, device: Device, partition: Partition, *, exclusive: bool) -> Offer:
        del device, partition, exclusive
        return Offer(level=self._level, reason=None if self._level else f"{self.name} is not here")

    def enforce(self, grant: Grant, device: Device, partition: Partition) -> Enforcement:
        del device, partition
        self.enforced.append(grant.id)
        return Enforcement(level=self._gives or self._level or Level.NONE, mechanism=self.name)

    def release(self, grant: Grant) -> None:
        self.released.append(grant.id)


def test_an_exclusive_partition_of_a_real_device_is_hardware(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device(partitions=8, vendor=Vendor.AMD)
    chooser: Isolator = MechanismChooser()
    got = chooser.enforce(make_grant(device, exclusive=True), device, device.layout.partitions[0])
    assert (got.level, got.mechanism) == (Level.HARDWARE, "partition")
    levels = chooser.available_levels(device, device.layout.partitions[0], exclusive=True)
    assert levels == {Level.HARDWARE, Level.ADVISORY, Level.NONE}


def test_a_partition_whose_neighbours_may_take_its_memory_is_not_hardware(make_device: MakeDevice) -> None:
    device = make_device(partitions=8, vendor=Vendor.AMD)
    partition = replace(device.layout.partitions[0], capped=False)
    assert Level.HARDWARE not in MechanismChooser().available_levels(device, partition, exclusive=True)


@pytest.mark.parametrize(("partitions", "mechanism"), [(1, "device"), (7, "mig")])
def test_the_boundary_is_named_for_what_it_is(
    make_device: MakeDevice, make_grant: MakeGrant, partitions: int, mechanism: str
) -> None:
    device = make_device(partitions=partitions)
    got = MechanismChooser().enforce(make_grant(device, exclusive=True), device, device.layout.partitions[0])
    assert got.mechanism == mechanism


def test_a_shared_partition_with_only_engine_flags_is_advisory(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    got = MechanismChooser().enforce(make_grant(device), device, device.layout.partitions[0])
    assert (got.level, got.mechanism) == (Level.ADVISORY, "engine flag")


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_simulated_device_never_gives_more_than_none(
    make_device: MakeDevice, make_grant: MakeGrant, *, exclusive: bool
) -> None:
    device = make_device(simulated=True, partitions=8)
    partition = device.layout.partitions[0]
    assert MechanismChooser().available_levels(device, partition, exclusive=exclusive) == {Level.NONE}
    assert MechanismChooser().enforce(make_grant(device, exclusive=exclusive), device, partition).level is Level.NONE


def test_less_than_promised_is_refused_with_every_mechanisms_reason(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    chooser = MechanismChooser([HardwareBoundary(), RecordingMechanism("mps", None), EngineFlags()])
    with pytest.raises(NotAllowed, match="mps is not here") as refused:
        chooser.enforce(make_grant(device, level=Level.RUNTIME), device, device.layout.partitions[0])
    assert "advisory at most" in refused.value.message
    assert refused.value.hint


def test_a_mechanism_that_gives_less_than_it_offered_is_undone(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    liar = RecordingMechanism("mps", Level.DRIVER, gives=Level.ADVISORY)
    with pytest.raises(NotAllowed):
        MechanismChooser([liar]).enforce(make_grant(device, level=Level.RUNTIME), device, device.layout.partitions[0])
    assert liar.released == ["grant-1"]


def test_the_strongest_wins_and_the_earlier_of_equals(make_device: MakeDevice, make_grant: MakeGrant) -> None:
    device = make_device()
    weak, first, second = (
        RecordingMechanism("interposer", Level.RUNTIME),
        RecordingMechanism("dmem", Level.DRIVER),
        RecordingMechanism("mps", Level.DRIVER),
    )
    chooser = MechanismChooser([weak, first, second])
    grant = make_grant(device)
    assert chooser.enforce(grant, device, device.layout.partitions[0]).mechanism == "dmem"
    assert (weak.enforced, first.enforced, second.enforced) == ([], ["grant-1"], [])
    chooser.release(grant)
    chooser.release(grant)
    assert second.released == ["grant-1", "grant-1"]
