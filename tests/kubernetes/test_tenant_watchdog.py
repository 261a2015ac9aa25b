"""Pods that use a GPU without the library, or beyond their grant, are noticed from outside."""

from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu.domain import DeviceUsage, ForeignProcess, Level
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.boundaries import EngineFlags
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.watchdog import Violation
from aimgpu.kubernetes.node.agent.tenant_watchdog import TenantWatchdog, assign
from aimgpu.kubernetes.node.dra_driver.checkpoint import ClaimRecord, ClaimState
from aimgpu.kubernetes.node.grants import NodeGrants, NodeSlot, PodTenant
from aimgpu.kubernetes.node.health import Inventory, foreign_devices, read_pod
from aimgpu.ledger import Ledger

POD = "11111111-2222-3333-4444-555555555555"
GPU = "sim-mi300x-0"


def process(proc: Path, pid: int, tenant: str | None, pod: str | None = POD) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    group = f"/kubepods/besteffort/pod{pod}/container" if pod else "/user.slice"
    (folder / "cgroup").write_text(f"4:memory:{group}\n")
    (folder / "environ").write_bytes(b"A=1\0" + (f"AIMGPU_TENANT={tenant}\0".encode() if tenant else b""))
    (folder / "stat").write_text(f"{pid} (python) S 1 " + " ".join(["0"] * 40))
    (folder / "status").write_text(f"NSpid:\t{pid}\n")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.db")


@pytest.fixture
def record(ledger: Ledger) -> ClaimRecord:
    """A claim with a share of 10 GiB that the interposer enforces."""
    hardware = SimulatedHardware([("MI300X", 1)])
    grants = NodeGrants(hardware=hardware, ledger=ledger, isolator=MechanismChooser((EngineFlags(),)), node="node1")
    slot = NodeSlot(device_id=GPU, partition_id=f"{GPU}/spx-0", memory_bytes=10 << 30)
    (instance,) = grants.charge([PodTenant(id="uid.gpu", owner="default/claim", slots=(slot,))])
    ledger.note_enforcement(*(replace(grant, level=Level.RUNTIME, mechanisms=("interposer",)) for grant in instance.grants))
    return ClaimRecord(
        uid="uid", namespace="default", name="claim", state=ClaimState.PREPARED, boot_id="b", tenants=("uid.gpu",), pods=(POD,)
    )


def usage(pid: int, memory_bytes: int) -> DeviceUsage:
    found = ForeignProcess(pid=pid, name="python", memory_bytes=memory_bytes, partition_id=f"{GPU}/spx-0")
    return DeviceUsage(
        device_id=GPU, used_bytes=memory_bytes, used_bytes_by_partition={}, utilization_percent=None, processes=(found,)
    )


def test_a_pod_that_runs_without_the_library_loses_its_level(tmp_path: Path, ledger: Ledger, record: ClaimRecord) -> None:
    process(tmp_path / "proc", 77, "uid.gpu")
    dog = TenantWatchdog(interposer=Interposer(tmp_path / "regions"), ledger=ledger, proc=tmp_path / "proc")
    (verdict,) = dog.look([record], [usage(77, 1 << 30)])
    assert (verdict.finding, verdict.instance_id) == (Violation.UNHELD, "uid.gpu")
    assert [grant.level for grant in ledger.grants()] == [Level.ADVISORY]


def test_a_pod_beyond_its_grant_is_named_and_strangers_are_not_judged(
    tmp_path: Path, ledger: Ledger, record: ClaimRecord
) -> None:
    process(tmp_path / "proc", 77, "uid.gpu")
    process(tmp_path / "proc", 78, None, pod=None)
    dog = TenantWatchdog(interposer=Interposer(tmp_path / "regions"), ledger=ledger, proc=tmp_path / "proc")
    found = dog.look([record], [usage(77, 20 << 30), usage(78, 1 << 30)])
    assert {verdict.finding for verdict in found} == {Violation.UNHELD, Violation.OVER}
    assert {verdict.instance_id for verdict in found} == {"uid.gpu"}


def test_processes_belong_to_the_tenant_that_they_name(tmp_path: Path) -> None:
    for pid, tenant in ((1, "a"), (2, "b"), (3, None), (4, "unknown")):
        process(tmp_path, pid, tenant)
    assert assign(frozenset({1, 2, 3, 4}), ("a", "b"), tmp_path) == {"a": frozenset({1, 3, 4}), "b": frozenset({2})}


def test_strangers_are_those_outside_of_pods_with_a_claim(tmp_path: Path) -> None:
    process(tmp_path, 77, None)
    process(tmp_path, 78, None, pod=None)
    process(tmp_path, 79, None, pod="99999999-2222-3333-4444-555555555555")
    assert read_pod(77, tmp_path) == POD
    usages = [usage(pid, 1) for pid in (77, 78, 79)]
    assert set(foreign_devices(usages, {POD}, tmp_path)) == {GPU}
    assert foreign_devices([usage(77, 1)], {POD}, tmp_path) == {}


def test_a_gpu_that_disappears_is_remembered_as_unhealthy() -> None:
    inventory = Inventory()
    devices = SimulatedHardware([("MI300X", 2)]).read_devices()
    assert inventory.update(devices, ()) == {}
    assert list(inventory.update(devices[:1], ())) == [devices[1].id]
    assert inventory.update(devices, ()) == {}
