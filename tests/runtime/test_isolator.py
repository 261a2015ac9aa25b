"""Compute limits become masks that do not overlap, and the environment to start a process with."""

from pathlib import Path

import pytest

from aimgpu.errors import InvalidLayout, NotAllowed, UnknownPartition
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.home import Home
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.runtime import ComputeLimits, ResourceIsolator, ROCmPartitioner, ROCmPartitionerReal
from aimgpu.units import PPM


@pytest.fixture
def whole() -> ROCmPartitioner:
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [192.0])
    return partitioner


def test_limits_are_percent_of_the_gpu_or_compute_units(whole: ROCmPartitioner) -> None:
    isolator = ResourceIsolator(whole)
    first = isolator.set_model_limit(0, "a", ComputeLimits.percent(30))
    second = isolator.set_model_limit(0, "b", ComputeLimits.units(152, whole.device()))
    assert (len(first), len(second)) == (91, 152)
    assert not first & second
    assert isolator.model_limits(0).keys() == {"a", "b"}
    with pytest.raises(NotAllowed, match="61 are free"):
        isolator.set_model_limit(0, "c", ComputeLimits.percent(30))
    assert isolator.model_limits(0).keys() == {"a", "b"}
    isolator.set_model_limit(0, "a", None)
    assert len(isolator.set_model_limit(0, "c", ComputeLimits.percent(30))) == 91


def test_every_die_has_a_unit_of_every_mask(whole: ROCmPartitioner) -> None:
    isolator = ResourceIsolator(whole)
    for name, percent in (("a", 1), ("b", 7), ("c", 50)):
        mask = isolator.set_model_limit(0, name, ComputeLimits.percent(percent))
        assert {unit % 8 for unit in mask} == set(range(8))


def test_a_process_is_started_with_its_partition_and_its_mask(tmp_path: Path) -> None:
    partitioner = ROCmPartitionerReal(hardware=SimulatedHardware([("MI300X", 1)]), home=Home(tmp_path))
    partitioner.initialize("CPX")
    isolator = ResourceIsolator(partitioner)
    isolator.set_model_limit(3, "a", ComputeLimits.percent(5))
    isolator.set_model_limit(3, "b", ComputeLimits.percent(5))
    first, second = isolator.environment(3, "a"), isolator.environment(3, "b")
    assert first["AIM_PARTITION_ID"] == "3"
    assert first["AIM_PARTITION_STABLE_ID"].endswith("/cpx-3")
    assert (first["HSA_CU_MASK"], second["HSA_CU_MASK"]) == ("0:0-14", "0:15-29")
    assert "HSA_CU_MASK" not in isolator.environment(2)
    with pytest.raises(InvalidLayout, match=r"60% of the GPU \(182 compute units\) is more than partition 3 has \(12.5%, 38"):
        isolator.set_model_limit(3, "c", ComputeLimits.percent(60))
    with pytest.raises(UnknownPartition, match="no partition 9"):
        isolator.environment(9)


def test_a_model_stays_within_its_partitions_ceiling(whole: ROCmPartitioner) -> None:
    isolator = ResourceIsolator(whole)
    isolator.set_limits({0: ComputeLimits.percent(50, floor=10)})
    assert isolator.environment(0)["HSA_CU_MASK"] == "0:0-151"
    with pytest.raises(InvalidLayout, match=r"more than partition 0 may have \(50%\)"):
        isolator.set_model_limit(0, "a", ComputeLimits.percent(51))


def units_of(environment: dict[str, str]) -> set[int]:
    ranges = (each.partition("-") for each in environment["HSA_CU_MASK"].removeprefix("0:").split(","))
    return {unit for first, _, last in ranges for unit in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("ceiling", [None, 20, 80])
def test_a_process_without_a_limit_gets_no_unit_of_a_model_that_has_one(whole: ROCmPartitioner, ceiling: int | None) -> None:
    isolator = ResourceIsolator(whole)
    if ceiling is not None:
        isolator.set_limits({0: ComputeLimits.percent(ceiling, floor=1)})
    isolator.set_model_limit(0, "a", ComputeLimits.percent(10))
    isolator.set_model_limit(0, "b", ComputeLimits.percent(7))
    own = [units_of(isolator.environment(0, name)) for name in ("a", "b")]
    other = units_of(isolator.environment(0, "c"))
    assert not own[0] & own[1]
    assert not other & (own[0] | own[1])
    assert len(other) == {None: 304 - 30 - 21, 20: 60, 80: 243}[ceiling]
    assert units_of(isolator.environment(0)) == other


def test_where_limits_take_everything_a_process_without_one_is_refused(whole: ROCmPartitioner) -> None:
    isolator = ResourceIsolator(whole)
    isolator.set_model_limit(0, "a", ComputeLimits.percent(100))
    with pytest.raises(NotAllowed, match="models with a limit have all 304 compute units of partition 0"):
        isolator.environment(0, "b")


def test_limits_outlive_a_change_of_the_layout_or_are_refused_in_words(tmp_path: Path) -> None:
    """They are of the whole GPU: 10 % are 30 CUs before and after, 60 % cannot be had of one partition in eight."""
    partitioner = ROCmPartitionerReal(hardware=SimulatedHardware([("MI300X", 1)]), home=Home(tmp_path))
    partitioner.initialize("SPX")
    isolator = ResourceIsolator(partitioner)
    isolator.set_model_limit(0, "large", ComputeLimits.percent(60))
    isolator.set_model_limit(0, "small", ComputeLimits.percent(10))
    partitioner.initialize("CPX")
    with pytest.raises(InvalidLayout, match=r"60% of the GPU \(182 compute units\) is more than partition 0 has \(12.5%, 38"):
        isolator.environment(0, "large")
    assert units_of(isolator.environment(0, "small")) == set(range(30))
    isolator.set_model_limit(0, "large", ComputeLimits.percent(2))
    assert units_of(isolator.environment(0, "large")) == set(range(30, 36))
    partitioner.initialize("SPX")
    assert len(units_of(isolator.environment(0, "small"))) == 30


def test_a_running_process_gets_a_new_limit_where_the_gate_holds_it(whole: ROCmPartitioner, tmp_path: Path) -> None:
    interposer = Interposer(tmp_path)
    isolator = ResourceIsolator(whole, interposer=interposer)
    isolator.set_model_limit(0, "a", ComputeLimits.percent(25))
    without = isolator.apply(0, "a")
    assert not without.applied
    assert "start it again" in without.how
    region: Region = interposer.region(whole.device().layout.partitions[0].id, memory_bytes=10**9)
    region.admit(TenantLimits(name="a", cap_bytes=10**9))
    assert isolator.apply(0, "a").applied
    assert [use.compute_ppm for use in region.read_use()] == [250_000]
    isolator.set_model_limit(0, "a", None)
    isolator.apply(0, "a")
    assert [use.compute_ppm for use in region.read_use()] == [PPM]


@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_partitions_is_divided_equally(count: int) -> None:
    """304 compute units are no multiple of 3, 5, 6 or 7."""
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [24.0] * count)
    isolator = ResourceIsolator(partitioner)
    limits = isolator.divide_equally()
    assert list(limits) == list(range(count))
    assert len(set(limits.values())) == 1
    assert PPM * 0.98 <= sum(limit.floor_ppm for limit in limits.values()) <= PPM
    units = 304 // count
    for index in limits:
        mask = isolator.environment(index).get("HSA_CU_MASK")
        assert mask in {None, f"0:0-{units - 1}"}


@pytest.mark.parametrize("count", range(1, 9))
def test_all_units_of_a_partition_can_be_asked_and_one_more_is_refused_in_units(count: int) -> None:
    partitioner = ROCmPartitioner()
    partitioner.initialize("MI300X", [24.0] * count)
    isolator, units = ResourceIsolator(partitioner), 304 // count
    device = partitioner.device()
    assert isolator.set_model_limit(0, "a", ComputeLimits.units(units, device)) == set(range(units))
    if count > 1:
        with pytest.raises(
            InvalidLayout, match=rf"\({units + 1} compute units\) is more than partition 1 has .*, {units} compute units"
        ):
            isolator.set_model_limit(1, "a", ComputeLimits.units(units + 1, device))
