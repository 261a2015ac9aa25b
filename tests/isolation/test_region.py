import ctypes
import fcntl
import multiprocessing
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu import procfs
from aimgpu.domain import Priority
from aimgpu.errors import NotFound, RegionUnusable, ShareInUse
from aimgpu.isolation import building, layout, processes
from aimgpu.isolation.critical_signal import CriticalSignal
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.isolation.request_signals import RegionRequestSignals
from aimgpu.units import GIB, MIB


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    made = Region.create(tmp_path / "gpu0.region", device_bytes=80 * GIB)
    yield made
    made.close()


def attach(region: Region, name: str, used_bytes: int, *, pid: int | None = None) -> layout.ProcessRecord:
    """As the library of a process would."""
    tenant = region._layout.tenants[region._index(name)]
    slot = next(slot for slot in tenant.processes if slot.state == layout.FREE)
    slot.pid = pid or os.getpid()
    slot.start_ticks = procfs.read_start_ticks(os.getpid())
    slot.pid_namespace = processes.own_pid_namespace()
    slot.used_bytes = used_bytes
    slot.state = layout.ACTIVE
    tenant.process_high = layout.PROCESSES
    result: layout.ProcessRecord = slot
    return result


def test_the_layout_is_the_one_that_the_library_was_built_with(tmp_path: Path) -> None:
    """Every field at the same place and of the same size, as the C compiler says."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    names = {"ProcessRecord": "aim_process", "Writer": "aim_writer", "Tenant": "aim_tenant", "Header": "aim_header"}
    lines = [f'printf("{name} %zu\\n", sizeof(struct {c}));' for name, c in names.items()]
    expected = [f"{name} {ctypes.sizeof(getattr(layout, name))}" for name in names]
    for name, c in names.items():
        for field, *_ in getattr(layout, name)._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {c}, {field}), sizeof(((struct {c} *)0)->{field}));'
            )
            found = getattr(getattr(layout, name), field)
            expected.append(f"{name}.{field} {found.offset} {found.size}")
    source = '#include <stddef.h>\n#include <stdio.h>\n#include "region.h"\nint main(void) {' + "\n".join(lines) + "return 0; }"
    (tmp_path / "layout.c").write_text(source)
    program = tmp_path / "layout"
    subprocess.run(["cc", "-I", building.find_sources(), "-o", program, tmp_path / "layout.c"], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert said == expected


def test_a_region_outlives_its_maker_and_is_opened_again(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH, compute_ppm=300_000))
    again = Region.create(region.path, device_bytes=1)
    (use,) = again.read_use()
    assert (use.name, use.cap_bytes, use.priority, use.compute_ppm) == ("chat", GIB, Priority.HIGH, 300_000)
    assert again.header.device_bytes == 80 * GIB
    again.close()


@pytest.mark.parametrize(("field", "value"), [("version", 9), ("magic", 0), ("process_bytes", 1), ("boot", 0)])
def test_another_version_or_boot_is_refused_and_made_anew(region: Region, field: str, value: int) -> None:
    setattr(region.header, field, value)
    with pytest.raises(RegionUnusable) as refused:
        Region.open(region.path)
    assert refused.value.hint
    fresh = Region.create(region.path, device_bytes=GIB)
    assert fresh.read_use() == ()
    fresh.close()


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.region"
    path.write_bytes(b"x" * 100)
    with pytest.raises(RegionUnusable, match="too short"):
        Region.open(path)


@pytest.mark.parametrize("name", ["", "x" * 64, "a:b", "nul\0"])
def test_names_that_the_variables_cannot_carry_are_refused(region: Region, name: str) -> None:
    with pytest.raises(RegionUnusable):
        region.admit(TenantLimits(name=name, cap_bytes=1))


def test_64_tenants_fit_and_a_65th_is_refused(region: Region) -> None:
    for number in range(64):
        region.admit(TenantLimits(name=f"t{number}", cap_bytes=number))
    with pytest.raises(RegionUnusable, match="full"):
        region.admit(TenantLimits(name="more", cap_bytes=1))
    region.dismiss("t5")
    region.dismiss("t5")
    region.admit(TenantLimits(name="more", cap_bytes=1))
    with pytest.raises(NotFound):
        region.resize("t5", 1)


def test_usage_is_the_sum_of_live_processes(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    attach(region, "chat", 100 * MIB)
    dead = attach(region, "chat", 300 * MIB)
    dead.start_ticks += 1  # its pid belongs to somebody else by now
    assert region.read_use()[0].used_bytes == 400 * MIB
    assert region.reap() == 1
    assert region.read_use()[0].used_bytes == 100 * MIB


def test_admitting_again_changes_limits_but_never_below_use(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    attach(region, "chat", 500 * MIB)
    region.admit(TenantLimits(name="chat", cap_bytes=600 * MIB, priority=Priority.LOW))
    assert region.read_use()[0].cap_bytes == 600 * MIB
    with pytest.raises(ShareInUse, match="cannot fall"):
        region.admit(TenantLimits(name="chat", cap_bytes=400 * MIB))
    assert len(region.read_use()) == 1


def test_a_process_of_another_pid_namespace_is_judged_by_the_lock_that_it_holds(region: Region) -> None:
    """Its /proc entry cannot be seen from here; as long as it holds its byte of the region, nothing of it is released."""
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    slot = attach(region, "chat", 100)
    slot.pid_namespace, slot.pid = 1, 77
    other = Region.open(region.path)
    assert other._try_lock(layout.LIFE_OFFSET, fcntl.F_WRLCK)
    assert region.reap() == 0
    other.close()
    assert region.reap() == 1


def test_a_gateway_in_another_pid_namespace_keeps_its_cell(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH))
    other = Region.open(region.path)
    signal = CriticalSignal(other, "chat")
    cell = region._layout.tenants[0].writers[0]
    cell.pid, cell.pid_namespace = 77, 1
    signal.begin()
    assert region.reap() == 0
    assert (cell.running, cell.begun) == (1, 1)
    signal.end()
    assert cell.ended_ns >= cell.begun_ns
    other.close()
    assert region.reap() == 1
    assert cell.pid == 0


def hold_lock(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    region = Region.open(path)
    with region._locked(0):
        ready.set()
        multiprocessing.Event().wait(60)


def test_a_killed_holder_lets_go_of_the_lock(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold_lock, args=(region.path, ready))
    holder.start()
    assert ready.wait(60)
    holder.kill()
    holder.join()
    region.resize("chat", 2 * GIB)
    assert region.read_use()[0].cap_bytes == 2 * GIB


def test_every_writer_has_a_cell_of_its_own(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH))
    first, second = CriticalSignal(region, "chat"), CriticalSignal(region, "chat")
    with first, second:
        assert sum(cell.running for cell in region._layout.tenants[0].writers) == 2
    assert sum(cell.running for cell in region._layout.tenants[0].writers) == 0
    for cell in region._layout.tenants[0].writers:
        cell.pid, cell.start_ticks = 1, procfs.read_start_ticks(1) or 0
        cell.pid_namespace = processes.own_pid_namespace()
    with pytest.raises(RegionUnusable, match="no signal cell"):
        CriticalSignal(region, "chat")


def test_an_instance_is_signalled_where_it_is_a_tenant_and_nowhere_else(region: Region) -> None:
    region.admit(TenantLimits(name="chat-0", cap_bytes=GIB, priority=Priority.HIGH))
    (region.path.parent / "noise.region").write_bytes(b"noise")
    signals = RegionRequestSignals(region.path.parent)
    assert set(signals.find(["chat-0", "unknown"])) == {"chat-0"}
    (signal,) = signals.find(["chat-0", "unknown"])["chat-0"]
    signal.begin()
    cells = region._layout.tenants[0].writers
    assert sum(cell.running for cell in cells) == 1
    signal.end()
    assert sum(cell.running for cell in cells) == 0
    region.admit(TenantLimits(name="code-0", cap_bytes=GIB))
    assert set(signals.find(["chat-0", "code-0"])) == {"chat-0", "code-0"}
    region.path.unlink()
    assert signals.find(["chat-0", "code-0"]) == {}


@settings(max_examples=examples(60))
@given(data=st.binary(min_size=1, max_size=64), at=st.integers(0, layout.REGION_BYTES - 64))
def test_a_fuzzed_region_is_read_or_refused_never_worse(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "gpu.region"
    region = Region.create(path, device_bytes=GIB)
    region.admit(TenantLimits(name="chat", cap_bytes=GIB))
    region.close()
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)
    try:
        opened = Region.open(path)
    except RegionUnusable:
        return
    opened.read_use()
    opened.reap()
    opened.close()


def test_a_cap_that_is_raised_is_never_put_back(region: Region) -> None:
    """A reservation about to be taken back is in the sum for a moment; others may have used the larger cap already."""
    region.admit(TenantLimits(name="chat", cap_bytes=1 * GIB))
    attach(region, "chat", 3 * GIB)
    region.resize("chat", 2 * GIB)
    assert region.tenant_of("chat").cap_bytes == 2 * GIB
    with pytest.raises(ShareInUse):
        region.resize("chat", 1 * GIB)
    assert region.tenant_of("chat").cap_bytes == 2 * GIB


def test_a_place_whose_process_died_over_claiming_it_is_released(region: Region) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=1 * GIB))
    slot = region.tenant_of("chat").processes[0]
    slot.state = layout.CLAIMED
    assert region.reap() == 1
    assert slot.state == layout.FREE


class Sleeper(threading.Thread):
    """Waits for the region as a launch that is held back does."""

    def __init__(self, region: Region) -> None:
        super().__init__(daemon=True)
        self._header = region.header
        self._address = ctypes.addressof(region.header) + layout.Header.wake.offset
        self.woken: bool | None = None  # None: it still waits; False: nobody woke it

    def run(self) -> None:
        number, seconds = _futex_number(), (ctypes.c_long * 2)(20, 0)
        self._header.waiters += 1
        found = ctypes.CDLL(None).syscall(
            number, ctypes.c_void_p(self._address), 0, ctypes.c_uint(self._header.wake), ctypes.byref(seconds), None, 0
        )
        self._header.waiters -= 1
        self.woken = found == 0

    def sleeps(self) -> bool:
        """By what the kernel shows of the thread."""
        try:
            call = Path(f"/proc/self/task/{self.native_id}/syscall").read_text().split()
            return call[:2] == [str(_futex_number()), f"{self._address:#x}"]
        except OSError:
            return False


def _futex_number() -> int:
    return {"x86_64": 202, "aarch64": 98}[os.uname().machine]


@pytest.mark.parametrize("change", ["wake", "yield", "dismiss"])
def test_launches_that_wait_are_woken_when_what_they_wait_for_changes(region: Region, change: str) -> None:
    region.admit(TenantLimits(name="chat", cap_bytes=GIB, priority=Priority.HIGH, compute_ppm=300_000))
    sleeper = Sleeper(region)
    sleeper.start()
    while sleeper.is_alive() and not sleeper.sleeps():
        pass
    if change == "wake":
        region.wake()
    elif change == "yield":
        region.set_yield("chat", 500_000)
    else:
        region.dismiss("chat")
    sleeper.join()
    assert sleeper.woken
