from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hardware_nvidia.fake_nvml import FakeLibrary, nvml_over
from tests.hardware_nvidia.gpus import FakeGpu, h100

from aimgpu.domain import Partition
from aimgpu.errors import InvalidInput
from aimgpu.hardware.nvidia.facts import Gpu
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.nvidia.sharing import SharingMode, sharing_offers, split_replicas


def offers(gpu: FakeGpu, program: str = "true") -> dict[SharingMode, str | None]:
    nvml = nvml_over(FakeLibrary([gpu]))
    return {offer.mode: offer.reason for offer in sharing_offers(Gpu(nvml, 0), MpsDaemons(Path("/x"), program=program))}


def partition_of(memory_bytes: int) -> Partition:
    return Partition(id="gpu/whole-0", device_id="gpu", index=0, kind="whole", memory_bytes=memory_bytes)


def test_a_gpu_as_it_comes_can_be_shared_in_every_way() -> None:
    assert set(offers(h100()).values()) == {None}


def test_a_gpu_for_one_process_can_have_mps_and_no_time_slices() -> None:
    found = offers(h100(compute_mode=3))
    assert found[SharingMode.TIME_SLICED] is not None
    assert found[SharingMode.MPS] is None


def test_a_prohibited_gpu_can_have_nothing() -> None:
    assert None not in offers(h100(compute_mode=2)).values()


def test_mps_needs_its_program_and_a_gpu_that_has_limits() -> None:
    assert "not installed" in (offers(h100(), program="not-there-at-all")[SharingMode.MPS] or "")
    assert "Volta" in (offers(h100(capability=(6, 0)))[SharingMode.MPS] or "")


@given(st.integers(1, 2**40), st.integers(1, 64))
def test_replicas_are_equal_to_the_byte_and_give_away_all_of_it(memory_bytes: int, count: int) -> None:
    if count > memory_bytes:
        return
    replicas = split_replicas(partition_of(memory_bytes), count)
    assert sum(replica.memory_bytes for replica in replicas) == memory_bytes
    assert max(r.memory_bytes for r in replicas) - min(r.memory_bytes for r in replicas) <= 1
    assert len({replica.id for replica in replicas}) == count


@pytest.mark.parametrize("count", [0, -1, 11])
def test_a_partition_cannot_be_no_replicas_or_more_than_its_bytes(count: int) -> None:
    with pytest.raises(InvalidInput):
        split_replicas(partition_of(10), count)
