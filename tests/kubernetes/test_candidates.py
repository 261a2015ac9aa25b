"""What counters let kube-scheduler allocate together is exactly what the hardware can be at once."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.products import divided_products

from aimgpu.domain import Device, Level
from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.kubernetes.cluster.admission.inventory import shared_products
from aimgpu.kubernetes.node.dra_driver.candidates import Candidate, GpuCandidates, list_candidates
from aimgpu.kubernetes.node.dra_driver.claims import read_claim
from aimgpu.kubernetes.node.dra_driver.parameters import parse_parameters
from aimgpu.kubernetes.node.dra_driver.resource_slices import (
    DEVICES_PER_SLICE,
    Features,
    GpuState,
    SliceSettings,
    build_slices,
)

PRODUCTS = tuple(product.name for product in divided_products())


def simulated(product: str) -> Device:
    return SimulatedHardware([(product, 1)]).read_devices()[0]


def fits(gpu: GpuCandidates, chosen: list[Candidate]) -> bool:
    """As kube-scheduler adds up counters."""
    return all(sum(one.counters.get(name, 0) for one in chosen) <= size for name, size in gpu.counters.items())


def can_exist(device: Device, chosen: list[Candidate]) -> bool:
    """Whether one layout of the GPU has all of these partitions."""
    wanted = {one.partition.id for one in chosen}
    return any(wanted <= {part.id for part in layout.partitions} for layout in device.layouts)


@pytest.mark.parametrize("product", PRODUCTS)
def test_two_partitions_are_allocatable_together_exactly_where_one_layout_has_both(product: str) -> None:
    device = simulated(product)
    gpu = list_candidates(device, repartition=True)
    assert any(one.whole and one.current for one in gpu.candidates)
    for pair in combinations(gpu.candidates, 2):
        assert fits(gpu, list(pair)) == can_exist(device, list(pair)), [one.name for one in pair]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_full_layout_is_allocatable(product: str) -> None:
    device = simulated(product)
    gpu = list_candidates(device, repartition=True)
    by_partition = {one.partition.id: one for one in gpu.candidates}
    for layout in device.layouts:
        if layout.memory_mode == device.layout.memory_mode:
            assert fits(gpu, [by_partition[part.id] for part in layout.partitions]), layout.name


@given(st.sampled_from(PRODUCTS), st.data())
def test_whatever_the_scheduler_allocates_can_exist(product: str, data: st.DataObject) -> None:
    device = simulated(product)
    gpu = list_candidates(device, repartition=True)
    order = data.draw(st.permutations(gpu.candidates))
    held: list[Candidate] = []
    for one in order:
        if fits(gpu, [*held, one]):
            held.append(one)
    assert can_exist(device, held), [one.name for one in held]


def test_the_whole_gpu_and_its_shares_take_the_same_counters() -> None:
    gpu = list_candidates(simulated("MI300X"), repartition=False)
    (only,) = gpu.candidates
    assert fits(gpu, [only])
    assert not fits(gpu, [only, only])


def test_with_fixed_layouts_only_what_exists_is_offered() -> None:
    hardware = SimulatedHardware([("MI300X", 1)])
    device = hardware.apply_layout(hardware.read_devices()[0].id, "CPX/NPS1")
    gpu = list_candidates(device, repartition=False)
    assert [one.partition.kind for one in gpu.candidates] == ["cpx"] * 8
    assert gpu.find("sim-mi300x-0-cpx-3-shared") == (gpu.candidates[3], True)
    assert gpu.find("sim-mi300x-0-cpx-9") is None


@pytest.mark.parametrize("version", [(1, 34, 4), (1, 35, 4), (1, 36, 4)])
def test_slices_stay_within_the_limits_of_the_api(version: tuple[int, int, int]) -> None:
    hardware = SimulatedHardware([("MI300X", 8), ("H200", 8)])
    gpus = [list_candidates(device, repartition=True) for device in hardware.read_devices()]
    specs = build_slices(gpus, {}, SliceSettings(node="node1", features=Features(version=version)))
    names = [device["name"] for spec in specs for device in spec.get("devices", ())]
    assert len(names) == len(set(names)) == 2 * sum(len(gpu.candidates) for gpu in gpus)
    assert max(map(len, names)) <= 63
    for spec in specs:
        assert len(spec.get("devices", ())) <= DEVICES_PER_SLICE
        assert len(spec.get("sharedCounters", ())) <= 8
        together = bool(spec.get("devices")) and bool(spec.get("sharedCounters"))
        assert together == (version == (1, 34, 4))
        for counters in spec.get("sharedCounters", ()):
            assert len(counters["counters"]) <= 32


@pytest.mark.parametrize("version", [(1, 34, 4), (1, 36, 1), (1, 36, 2)])
def test_one_device_for_whole_and_shares_needs_no_counters_while_the_layout_is_fixed(version: tuple[int, int, int]) -> None:
    hardware = SimulatedHardware([("MI300X", 1), ("H200", 1)])
    hardware.apply_layout("sim-mi300x-0", "CPX/NPS1")
    settings = SliceSettings(node="node1", features=Features(version=version), single_device=True)
    fixed = [list_candidates(device, repartition=False) for device in hardware.read_devices()]
    devices = [device for spec in build_slices(fixed, {}, settings) for device in spec["devices"]]
    assert [device["name"] for device in devices] == [*(f"sim-mi300x-0-cpx-{number}" for number in range(8)), "sim-h200-141-0"]
    for device in devices:
        memory = device["capacity"]["memory"]
        assert memory["requestPolicy"]["default"] == memory["value"]  # a request that names no memory takes all of it
        assert device["attributes"]["type"] == {"string": "divisible"}
        assert "consumesCounters" not in device

    changing = [list_candidates(device, repartition=True) for device in hardware.read_devices()]
    specs = build_slices(changing, {}, settings)
    if not settings.features.counts_shares:  # counters would not keep layouts apart
        assert specs == build_slices(fixed, {}, settings)
        return
    assert sum(len(spec.get("sharedCounters", ())) for spec in specs) >= len(changing)
    assert all(device["consumesCounters"] for spec in specs for device in spec.get("devices", ()))


def test_admission_takes_fractions_of_the_one_device_too() -> None:
    gpus = [list_candidates(simulated("MI300X"), repartition=False)]
    forms = [build_slices(gpus, {}, SliceSettings(node="node1", single_device=single)) for single in (False, True)]
    two, one = (shared_products([{"spec": spec} for spec in specs]) for specs in forms)
    assert one == two
    assert len(one) == 1


def test_one_device_lets_a_server_without_counters_share() -> None:
    gpus = [list_candidates(simulated("MI300X"), repartition=True)]
    features = Features(partitionable_devices=False)
    (spec,) = build_slices(gpus, {}, SliceSettings(node="node1", features=features, single_device=True))
    (device,) = spec["devices"]
    assert device["allowMultipleAllocations"] is True


def test_a_server_without_a_feature_gets_what_it_can_keep() -> None:
    gpus = [list_candidates(simulated("MI300X"), repartition=True)]
    lacking = Features(consumable_capacity=False, partitionable_devices=False, device_taints=False)
    settings = SliceSettings(node="node1", features=lacking)
    (spec,) = build_slices(gpus, {}, settings)
    (device,) = spec["devices"]
    assert device["name"] == "sim-mi300x-0"
    assert not {"allowMultipleAllocations", "consumesCounters", "taints"} & set(device)
    sick = {"sim-mi300x-0": GpuState(unhealthy="lost")}
    assert build_slices(gpus, sick, settings)[0]["devices"] == []
    assert len(lacking.missing()) == 3


@pytest.mark.parametrize(
    ("version", "counts"),
    [
        ((1, 34, 13), False),
        ((1, 35, 10), False),
        ((1, 36, 0), False),
        ((1, 36, 1), False),
        ((1, 36, 2), True),
        ((1, 37, 0), True),
    ],
)
def test_a_scheduler_that_does_not_count_shares_is_among_what_is_missing(
    version: tuple[int, int, int], *, counts: bool
) -> None:
    features = Features(version=version)
    assert features.counts_shares == counts
    assert [line.partition(":")[0] for line in features.missing()] == ([] if counts else ["kube-scheduler 1.36.2"])
    assert "kube-scheduler 1.36.2" not in str(Features(version=version, consumable_capacity=False).missing())


def test_health_and_level_are_on_every_device_of_a_gpu() -> None:
    gpus = [list_candidates(simulated("MI300X"), repartition=True)]
    state = GpuState(shared_level=Level.RUNTIME, exclusive_level=Level.HARDWARE, unhealthy="lost", driver_version="6.12.12-x")
    for spec in build_slices(gpus, {"sim-mi300x-0": state}, SliceSettings(node="node1")):
        for device in spec.get("devices", ()):
            shared = device.get("allowMultipleAllocations", False)
            assert device["taints"] == [{"key": "gpu.aim.amd.com/unhealthy", "value": "true", "effect": "NoExecute"}]
            assert device["attributes"]["level"] == {"string": "runtime" if shared else "hardware"}
            assert device["attributes"]["driverVersion"] == {"version": "6.12.12"}


def test_parameters_of_the_claim_win_over_those_of_its_class() -> None:
    def entry(source: str, isolation: str) -> dict[str, object]:
        body = {"apiVersion": "gpu.aim.amd.com/v1alpha1", "kind": "GpuClaimParameters", "isolation": isolation}
        return {"source": source, "requests": ["gpu"], "opaque": {"driver": "gpu.aim.amd.com", "parameters": body}}

    result = {"request": "gpu/first", "driver": "gpu.aim.amd.com", "pool": "n", "device": "d"}
    devices = {"results": [result], "config": [entry("FromClaim", "hardware"), entry("FromClass", "none")]}
    claim = read_claim(
        {"metadata": {"uid": "u", "namespace": "a", "name": "b"}, "status": {"allocation": {"devices": devices}}}, "u", "n"
    )
    assert claim.parameters["gpu/first"].isolation == "hardware"
    assert claim.allocated[0].main_request == "gpu"


@pytest.mark.parametrize(
    "wrong", [{}, {"isolation": "strong"}, {"priority": "urgent"}, {"limits": "pod"}, {"memory": "1Gi"}, {"kind": "Other"}]
)
def test_wrong_parameters_are_refused_with_what_can_be_written(wrong: dict[str, str]) -> None:
    body = {"apiVersion": "gpu.aim.amd.com/v1alpha1", "kind": "GpuClaimParameters", **wrong} if wrong else {}
    with pytest.raises(InvalidInput) as refused:
        parse_parameters(body)
    assert refused.value.hint
