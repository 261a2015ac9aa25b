"""Caps hold exactly: under threads, processes, forks, kills, resizes, and with a region that somebody broke."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import Puppet

from aimgpu.domain import Priority
from aimgpu.errors import ShareInUse
from aimgpu.isolation import layout
from aimgpu.isolation.region import Region
from aimgpu.units import GIB, MIB

CUDA = ("libcuda.so.1",)
LINKED = ("libaimgpu.so", "libcuda.so.1")  # sanitizers must be loaded first, so these programs name the library themselves
UNIT = 4 * MIB


def hammer(rig: Any) -> Path:
    path: Path = rig.tools.folder / "hammer"
    if not path.exists():
        rig.tools.program("hammer", link=CUDA if rig.tools.kind == "plain" else LINKED)
    return path


@pytest.mark.parametrize("threads", [8, 64])
def test_threads_in_8_processes_take_exactly_the_cap(rig: Any, threads: int) -> None:
    rig.admit(cap_bytes=1 * GIB)
    rig.driver.call_ns = 50_000
    running = [rig.start(hammer(rig), "greedy", threads, UNIT) for _ in range(8)]
    taken = sum(int(process.stdout.readline()) for process in running)
    assert taken == rig.driver.used == rig.driver.peak == rig.used() == 1 * GIB
    (use,) = rig.region.read_use()
    assert use.denied >= 64
    assert sum(process.used_bytes for process in use.processes) == 1 * GIB


def test_64_threads_of_one_process_take_exactly_the_cap(rig: Any) -> None:
    rig.admit(cap_bytes=1 * GIB)
    process = rig.start(hammer(rig), "greedy", 64, UNIT)
    assert int(process.stdout.readline()) == rig.driver.peak == 1 * GIB


@pytest.mark.parametrize("how", [0, 1])
def test_contexts_count_too(rig: Any, how: int) -> None:
    """With what the driver takes for each process, the tenant holds no byte more than its cap, whatever the order."""
    rig.admit(cap_bytes=1 * GIB, context_bytes=100 * MIB)
    rig.driver.context_bytes = 100 * MIB
    first = rig.start(hammer(rig), "context", how, UNIT)
    assert int(first.stdout.readline()) == 924 * MIB
    for _ in range(3):  # nothing is left, not even for a context
        out, _ = rig.start(hammer(rig), "context", how, UNIT).communicate(timeout=60)
        assert out == "refused 2\n"
    assert rig.driver.used == rig.driver.peak == rig.used() == 1 * GIB
    first.kill()
    first.wait()
    rig.driver.used = rig.driver.peak = 0  # as the real driver does when a process dies
    running = [rig.start(hammer(rig), "context", how, UNIT) for _ in range(4)]
    for process in running:
        process.stdout.readline()
    assert rig.driver.used == rig.driver.peak == rig.used() <= 1 * GIB


def test_looking_at_the_device_costs_nothing(rig: Any) -> None:
    """nvidia-smi, or a front end that reads the card's size, has no context and is not charged for one."""
    rig.admit(cap_bytes=1 * GIB, context_bytes=100 * MIB)
    process = rig.start(hammer(rig), "look", 0)
    assert process.stdout.readline() == f"{GIB} {GIB} 0\n"
    assert rig.region.read_use()[0].processes == ()


@pytest.mark.parametrize("grain", [1, 32 * MIB])
def test_churn_never_passes_the_cap_and_gives_everything_back(rig: Any, grain: int) -> None:
    """Plain, pooled and mapped memory at once; pools that grow by more than was asked for."""
    rig.admit(cap_bytes=1 * GIB)
    rig.driver.pool_grain = grain
    running = [rig.start(hammer(rig), "churn", 8, 300, seed) for seed in range(4)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, (out, err)
    assert rig.driver.peak <= 1 * GIB
    assert rig.driver.peak > 512 * MIB
    rig.region.reap()
    assert rig.used() == 0


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing(make_rig: Callable[[str], Any], kind: str) -> None:
    rig = make_rig(kind)
    rig.admit(cap_bytes=1 * GIB)
    running = [rig.start(hammer(rig), "churn", 8, 100, seed, ASAN_OPTIONS="detect_leaks=0") for seed in range(2)]
    running += [rig.start(hammer(rig), "launch", 200, ASAN_OPTIONS="detect_leaks=0")]
    for process in running:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, (out, err[-4000:])
    assert rig.driver.peak <= 1 * GIB


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_where_contexts_race_for_the_cap(make_rig: Callable[[str], Any], kind: str) -> None:
    rig = make_rig(kind)
    rig.admit(cap_bytes=1 * GIB, context_bytes=100 * MIB)
    rig.driver.context_bytes = 100 * MIB
    running = [rig.start(hammer(rig), "context", 0, UNIT, ASAN_OPTIONS="detect_leaks=0") for _ in range(12)]
    said = [process.stdout.readline() for process in running]
    assert any(line.startswith("refused") for line in said)
    assert rig.driver.peak <= 1 * GIB
    for process in running:
        out, err = process.communicate("\n", timeout=180)
        assert process.returncode == 0, (out, err[-4000:])


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers_find_nothing_in_the_gate(make_rig: Callable[[str], Any], kind: str) -> None:
    """Threads of two best-effort tenants beside a critical one: turns, batches, waits and wake-ups."""
    rig = make_rig(kind)
    for name, priority in (("critical", Priority.HIGH), ("first", Priority.LOW), ("second", Priority.LOW)):
        rig.admit(name, priority=priority)
    rig.driver.kernel_ns = 200_000
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    rig.run(hammer(rig), "launch", 1, tenant="critical", **options)
    running = [rig.start(hammer(rig), "launchers", 4, 60, tenant=name, **options) for name in ("critical", "first", "second")]
    for process in running:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, (out, err[-4000:])
    assert rig.driver.launches == 1 + 3 * 4 * 60


def test_a_process_that_becomes_another_program_starts_anew(rig: Any) -> None:
    """Pid and start time stay the same over an exec; the memory does not."""
    rig.admit(cap_bytes=64 * MIB)
    process = rig.start(hammer(rig), "exec", UNIT)
    assert int(process.stdout.readline()) == 64 * MIB
    (use,) = rig.region.read_use()
    assert [slot.used_bytes for slot in use.processes] == [64 * MIB]


def test_a_killed_process_gives_back_what_it_held(rig: Any) -> None:
    """Twenty times: one takes everything and is killed, the next one takes everything."""
    rig.admit(cap_bytes=256 * MIB)
    for _ in range(20):
        process = rig.start(hammer(rig), "greedy", 2, UNIT)
        assert int(process.stdout.readline()) == 256 * MIB
        process.kill()
        process.wait()
        rig.driver.used = 0  # as the real driver does when a process dies


def test_kills_at_random_moments_leave_the_books_right(rig: Any) -> None:
    rig.admit(cap_bytes=512 * MIB)
    dice = random.Random(7)
    for round_ in range(15):
        running = [rig.start(hammer(rig), "churn", 4, 1_000_000, round_) for _ in range(3)]
        while rig.driver.allocations < 40 * (round_ + 1) + dice.randrange(400):
            assert all(process.poll() is None for process in running)
        for process in running:  # stopped first: this driver does not free what the dead held
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert rig.driver.peak <= 512 * MIB
        rig.region.reap()
        assert rig.used() == 0
        rig.driver.used = rig.driver.peak = 0


def test_children_have_their_own_account(rig: Any) -> None:
    """A forked child, and one made by a bare clone that ran no handlers, are charged for themselves."""
    rig.admit(cap_bytes=1 * GIB)
    process = rig.start(hammer(rig), "fork", 1, UNIT)
    assert int(process.stdout.readline()) == 5 * UNIT
    (use,) = rig.region.read_use()
    assert sorted(slot.used_bytes for slot in use.processes) == [UNIT, 2 * UNIT, 2 * UNIT]
    assert rig.driver.used == 5 * UNIT
    children = [slot.pid for slot in use.processes if slot.pid != process.pid]
    process.kill()
    process.wait()
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_a_program_that_closes_every_descriptor_is_still_held(rig: Any) -> None:
    rig.admit(cap_bytes=64 * MIB)
    process = rig.start(hammer(rig), "closed", UNIT)
    assert int(process.stdout.readline()) == rig.driver.used == 64 * MIB


def test_a_33rd_process_is_refused_until_one_dies(rig: Any) -> None:
    rig.admit(cap_bytes=1 * GIB)
    running = [rig.start(hammer(rig), "fork", 1, UNIT) for _ in range(10)]  # three processes each
    for process in running:
        process.stdout.readline()
    children = [slot.pid for use in rig.region.read_use() for slot in use.processes]
    assert len(children) == 30
    last = [rig.start(hammer(rig), "closed", 256 * MIB) for _ in range(3)]
    counts = sorted(int(process.stdout.readline()) for process in last)
    assert counts[0] == 0
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for process in running:
        process.wait()
    process = rig.start(hammer(rig), "closed", 64 * MIB)
    assert int(process.stdout.readline()) > 0


@pytest.mark.parametrize("how", [0, 1])
def test_a_33rd_process_gets_no_context_either(rig: Any, how: int) -> None:
    """It would cost memory that is charged to nobody, again and again."""
    rig.admit(cap_bytes=GIB, context_bytes=10 * MIB)
    rig.driver.context_bytes = 10 * MIB
    running = [rig.start(hammer(rig), "context", how, 2 * GIB) for _ in range(32)]
    for process in running:
        assert process.stdout.readline() == "0\n"
    for _ in range(2):
        out, _ = rig.start(hammer(rig), "context", how, 2 * GIB).communicate("\n", timeout=60)
        assert out == "refused 2\n"
    assert rig.driver.used <= rig.used() == 320 * MIB
    running[0].kill()
    running[0].communicate()
    last = rig.start(hammer(rig), "context", how, 2 * GIB)
    assert last.stdout.readline() == "0\n"


def test_a_cap_can_change_while_the_tenant_runs(rig: Any) -> None:
    rig.admit(cap_bytes=128 * MIB)
    process = rig.start(hammer(rig), "greedy", 1, UNIT)
    process.stdout.readline()
    with pytest.raises(ShareInUse, match="128MiB"):
        rig.region.resize("tenant", 127 * MIB)
    assert rig.region.read_use()[0].cap_bytes == 128 * MIB
    rig.region.resize("tenant", 192 * MIB)
    second = rig.start(hammer(rig), "greedy", 1, UNIT)
    assert int(second.stdout.readline()) == 64 * MIB


def test_resizes_race_with_allocations_and_neither_wins_unfairly(rig: Any) -> None:
    """After every resize that was accepted, the driver holds no more than the new cap."""
    rig.admit(cap_bytes=512 * MIB)
    running = [rig.start(hammer(rig), "churn", 4, 2_000, seed) for seed in range(3)]
    dice, refused = random.Random(3), 0
    while any(process.poll() is None for process in running):
        cap = dice.randrange(64, 1024) * MIB
        try:
            rig.region.resize("tenant", cap)
        except ShareInUse:
            refused += 1
            continue
        assert rig.driver.used <= cap
    assert all(process.returncode == 0 for process in running)
    assert refused > 0


def broken_regions() -> dict[str, Callable[[bytearray], bytearray]]:
    def put(field: str, value: int) -> Callable[[bytearray], bytearray]:
        def change(data: bytearray) -> bytearray:
            layout.Header.from_buffer(data).__setattr__(field, value)
            return data

        return change

    return {
        "of another version": put("version", layout.VERSION + 1),
        "with another magic": put("magic", 1),
        "with another layout": put("tenant_bytes", 8),
        "of another boot": put("boot", 5),
        "truncated": lambda data: data[:1000],
        "empty": lambda _: bytearray(),
        "noise": lambda data: bytearray(random.Random(1).randbytes(len(data))),
    }


@pytest.mark.parametrize("name", sorted(broken_regions()))
@pytest.mark.parametrize("fail", ["closed", "open"])
def test_a_region_that_cannot_be_understood_fails_as_told_and_says_so(rig: Any, name: str, fail: str) -> None:
    rig.admit(cap_bytes=64 * MIB)
    data = bytearray(rig.region.path.read_bytes())
    other = rig.folder / "broken.region"
    other.write_bytes(broken_regions()[name](data))
    rig.driver.device_bytes = 128 * MIB
    process = rig.start(hammer(rig), "greedy", 1, UNIT, AIMGPU_REGION=str(other), AIMGPU_FAIL=fail)
    out, err = process.communicate("\n", timeout=60)
    assert int(out) == (0 if fail == "closed" else 128 * MIB)
    assert f"fail {fail}" in err
    assert str(other) in err


@pytest.mark.parametrize(("fail", "said"), [("closed", "refused 2\n"), ("open", "0\n")])
def test_without_a_region_a_context_fails_as_told_too(rig: Any, fail: str, said: str) -> None:
    missing = str(rig.folder / "missing.region")
    process = rig.start(hammer(rig), "context", 0, 200 * GIB, AIMGPU_REGION=missing, AIMGPU_FAIL=fail)
    out, err = process.communicate("\n", timeout=60)
    assert out == said
    assert f"fail {fail}" in err


def test_a_withdrawn_grant_allows_nothing_more(rig: Any) -> None:
    rig.admit(cap_bytes=64 * MIB)
    process = rig.start(hammer(rig), "greedy", 1, UNIT)
    process.stdout.readline()
    rig.region.dismiss("tenant")
    rig.admit("another", cap_bytes=64 * MIB)  # the same slot, another owner
    late = rig.start(hammer(rig), "greedy", 1, UNIT)
    out, err = late.communicate("\n", timeout=60)
    assert int(out) == 0
    assert "knows no such tenant" in err
    assert rig.used("another") == 0


def test_a_device_that_was_not_granted_gives_nothing(rig: Any) -> None:
    """Two regions are named, the second is missing: only the first device can be used."""
    rig.admit(cap_bytes=64 * MIB)
    paths = f"{rig.folder / 'missing'}:{rig.region.path}"
    out, err = rig.start(hammer(rig), "greedy", 1, UNIT, AIMGPU_REGION=paths).communicate("\n", timeout=60)
    assert int(out) == 0
    assert "No such file" in err


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*(("plain", seed) for seed in range(6)), *(pytest.param("asan", seed, marks=pytest.mark.rest) for seed in (0, 1))],
)
def test_a_region_that_is_scribbled_on_harms_nobody(make_rig: Callable[[str], Any], kind: str, seed: int) -> None:
    """Random bytes all over the live region: programs end in their own time, without a signal, and never pass the device."""
    rig = make_rig(kind)
    rig.admit(cap_bytes=512 * MIB)
    rig.admit("other", cap_bytes=512 * MIB)
    dice = random.Random(seed)
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    running = [rig.start(hammer(rig), "churn", 4, 800, seed, **options)]
    running += [rig.start(hammer(rig), "launch", 50, tenant="other", **options)]
    with rig.region.path.open("r+b") as file:
        while any(process.poll() is None for process in running):
            tenants = 4096 + 2 * ctypes.sizeof(layout.Tenant)
            place = dice.choice([dice.randrange(200, 600), dice.randrange(4096, tenants), dice.randrange(layout.REGION_BYTES)])
            file.seek(place)
            file.write(dice.randbytes(dice.choice([1, 4, 8])))
            file.flush()
    assert [process.returncode for process in running] == [0, 0], [process.stderr.read()[-3000:] for process in running]
    assert rig.driver.peak <= rig.driver.device_bytes


@pytest.mark.parametrize("seed", range(12))
def test_a_fuzzed_region_file_is_refused_or_obeyed(rig: Any, seed: int) -> None:
    """Bytes changed before the start: the library and Python agree whether the file is a region at all."""
    rig.admit(cap_bytes=64 * MIB)
    dice = random.Random(seed)
    data = bytearray(rig.region.path.read_bytes())
    for _ in range(dice.randrange(1, 6)):
        data[dice.randrange(200) if seed % 2 else dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    other = rig.folder / "fuzzed.region"
    other.write_bytes(data)
    rig.driver.device_bytes = 256 * MIB
    process = rig.start(hammer(rig), "greedy", 2, UNIT, AIMGPU_REGION=str(other))
    _, err = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    try:
        Region.open(other).close()
    except Exception:  # noqa: BLE001 any refusal counts
        assert "refused (fail closed)" in err


def test_a_musl_program_does_not_start(rig: Any) -> None:
    """Another C library cannot load ours, and its loader gives up: it fails closed, with the reason in its log."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("no musl (Debian: apt-get install musl-tools)")
    path = rig.folder / "musl.c"
    path.write_text('#include <stdio.h>\nint main(void) { puts("ran"); return 0; }\n')
    subprocess.run(["musl-gcc", "-o", rig.folder / "musl", path], check=True, capture_output=True)
    rig.admit()
    process = rig.start(rig.folder / "musl")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (127, "")
    assert "libaimgpu.so" in err


def test_a_static_program_is_not_held(rig: Any) -> None:
    """What the library cannot do, said plainly; the watchdog is there to notice it."""
    source = '#include <stdio.h>\nint main(void) { puts("unheld"); return 0; }\n'
    path = rig.folder / "static.c"
    path.write_text(source)
    built = subprocess.run(["cc", "-static", "-o", rig.folder / "static", path], capture_output=True, check=False)
    if built.returncode != 0:
        pytest.skip("no static libc here")
    rig.admit()
    assert rig.run(rig.folder / "static") == "unheld\n"
    assert rig.region.read_use()[0].processes == ()


def test_places_whose_processes_died_over_claiming_them_are_taken_again(rig: Any) -> None:
    rig.admit(cap_bytes=10 * GIB)
    for slot in rig.region.tenant_of("tenant").processes:
        slot.state = layout.CLAIMED
    assert Puppet(rig, "tenant").do("allocate 1024") == 0
    assert rig.used() == GIB
