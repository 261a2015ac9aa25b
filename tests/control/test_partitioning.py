"""What a change of layout would stop, decided before anything is stopped."""

from dataclasses import replace

from aimgpu.control.plan.layout import Occupants, find_layout_change
from aimgpu.domain import Ask, Auto, DeviceUsage, ForeignProcess, Grant, Level, Priority
from aimgpu.domain.layouts import find_layout
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.units import GIB


def test_a_mig_neighbour_that_stays_is_not_stopped() -> None:
    (device,) = SimulatedHardware([("H200-141", 1)]).read_devices()
    layout = find_layout(device, "3g.71gb@0+3g.71gb@4")
    device = replace(device, layout=layout)
    grants = tuple(grant_on(part.id, device.id, f"model-{part.start}") for part in layout.partitions)
    snapshot = Snapshot(nodes=(NodeState(name="here", devices=(DeviceState(device=device, grants=grants),)),))
    change = find_layout_change(snapshot, device.id, "3g.71gb@0+2g.35gb@4")
    assert change.stops == ("model-4",)
    assert change.idle == (layout.partitions[1].id,)


def test_what_comes_back_is_decided_on_a_layout_that_is_made_to_order() -> None:
    """Not on the one that is there: "1g.18gb+me@0" is in no list, and 40 GiB do not fit into it."""
    (device,) = SimulatedHardware([("H200-141", 1)]).read_devices()
    grant = replace(grant_on(device.layout.partitions[0].id, device.id, "chat"), memory_bytes=40 * GIB)
    node = NodeState(name="here", devices=(DeviceState(device=device, grants=(grant,)),))
    change = find_layout_change(
        Snapshot(nodes=(node,), running={"chat": Ask(name="chat", want=Auto())}), device.id, "1g.18gb+me"
    )
    assert (change.after, change.stops, change.returns) == ("1g.18gb+me@0", ("chat",), ())
    assert [refusal.ask for refusal in change.does_not_fit] == ["chat"]


def test_a_driver_reload_stops_what_runs_on_every_gpu_of_the_driver() -> None:
    machine = SimulatedHardware([("MI300X", 1), ("MI325X", 1), ("H200-141", 1)])
    states = tuple(
        DeviceState(device=device, grants=(grant_on(device.layout.partitions[0].id, device.id, f"on-{device.product}"),))
        for device in machine.read_devices()
    )
    change = find_layout_change(Snapshot(nodes=(NodeState(name="here", devices=states),)), "0", "CPX/NPS4")
    assert set(change.stops) == {"on-MI300X", "on-MI325X"}
    assert change.devices == ("sim-mi300x-0",)


def test_an_instance_that_holds_a_gpu_it_was_not_granted_stops_too() -> None:
    """A ROCm process holds every GPU that it can see."""
    first, second = SimulatedHardware([("MI300X", 2)]).read_devices()
    grants = (grant_on(first.layout.partitions[0].id, first.id, "elsewhere"),)
    states = (DeviceState(device=first, grants=grants), DeviceState(device=second))
    snapshot = Snapshot(nodes=(NodeState(name="here", devices=states),))
    assert find_layout_change(snapshot, second.id, "CPX").stops == ()
    seen = DeviceUsage(
        device_id=second.id,
        used_bytes=None,
        used_bytes_by_partition={},
        utilization_percent=None,
        processes=(ForeignProcess(pid=7, name="engine", memory_bytes=None),),
    )
    occupants = Occupants(usage=(seen,), owners={7: "elsewhere"})
    assert find_layout_change(snapshot, second.id, "CPX", occupants).stops == ("elsewhere",)


def grant_on(partition_id: str, device_id: str, instance_id: str) -> Grant:
    return Grant(
        id=f"{instance_id}/0",
        instance_id=instance_id,
        deployment=instance_id,
        node="here",
        device_id=device_id,
        partition_id=partition_id,
        memory_bytes=GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )
