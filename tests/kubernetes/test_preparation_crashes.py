"""The driver killed between any two acts of prepare and unprepare: nothing is granted twice, and nothing leaks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.errors import AimGpuError
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.dra_driver.checkpoint import Checkpoint
from aimgpu.kubernetes.node.dra_driver.claims import Allocated, DraClaim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.grants import NodeGrants
from aimgpu.kubernetes.node.layouts import NodeLayouts
from aimgpu.ledger import Ledger

GPU = "sim-mi300x-0"
GIB = 1 << 30
ALL_MEMORY = 206141652992


class Killed(BaseException):
    """kill -9: nothing of the process happens after it, no handler either."""


@dataclass(slots=True)
class Life:
    """Ends at the given act; every act counts twice, before and after it."""

    left: int | None = None

    def tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


class Mortal:
    """Passes calls on while its process lives."""

    def __init__(self, target: Any, life: Life) -> None:
        self._target, self._life = target, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._life.tick()
            answer = found(*arguments, **named)
            self._life.tick()
            return answer

        return call


class Node:
    """A node's disk, and the driver processes that come and go on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot = 1
        self.life = Life()
        self.driver = self.start()

    def start(self, left: int | None = None) -> Preparation:
        self.life = Life(left)
        ledger = Ledger.open(self.folder / "ledger.db")
        hardware: Any = Mortal(SimulatedHardware([("MI300X", 1)], self.folder / "gpus.json"), self.life)
        books: Any = Mortal(ledger, self.life)
        isolator = MechanismChooser((HardwareBoundary(), EngineFlags()))
        specs: Any = Mortal(SpecFolder("gpu.aim.amd.com/claim", self.folder / f"cdi-{self.boot}"), self.life)
        driver = Preparation(
            hardware=hardware,
            grants=NodeGrants(hardware=hardware, ledger=books, isolator=isolator, node="node1"),
            layouts=NodeLayouts(hardware=hardware, ledger=books, allowed=True),
            checkpoint=Checkpoint(books),
            specs=specs,
            boot_id=f"boot-{self.boot}",
        )
        self.driver = driver
        driver.recover()
        return driver

    def act(self, step: str, one: DraClaim, left: int | None) -> None:
        match step:
            case "prepare":
                self.driver.prepare(one)
            case "unprepare":
                self.driver.unprepare(one.uid)
            case "restart":
                self.start(left)
            case _:
                self.boot += 1
                self.start()

    def check(self) -> None:
        """Between two calls everything must agree: claims, grants, CDI files, the layout."""
        ledger = Ledger.open(self.folder / "ledger.db")
        records, grants = Checkpoint(ledger).read_all(), ledger.grants()
        assert {grant.instance_id for grant in grants} == {tenant for record in records for tenant in record.tenants}
        files = {path.name for path in (self.folder / f"cdi-{self.boot}").glob("*")}
        assert files == {f"gpu.aim.amd.com-claim-{record.uid}.json" for record in records}
        device = SimulatedHardware([("MI300X", 1)], self.folder / "gpus.json").read_devices()[0]
        for partition in device.layout.partitions:
            assert sum(grant.memory_bytes for grant in grants if grant.partition_id == partition.id) <= partition.memory_bytes
        assert all(device.partition(grant.partition_id) for grant in grants)
        if not grants:
            assert device.layout.name == "SPX/NPS1"
            assert not ledger.operations()
        ledger.close()


def claim(uid: str, device: str, gib: int | None, memory_bytes: int | None = None) -> DraClaim:
    memory_bytes = memory_bytes if gib is None else gib * GIB
    one = Allocated(request="gpu", pool="node1", device=device, share_id=uid, memory_bytes=memory_bytes)
    return DraClaim(uid=uid, namespace="default", name=f"claim-{uid}", allocated=(one,), pods=(f"pod-{uid}",))


SHARE = claim("a", f"{GPU}-shared", 90)
PARTITION = claim("b", f"{GPU}-cpx-2", None)


@pytest.mark.parametrize("wanted", [SHARE, PARTITION], ids=["share", "partition"])
def test_a_driver_killed_at_any_act_of_prepare_is_whole_again_at_its_next_start(tmp_path: Path, wanted: DraClaim) -> None:
    acts = 0
    while True:
        folder = tmp_path / str(acts)
        folder.mkdir()
        node = Node(folder)
        node.life.left = acts
        try:
            node.driver.prepare(wanted)
        except Killed:
            node.start()
            node.check()
            assert node.driver.prepare(wanted) == node.driver.prepare(wanted)
            node.check()
            acts += 1
        else:
            break
    assert acts > 20
    node.life.left = None
    assert node.driver.unprepare(wanted.uid)
    node.check()


@pytest.mark.parametrize("wanted", [SHARE, PARTITION], ids=["share", "partition"])
def test_a_driver_killed_at_any_act_of_unprepare_gives_everything_back(tmp_path: Path, wanted: DraClaim) -> None:
    acts = 0
    while True:
        folder = tmp_path / str(acts)
        folder.mkdir()
        node = Node(folder)
        node.driver.prepare(wanted)
        node.life.left = acts
        try:
            node.driver.unprepare(wanted.uid)
        except Killed:
            node.start()
            node.driver.unprepare(wanted.uid)
            node.check()
            assert not node.driver.prepared()
            acts += 1
        else:
            break
    assert acts > 10


def test_a_driver_killed_again_and_again_while_it_recovers_gets_through_in_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.driver.prepare(PARTITION)
    node.life.left = 6
    with pytest.raises(Killed):
        node.driver.unprepare(PARTITION.uid)
    for acts in range(60):
        try:
            node.start(acts)
        except Killed:
            continue
        break
    node.start()
    node.driver.unprepare(PARTITION.uid)
    node.check()


def test_after_a_reboot_nothing_is_held_and_claims_can_be_prepared_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.driver.prepare(PARTITION)
    node.boot += 1
    node.start()
    node.check()
    assert not node.driver.prepared()
    node.driver.prepare(PARTITION)
    node.check()


def test_a_corrupt_ledger_is_set_aside_and_the_node_goes_on(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.driver.prepare(SHARE)
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    for leftover in ("ledger.db-wal", "ledger.db-shm"):
        (tmp_path / leftover).unlink(missing_ok=True)
    node.start()
    node.check()
    node.driver.prepare(SHARE)
    node.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["prepare", "unprepare", "restart", "reboot"]),
        st.integers(0, 7),  # which claim
        st.one_of(st.none(), st.integers(0, 60)),  # killed at this act
    ),
    max_size=12,
)
CLAIMS = [
    claim("s0", f"{GPU}-shared", 60),
    claim("s1", f"{GPU}-shared", 100),
    claim("w", GPU, None),
    claim("p0", f"{GPU}-cpx-0", None),
    claim("p1", f"{GPU}-cpx-1-shared", 5),
    claim("d", f"{GPU}-dpx-0", None),
    claim("v0", GPU, 60),  # of the one device for whole and shares
    claim("v1", GPU, None, ALL_MEMORY),
]


def test_all_memory_of_the_one_device_for_whole_and_shares_is_the_whole_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.driver.prepare(claim("whole", GPU, None, ALL_MEMORY))
    with pytest.raises(AimGpuError):
        node.driver.prepare(claim("share", f"{GPU}-shared", 1))
    node.driver.unprepare("whole")
    node.driver.prepare(claim("share", GPU, 60))
    node.driver.prepare(claim("rest", GPU, None, ALL_MEMORY - 60 * GIB))
    node.check()


@given(STEPS)
def test_no_order_of_calls_kills_and_reboots_grants_twice_or_leaks(tmp_path_factory: Any, steps: list[Any]) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    for step, number, left in steps:
        node.life.left = left
        try:
            node.act(step, CLAIMS[number], left)
        except Killed:
            node.start()
        except AimGpuError:
            pass  # does not fit beside what is held: refused, and nothing changed
        node.life.left = None
        node.check()
    for one in CLAIMS:
        node.driver.unprepare(one.uid)
    node.check()
    assert not node.driver.prepared()
