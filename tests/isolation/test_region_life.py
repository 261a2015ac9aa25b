"""A region over any sequence of what the daemon, the library and crashes do to it; also while another thread writes."""

import ctypes
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.examples import examples
from tests.isolation.test_region import attach

from aimgpu.domain import Priority
from aimgpu.errors import NotFound, RegionUnusable, ShareInUse
from aimgpu.isolation import layout
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.interposer import Interposer, region_path
from aimgpu.isolation.region import MOST_CONTEXT_BYTES, GateBounds, Measured, Region, TenantLimits
from aimgpu.isolation.request_signals import RegionRequestSignals
from aimgpu.units import GIB, MIB, PPM


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    made = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    yield made
    made.close()


# --- files that are no region of this version ---

FIELDS = ["magic", "version", "header_bytes", "region_bytes", "tenants", "processes", "tenant_bytes", "process_bytes", "boot"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_header_that_differs_in_any_way_is_refused_by_name_and_nothing_of_it_is_used(
    region: Region, field: str, change: int
) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    setattr(region.header, field, max(getattr(region.header, field) + change, 0))
    with pytest.raises(RegionUnusable) as caught:
        Region.open(region.path)
    assert str(region.path) in caught.value.message
    assert "remove the file" in str(caught.value.hint)
    signals = RegionRequestSignals(region.path.parent)
    assert signals.find(["chat"]) == {}


@pytest.mark.parametrize("size", [0, 1, 8, 64, 4096, layout.REGION_BYTES - 1])
def test_a_file_that_is_shorter_than_a_region_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "gpu0.region"
    path.write_bytes(os.urandom(size))
    with pytest.raises(RegionUnusable, match="too short"):
        Region.open(path)


@pytest.mark.parametrize("fill", [b"\x00", b"\xff", b"A"])
def test_noise_as_long_as_a_region_is_none_and_is_replaced(tmp_path: Path, fill: bytes) -> None:
    path = tmp_path / "gpu0.region"
    path.write_bytes(fill * layout.REGION_BYTES)
    with pytest.raises(RegionUnusable, match="is not a region"):
        Region.open(path)
    made = Region.create(path, device_bytes=GIB)
    assert made.read_use() == ()
    made.close()


def test_a_folder_at_the_place_of_a_region_is_said_and_hides_no_other(tmp_path: Path) -> None:
    interposer = Interposer(tmp_path / "regions", find_library=lambda: Path("/lib.so"), why_not=lambda: None)
    interposer.region("gpu0", memory_bytes=GIB)
    region_path(tmp_path / "regions", "gpu1").mkdir()
    assert [one.path.name for one in interposer.regions()] == ["gpu0.region"]
    assert interposer.find_region("gpu1") is None
    with pytest.raises(RegionUnusable, match=r"gpu1\.region"):
        interposer.region("gpu1", memory_bytes=GIB)
    assert sorted(os.listdir(tmp_path / "regions")) == ["gpu0.region", "gpu1.region"]  # noqa: PTH208 - nothing half made


def test_a_pipe_at_the_place_of_a_region_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpu0.region")
    with pytest.raises(RegionUnusable):
        Region.open(tmp_path / "gpu0.region")


def test_a_larger_file_is_used_as_far_as_it_is_known(region: Region) -> None:
    """A newer version may put something behind; what is before it is as described."""
    os.truncate(region.path, layout.REGION_BYTES + 4096)
    again = Region.open(region.path)
    assert again.read_use() == ()
    again.close()


# --- names ---


@pytest.mark.parametrize("name", ["a", "x" * 63, "chat-0", "\u00e9" * 31, "with space", "a/b", "-", "."])
def test_a_name_is_read_back_as_it_was_admitted(region: Region, name: str) -> None:
    region.admit(TenantLimits(name=name, cap_bytes=GIB))
    region.admit(TenantLimits(name=name[:-1] or "b", cap_bytes=1))
    assert {use.name: use.cap_bytes for use in region.read_use()} == {name: GIB, name[:-1] or "b": 1}
    region.dismiss(name)
    assert [use.name for use in region.read_use()] == [name[:-1] or "b"]


@pytest.mark.parametrize("call", ["resize", "writer_cell", "tenant_of"])
def test_who_is_no_tenant_is_not_found_and_steering_it_reaches_nobody(region: Region, call: str) -> None:
    arguments = ("ghost", GIB) if call == "resize" else ("ghost",)
    with pytest.raises(NotFound, match="ghost"):
        getattr(region, call)(*arguments)
    assert not region.throttle("ghost", 1)
    assert not region.set_yield("ghost", 1)
    region.dismiss("ghost")


# --- any sequence ---

NAMES = st.sampled_from(["chat", "code", "embed"])


class RegionMachine(RuleBasedStateMachine):
    """Two views of one file: what one wrote the other reads."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="region-"))
        self.region = Region.create(self.folder / "gpu0.region", device_bytes=80 * GIB)
        self.other = Region.open(self.region.path)
        self.caps: dict[str, int] = {}
        self.used: dict[str, list[layout.ProcessRecord]] = {}

    def use_of(self, name: str) -> int:
        return sum(slot.used_bytes for slot in self.used[name])

    @rule(name=NAMES, cap=st.integers(0, 8 * GIB), priority=st.sampled_from(Priority))
    def admit(self, name: str, cap: int, priority: Priority) -> None:
        try:
            self.region.admit(TenantLimits(name=name, cap_bytes=cap, priority=priority))
        except ShareInUse:
            assert cap < self.use_of(name)
            return
        self.caps[name] = cap
        self.used.setdefault(name, [])

    @rule(name=NAMES, cap=st.integers(0, 8 * GIB))
    def resize(self, name: str, cap: int) -> None:
        if name not in self.caps:
            return
        try:
            self.other.resize(name, cap)
        except ShareInUse:
            assert cap < self.use_of(name)
            return
        assert cap >= self.use_of(name)
        self.caps[name] = cap

    @rule(name=NAMES, used=st.integers(0, GIB))
    def a_process_comes(self, name: str, used: int) -> None:
        if name in self.caps and len(self.used[name]) < 4:
            self.used[name].append(attach(self.region, name, used))

    @rule(name=NAMES)
    def a_process_dies(self, name: str) -> None:
        if self.used.get(name):
            self.used[name].pop().start_ticks += 1  # its pid belongs to another process by now
            assert self.region.reap() >= 1

    @rule(name=NAMES)
    def dismiss(self, name: str) -> None:
        self.other.dismiss(name)
        self.caps.pop(name, None)
        self.used.pop(name, None)

    @rule()
    def the_daemon_restarts(self) -> None:
        self.other.close()
        self.other = Region.create(self.region.path, device_bytes=1)

    @invariant()
    def both_views_show_the_tenants_and_what_they_use(self) -> None:
        for view in (self.region, self.other):
            seen = {use.name: (use.cap_bytes, use.used_bytes, len(use.processes)) for use in view.read_use()}
            assert seen == {name: (cap, self.use_of(name), len(self.used[name])) for name, cap in self.caps.items()}

    def teardown(self) -> None:
        self.used.clear()
        self.other.close()
        self.region.close()
        shutil.rmtree(self.folder)


RegionMachine.TestCase.settings = settings(max_examples=examples(15), stateful_step_count=20)
TestAnyLife = RegionMachine.TestCase


def test_what_is_read_while_another_thread_writes_is_one_of_what_was_written(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=0))
    slot = attach(region, "chat", 0)
    stop = threading.Event()

    def write() -> None:
        other = Region.open(region.path)
        for number in range(2000):
            other.resize("chat", 8 * GIB + number % 7)
            if stop.is_set():
                break
        other.close()

    region.resize("chat", 8 * GIB)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(300):
            slot.used_bytes = (number % 5) * MIB
            (use,) = region.read_use()
            assert 8 * GIB <= use.cap_bytes < 8 * GIB + 7
            assert use.used_bytes == (number % 5) * MIB == use.processes[0].used_bytes
    finally:
        stop.set()
        writer.join()


# --- signals of requests ---


def test_requests_are_counted_while_they_run_and_bursts_once(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH))
    signal = CriticalSignal(region, "chat")
    cell = region.tenant_of("chat").writers[0]
    for depth in (1, 2, 3):
        signal.begin()
        assert (cell.running, cell.begun) == (depth, 1)
    for depth in (2, 1, 0):
        signal.end()
        assert cell.running == depth
    signal.end()
    assert cell.running == 0, "an end too many is no request of less than nothing"
    with signal:
        assert cell.running == 1
    assert (cell.running, cell.begun) == (0, 2)
    assert cell.request_ns > 0
    assert region.read_use()[0].requests == 2


def test_pauses_are_counted_by_length_and_old_ones_count_less(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH))
    signal = CriticalSignal(region, "chat")
    with signal:
        pass
    pauses = region.tenant_of("chat").pauses
    assert sum(pauses) == 0, "before the first request there was no pause"
    for number in range(layout.PAUSES):
        pauses[number] = 4096
    with signal:
        pass
    assert max(pauses) <= 4097 // 2 + 1
    assert min(pauses) >= 2048


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_a_longer_pause_never_counts_as_a_shorter_one(one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert 0 <= layout.pause_bucket(short) <= layout.pause_bucket(long) < layout.PAUSES


@pytest.mark.parametrize(
    ("nanoseconds", "bucket"), [(0, 0), (8191, 0), (8192, 0), (12288, 1), (16384, 2), (24576, 3), (1 << 60, 47)]
)
def test_pauses_are_divided_by_half_octaves(nanoseconds: int, bucket: int) -> None:
    assert layout.pause_bucket(nanoseconds) == bucket


# --- contexts that the driver measured ---


@settings(max_examples=examples(40))
@given(
    constant=st.integers(0, GIB),
    used=st.integers(0, 4 * GIB),
    counted=st.sampled_from(["same", "other"]),
    measured=st.integers(0, 16 * GIB),
)
def test_a_context_is_charged_as_measured_within_its_bounds(constant: int, used: int, counted: str, measured: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="region-"))
    region = Region.create(folder / "gpu0.region", device_bytes=80 * GIB)
    region.admit(TenantLimits(name="chat", cap_bytes=80 * GIB, context_bytes=constant))
    slot = attach(region, "chat", used)
    slot.context_bytes = constant
    seen = Measured(counted_bytes=used if counted == "same" else used + 1, measured_bytes=measured)
    region.charge_contexts({(slot.pid, slot.start_ticks): seen, (1, 1): seen})
    expected = max(constant, min(max(measured - used, 0), MOST_CONTEXT_BYTES)) if counted == "same" else constant
    assert slot.context_bytes == expected
    assert region.read_use()[0].used_bytes == used + expected
    del slot
    region.close()
    shutil.rmtree(folder)


def test_bounds_of_the_gate_reach_the_library_field_by_field(tmp_path: Path) -> None:
    names = list(GateBounds.__dataclass_fields__)
    bounds = GateBounds(**{name: number + 1 for number, name in enumerate(names)})
    region = Region.create(tmp_path / "gpu0.region", device_bytes=GIB, device="GPU-1", bounds=bounds, mode=0o640)
    assert [getattr(region.header, name) for name in names] == list(range(1, len(names) + 1))
    assert region.header.device == b"GPU-1"
    assert region.path.stat().st_mode & 0o777 == 0o640
    assert ctypes.sizeof(layout.Header) == region.header.header_bytes
    assert GateBounds().allowance_ppm < PPM
    region.close()
