"""Random worlds and Asks."""

from dataclasses import replace

from hypothesis import strategies as st
from tests.placement.worlds import mi300x

from aimgpu.domain import (
    Ask,
    Auto,
    Fraction,
    Grant,
    IsolationRequirement,
    Level,
    Memory,
    PartitionKind,
    Priority,
    Spread,
    Vendor,
    Whole,
)
from aimgpu.placement import DeviceState, NodeState, Snapshot

_LEVELS = (frozenset[Level](), frozenset({Level.NONE}), frozenset({Level.RUNTIME}), frozenset({Level.HARDWARE, Level.NONE}))
_NAMES = ("a", "b", "c", "d")
_TOTALS = (800, 1600, 8 * 1001, 206141652992)


@st.composite
def device_states(draw: st.DrawFn, node: str, index: int) -> DeviceState:
    total = draw(st.sampled_from(_TOTALS))
    device = mi300x(f"g{index}", draw(st.sampled_from(("spx", "spx", "dpx", "dpx", "cpx"))), part=f"P{total}", total=total)
    if draw(st.booleans()):
        device = replace(device, vendor=Vendor.NVIDIA)
    shared, alone, foreign, grants = {}, {}, {}, list[Grant]()
    for partition in device.layout.partitions:
        shared[partition.id] = draw(st.sampled_from(_LEVELS))
        alone[partition.id] = draw(st.sampled_from(_LEVELS))
        free = partition.memory_bytes
        for name in draw(st.lists(st.sampled_from(_NAMES), max_size=2)):
            exclusive = not grants and draw(st.booleans()) and free == partition.memory_bytes
            taken = free if exclusive else draw(st.integers(0, free))
            free -= taken
            grants.append(
                Grant(
                    id=f"{node}-{device.id}-{len(grants)}",
                    instance_id=f"{node}-{device.id}-{len(grants)}",
                    deployment=name,
                    node=node,
                    device_id=device.id,
                    partition_id=partition.id,
                    memory_bytes=taken,
                    compute_ppm=draw(st.sampled_from((None, 100_000))),
                    priority=draw(st.sampled_from(Priority)),
                    level=Level.NONE,
                    exclusive=exclusive,
                )
            )
        if draw(st.integers(0, 3)) == 0:
            foreign[partition.id] = draw(st.integers(0, partition.memory_bytes))
    return DeviceState(device=device, grants=tuple(grants), foreign_bytes=foreign, shared_levels=shared, exclusive_levels=alone)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    nodes = []
    for number in range(draw(st.integers(0, 3))):
        name = f"n{number}"
        states = tuple(draw(device_states(name, index)) for index in range(draw(st.integers(0, 3))))
        cpu = draw(st.sampled_from((None, 4000, 64000)))
        host = draw(st.sampled_from((None, 100)))
        nodes.append(NodeState(name=name, devices=states, cpu_millis=cpu, host_memory_bytes=host))
    return Snapshot(nodes=tuple(nodes))


_WANTS = st.one_of(
    st.just(Auto()),
    st.one_of(st.integers(1, 2000), st.integers(10**9, 10**11)).map(lambda count: Memory(memory_bytes=count)),
    st.sampled_from((1, 125_000, 333_333, 500_000, 1_000_000)).map(lambda ppm: Fraction(ppm=ppm)),
    st.sampled_from(("spx", "dpx", "cpx", "1g.18gb")).map(lambda kind: PartitionKind(kind=kind)),
    st.integers(1, 3).map(lambda count: Whole(count=count)),
)


@st.composite
def asks(draw: st.DrawFn, name: str = "new") -> Ask:
    want = draw(_WANTS)
    footprint = draw(st.one_of(st.none(), st.integers(0, 1200)))
    return Ask(
        name=name,
        want=want,
        footprint_bytes=footprint or 0 if isinstance(want, Auto) else footprint,
        least_bytes=draw(st.sampled_from((None, 1, 300))),
        divided=draw(st.sampled_from(((), (), ((2, (footprint or 0) // 2), (3, (footprint or 0) // 3))))),
        devices=1 if isinstance(want, Whole) else draw(st.sampled_from((1, 1, 1, 2))),
        compute_ppm=draw(st.sampled_from((None, None, 950_000, 125_000, 60_001))),
        isolation=draw(st.sampled_from(IsolationRequirement)),
        priority=draw(st.sampled_from(Priority)),
        products=draw(st.sampled_from((frozenset[str](), frozenset({"p800"}), frozenset({"P1600", "P800"})))),
        refused_products=draw(st.sampled_from((frozenset[str](), frozenset[str](), frozenset({"p8008"})))),
        vendor=draw(st.sampled_from((None, None, "amd"))),
        refused_vendor=draw(st.sampled_from((None, None, None, "NVIDIA"))),
        spread=draw(st.sampled_from(Spread)),
        with_deployments=draw(st.sampled_from((frozenset[str](), frozenset[str](), frozenset({"a"})))),
        not_with_deployments=draw(st.sampled_from((frozenset[str](), frozenset[str](), frozenset({"b"})))),
        cpu_millis=draw(st.sampled_from((0, 0, 5000))),
        host_memory_bytes=draw(st.sampled_from((0, 0, 60))),
    )
