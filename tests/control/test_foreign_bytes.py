"""What is in use by someone else, as the device tells it: by process, in sum, or not at all."""

from dataclasses import replace

from aimgpu.control.snapshots import foreign_bytes
from aimgpu.control.unattributed_memory import UnattributedMemory
from aimgpu.domain import Device, DeviceUsage, ForeignProcess, Grant, Level, Priority
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement.snapshot import UNKNOWN_PARTITION
from aimgpu.units import GIB, MIB

OURS, STRANGER = 11, 22


def device(part: str = "MI300X", layout: str | None = None) -> Device:
    machine = SimulatedHardware([(part, 1)])
    (found,) = machine.read_devices()
    return machine.apply_layout(found.id, layout) if layout else found


def process(pid: int, size: int | None, partition: str | None) -> ForeignProcess:
    return ForeignProcess(pid=pid, name="x", memory_bytes=size, partition_id=partition)


def usage(of: Device, used: int | None, *processes: ForeignProcess, measured: bool = False) -> DeviceUsage:
    """`measured`: the device tells the use of each partition; else it is the sum of processes, as on AMD."""
    by_partition = {
        part.id: sum(item.memory_bytes or 0 for item in processes if item.partition_id == part.id)
        for part in of.layout.partitions
    }
    if measured and used is not None:
        by_partition = {of.layout.partitions[0].id: used}
    return DeviceUsage(
        device_id=of.id, used_bytes=used, used_bytes_by_partition=by_partition, utilization_percent=None, processes=processes
    )


def grant(of: Device, size: int) -> Grant:
    return Grant(
        id="chat/0",
        instance_id="chat",
        deployment="chat",
        node="here",
        device_id=of.id,
        partition_id=of.layout.partitions[0].id,
        memory_bytes=size,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )


def foreign(of: Device, seen: DeviceUsage, *grants: Grant) -> dict[str, int]:
    return dict(foreign_bytes(of, seen, grants, frozenset({OURS})))


def test_what_a_stranger_holds_is_counted_where_it_is() -> None:
    gpu = device(layout="CPX")
    third = gpu.layout.partitions[2].id
    assert foreign(gpu, usage(gpu, 5 * GIB, process(STRANGER, 5 * GIB, third))) == {third: 5 * GIB}


def test_what_a_driver_needs_for_itself_is_nobodys() -> None:
    gpu = device()
    whole = gpu.layout.partitions[0].id
    assert foreign(gpu, usage(gpu, 297 * MIB)) == {}
    assert foreign(gpu, usage(gpu, 10 * GIB + 297 * MIB, process(OURS, 10 * GIB, whole)), grant(gpu, 12 * GIB)) == {}


def test_memory_that_no_visible_process_explains_is_in_use_all_the_same() -> None:
    """Another container's process, or one of the graphics driver: seen in the sum only."""
    amd, cut, nvidia = device(), device(layout="CPX"), device("H200-141")
    assert foreign(amd, usage(amd, 50 * GIB)) == {UNKNOWN_PARTITION: 50 * GIB}
    assert foreign(cut, usage(cut, 50 * GIB)) == {UNKNOWN_PARTITION: 50 * GIB}
    whole = nvidia.layout.partitions[0].id
    assert foreign(nvidia, usage(nvidia, 50 * GIB, measured=True)) == {whole: 50 * GIB}


def test_what_explains_the_use_of_a_partition_explains_nothing_of_the_rest_of_the_device() -> None:
    """Our engine cannot be seen and fills what it was granted; outside of all partitions there is a stranger."""
    gpu = device("H200-141")
    seen = replace(usage(gpu, 10 * GIB, measured=True), used_bytes=40 * GIB)
    assert foreign(gpu, seen, grant(gpu, 10 * GIB)) == {UNKNOWN_PARTITION: 30 * GIB}
    assert foreign(gpu, seen, grant(gpu, 16 * GIB)) == {UNKNOWN_PARTITION: 24 * GIB}, "6 GiB of the grant may be there"


def test_our_own_use_explains_what_it_is_and_not_what_was_granted() -> None:
    gpu = device("H200-141")
    whole = gpu.layout.partitions[0].id
    loading = usage(gpu, 55 * GIB, process(OURS, 5 * GIB, whole), measured=True)
    assert foreign(gpu, loading, grant(gpu, 20 * GIB)) == {whole: 50 * GIB}
    unknown = usage(gpu, 55 * GIB, process(OURS, None, whole), measured=True)
    assert foreign(gpu, unknown, grant(gpu, 20 * GIB)) == {whole: 35 * GIB}


def test_our_own_use_that_cannot_be_seen_is_not_counted_twice() -> None:
    """In a container without the host's process ids."""
    amd, nvidia = device(), device("H200-141")
    assert foreign(amd, usage(amd, 20 * GIB), grant(amd, 20 * GIB)) == {}
    assert foreign(nvidia, usage(nvidia, 20 * GIB, measured=True), grant(nvidia, 20 * GIB)) == {}
    whole = nvidia.layout.partitions[0].id
    assert foreign(nvidia, usage(nvidia, 50 * GIB, measured=True), grant(nvidia, 20 * GIB)) == {whole: 30 * GIB}


def test_what_was_in_use_before_a_grant_is_not_explained_by_it() -> None:
    """In a container, or while an engine has not opened the GPU yet."""
    for gpu, measured in ((device(), False), (device(layout="CPX"), False), (device("H200-141"), True)):
        place = gpu.layout.partitions[0].id if measured else UNKNOWN_PARTITION
        known = UnattributedMemory()

        def theirs(
            used: int, *grants: Grant, gpu: Device = gpu, measured: bool = measured, known: UnattributedMemory = known
        ) -> int:
            seen = usage(gpu, used * GIB, measured=measured)
            return sum(foreign_bytes(gpu, seen, grants, frozenset({OURS}), known).values()) // GIB

        assert theirs(50) == 50, place
        assert theirs(50, grant(gpu, 20 * GIB)) == 50  # nothing of ours is loaded yet
        assert theirs(68, grant(gpu, 20 * GIB)) == 50  # now it is
        assert theirs(78, grant(gpu, 20 * GIB)) == 58  # more than both
        assert theirs(20, grant(gpu, 20 * GIB)) == 20  # whoever it was, it is in use
        assert theirs(0, grant(gpu, 20 * GIB)) == 0
        assert theirs(20, grant(gpu, 20 * GIB)) == 0


def test_a_stranger_and_unattributed_memory_add_up() -> None:
    gpu = device("H200-141")
    whole = gpu.layout.partitions[0].id
    seen = usage(gpu, 60 * GIB, process(STRANGER, 10 * GIB, whole), measured=True)
    assert foreign(gpu, seen) == {whole: 60 * GIB}


def test_nothing_measured_is_nothing_known() -> None:
    gpu = device()
    assert foreign(gpu, usage(gpu, None)) == {}
    assert foreign_bytes(gpu, None, (), frozenset()) == {}
