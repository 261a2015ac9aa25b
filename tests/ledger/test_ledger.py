import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aimgpu.domain import Ask, Auto, ByClass, Deployment, Grant, Instance, InstanceState, Level, Priority, QueueSettings
from aimgpu.errors import Conflict, LedgerFailed, LedgerFull, LedgerOwned
from aimgpu.ledger import Ledger, Owner

DEPLOYMENT = Deployment(name="chat", model="m", ask=Ask(name="chat", want=Auto()))
CAPACITY = {"gpu/spx-0": 100, "gpu/spx-1": 50}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite3")
    yield ledger
    ledger.close()


def make_instance(name: str, memory_bytes: int, partition: str = "gpu/spx-0") -> Instance:
    grant = Grant(
        id=f"{name}/0",
        instance_id=name,
        deployment=name,
        node="here",
        device_id="gpu",
        partition_id=partition,
        memory_bytes=memory_bytes,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )
    return Instance(
        id=name,
        deployment=name,
        replica=0,
        model="m",
        engine="e",
        launcher="process",
        state=InstanceState.QUEUED,
        grants=(grant,),
    )


def test_what_is_charged_is_read_back_and_what_is_released_is_the_same_record(ledger: Ledger) -> None:
    instance = make_instance("a", 60)
    ledger.charge(instance, capacity=CAPACITY)
    assert ledger.instances() == (instance,)
    assert ledger.grants() == instance.grants
    assert ledger.release("a") == instance.grants
    assert ledger.grants() == ()
    assert ledger.instances() == ()


def test_a_partition_is_never_charged_beyond_its_size_and_nothing_of_the_try_stays(ledger: Ledger) -> None:
    ledger.charge(make_instance("a", 60), capacity=CAPACITY)
    with pytest.raises(Conflict, match="40 bytes left"):
        ledger.charge(make_instance("b", 10, "gpu/spx-1"), make_instance("c", 41), capacity=CAPACITY)
    assert [grant.instance_id for grant in ledger.grants()] == ["a"]
    assert [instance.id for instance in ledger.instances()] == ["a"]
    ledger.charge(make_instance("c", 40), capacity=CAPACITY)


def test_settings_that_change_while_it_runs_concern_its_own_instances_of_the_former_revision(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "own.sqlite3")
    ledger.want(DEPLOYMENT)
    revisions = {"chat": "r1", "older": "r0", "other": "r1"}
    for name, revision in revisions.items():
        instance = replace(make_instance(name, 10), revision=revision)
        ledger.charge(replace(instance, deployment="other" if name == "other" else "chat"), capacity=CAPACITY)
    urgent = replace(DEPLOYMENT, ask=replace(DEPLOYMENT.ask, priority=Priority.HIGH))
    ledger.amend(urgent, former="r1", revision="r2")
    ledger.close()
    again = Ledger.open(tmp_path / "own.sqlite3")
    for each in (ledger, again):
        assert each.deployments() == (urgent,)
        assert {one.id: one.revision for one in each.instances()} == revisions | {"chat": "r2"}
        high = [grant.instance_id for grant in each.grants() if grant.priority is Priority.HIGH]
        assert high == ["chat"]
    again.close()
    with contextlib.closing(Ledger.open(tmp_path / "empty.sqlite3")) as empty, pytest.raises(Conflict):
        empty.amend(urgent, former="r1", revision="r2")


def test_an_instance_is_never_charged_twice(ledger: Ledger) -> None:
    ledger.charge(make_instance("a", 10), capacity=CAPACITY)
    with pytest.raises(Conflict, match="charged already"):
        ledger.charge(make_instance("a", 10), capacity=CAPACITY)
    assert len(ledger.grants()) == 1


def test_a_partition_that_is_not_there_is_not_charged(ledger: Ledger) -> None:
    with pytest.raises(Conflict, match="no partition"):
        ledger.charge(make_instance("a", 10, "gpu/cpx-3"), capacity=CAPACITY)


def test_a_failed_instance_stays_to_be_seen_and_holds_nothing(ledger: Ledger) -> None:
    instance = make_instance("a", 10)
    ledger.charge(instance, capacity=CAPACITY)
    ledger.release("a", keep=replace(instance, state=InstanceState.FAILED, last_lines=("boom",)))
    (kept,) = ledger.instances()
    assert (kept.state, kept.last_lines, kept.grants) == (InstanceState.FAILED, ("boom",), ())


def test_releasing_twice_gives_back_once(ledger: Ledger) -> None:
    ledger.charge(make_instance("a", 10), capacity=CAPACITY)
    assert len(ledger.release("a")) == 1
    assert ledger.release("a") == ()


def test_updating_what_is_not_there_fails(ledger: Ledger) -> None:
    with pytest.raises(LedgerFailed):
        ledger.update(make_instance("a", 1))


def test_eight_threads_never_charge_more_than_there_is(ledger: Ledger) -> None:
    def charge_some(worker: int) -> None:
        for number in range(10):
            with contextlib.suppress(Conflict):
                ledger.charge(make_instance(f"{worker}-{number}", 7), capacity=CAPACITY)

    workers = [threading.Thread(target=charge_some, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(grant.memory_bytes for grant in ledger.grants()) == 98


def test_operations_are_there_until_finished(tmp_path: Path) -> None:
    first = Ledger.open(tmp_path / "l")
    number = first.begin("partition", {"device": "gpu"})
    first.close()
    second = Ledger.open(tmp_path / "l")
    (operation,) = second.operations()
    assert (operation.id, operation.kind, operation.body) == (number, "partition", {"device": "gpu"})
    second.finish(number)
    assert second.operations() == ()
    second.close()


def test_deployments_are_kept_over_a_restart(tmp_path: Path) -> None:
    deployment = Deployment(name="chat", model="m", ask=Ask(name="chat", want=Auto()))
    first = Ledger.open(tmp_path / "l")
    first.want(deployment)
    first.close()
    second = Ledger.open(tmp_path / "l")
    assert second.deployments() == (deployment,)
    second.unwant("chat")
    assert second.deployments() == ()
    second.close()


@pytest.mark.parametrize("damage", ["garbage", "page", "row"])
def test_a_corrupt_file_is_kept_aside_and_a_new_one_begun(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "l"
    ledger = Ledger.open(path)
    for number in range(50):
        ledger.charge(make_instance(f"i{number}", 1), capacity=CAPACITY)
    ledger.close()
    if damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "page":
        data = bytearray(path.read_bytes())
        data[4096 : 4096 * 3] = b"\xff" * (4096 * 2)
        path.write_bytes(data)
    else:
        connection = sqlite3.connect(path)
        connection.execute("UPDATE instances SET body = '{}'")
        connection.commit()
        connection.close()
    before = path.read_bytes()
    reopened = Ledger.open(path)
    assert reopened.set_aside is not None
    assert reopened.set_aside.read_bytes() == before
    assert reopened.instances() == ()
    reopened.charge(make_instance("a", 1), capacity=CAPACITY)
    reopened.close()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ledger import CAPACITY, make_instance
from aimgpu.errors import LedgerFull
from aimgpu.ledger import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger.open(Path({path!r}))
done = 0
connection = ledger._connection
connection.execute("PRAGMA max_page_count = 12")
try:
    for number in range(100_000):
        ledger.charge(make_instance("i%06d" % number + "x" * 500, 1), capacity={{"gpu/spx-0": 10**9}})
        done += 1
except LedgerFull as error:
    print(done, len(ledger.grants()), len(ledger.instances()), bool(error.hint))
"""


def test_a_full_disk_is_a_clear_error_and_nothing_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "l"
    script = FULL_DISK.format(tests=str(Path(__file__).parent), path=str(path))
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    done, grants, instances = map(int, found[:3])
    assert done > 0
    assert done == grants == instances
    assert found[3] == "True"
    reopened = Ledger.open(path)
    assert len(reopened.grants()) == done
    reopened.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_what_is_held_can_be_given_back_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        ledger = Ledger.open(disk / "ledger.sqlite3")
        ledger.want(DEPLOYMENT)
        ledger.charge(make_instance("a", 60), capacity=CAPACITY)
        fill_disk(disk)
        with pytest.raises(LedgerFull):
            charge_for_ever(ledger)
        for instance in ledger.instances():
            ledger.update(replace(instance, state=InstanceState.DRAINING))
            ledger.release(instance.id)
        ledger.unwant(DEPLOYMENT.name)
        assert (ledger.deployments(), ledger.instances(), ledger.grants()) == ((), (), ())
        ledger.close()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def charge_for_ever(ledger: Ledger) -> None:
    """The write-ahead log may have some room of its own left."""
    for number in itertools.count():
        ledger.charge(make_instance(f"b{number}", 1, "gpu/spx-1"), capacity={"gpu/spx-1": 10**9})


def fill_disk(folder: Path) -> None:
    with (folder / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


OWNER = """
from pathlib import Path
from aimgpu.ledger import Owner
owner = Owner.acquire(Path({folder!r}))
print("got", flush=True)
input()
"""


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    script = OWNER.format(folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "got\n"
        with pytest.raises(LedgerOwned, match=f"pid {first.pid}"):
            Owner.acquire(tmp_path)
        first.kill()
        first.wait()
    Owner.acquire(tmp_path).release()


def test_an_owner_that_is_released_twice_closes_nothing_of_others(tmp_path: Path) -> None:
    owner = Owner.acquire(tmp_path)
    number = owner._descriptor
    owner.release()
    others = os.open(tmp_path / "owner.lock", os.O_RDONLY)
    try:
        assert others == number, "the kernel gives the lowest free number"
        owner.release()
        os.fstat(others)
    finally:
        os.close(others)


def test_what_the_ledger_writes_is_its_users_alone(tmp_path: Path, ledger: Ledger) -> None:
    Owner.acquire(tmp_path).release()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.keys() >= {"ledger.sqlite3", "ledger.sqlite3.reserve", "owner.lock"}
    assert set(modes.values()) == {0o600}


OWNER_WITH_CHILD = """
import subprocess, sys
from pathlib import Path
from aimgpu.ledger import Owner
owner = Owner.acquire(Path({folder!r}))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
print(child.pid, flush=True)
input()
"""


def test_a_killed_owner_leaves_no_lock_to_the_engine_that_it_started(tmp_path: Path) -> None:
    """The engine lives on, with every inheritable descriptor of the daemon; the next daemon must get the lock."""
    script = OWNER_WITH_CHILD.format(folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        engine = int(daemon.stdout.readline())
        with pytest.raises(LedgerOwned):
            Owner.acquire(tmp_path)
        daemon.kill()
        daemon.wait()
    try:
        Owner.acquire(tmp_path).release()
        assert Path(f"/proc/{engine}/exe").exists(), "the engine still runs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)


def test_the_file_is_private(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "l").close()
    assert (tmp_path / "l").stat().st_mode & 0o077 == 0


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ledger import make_instance
from aimgpu.ledger import Ledger
ledger = Ledger.open(Path({path!r}))
number = 0
while True:
    ledger.charge(make_instance("i%d" % number, 2), capacity={{"gpu/spx-0": 10**9}})
    print("+%d" % number, flush=True)
    if number % 3 == 0:
        ledger.release("i%d" % number)
        print("-%d" % number, flush=True)
    number += 1
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for round_number in range(8):
        path = tmp_path / str(round_number)
        script = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline().strip() for _ in range(5 + 7 * round_number)]
            child.kill()
            lines += child.stdout.read().split()
        charged = {int(line[1:]) for line in lines if line.startswith("+")}
        released = {int(line[1:]) for line in lines if line.startswith("-")}
        ledger = Ledger.open(path)
        live = {int(grant.instance_id[1:]) for grant in ledger.grants()}
        assert ledger.set_aside is None
        assert {int(instance.id[1:]) for instance in ledger.instances()} == live
        # The step under way when it died may or may not have happened; everything before it did.
        assert charged - released - live <= {max(charged)}
        assert live - charged <= {max(charged) + 1}
        assert not (live & released)
        ledger.close()


def test_a_write_that_the_disk_refuses_is_rolled_back(tmp_path: Path, ledger: Ledger) -> None:
    ledger.charge(make_instance("a", 10), capacity=CAPACITY)
    ledger._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(LedgerFull):
        ledger.begin("partition", {"filler": "x" * 100_000})
    ledger._connection.execute("PRAGMA max_page_count = 100000")
    assert ledger.operations() == ()
    assert len(ledger.grants()) == 1


def test_a_level_can_only_fall_and_the_bytes_stay(ledger: Ledger) -> None:
    """The watchdog tells what is true; it promises nothing."""
    instance = make_instance("a", 10)
    held = replace(instance, grants=tuple(replace(grant, level=Level.RUNTIME) for grant in instance.grants))
    ledger.charge(held, make_instance("b", 20), capacity=CAPACITY)
    ledger.lower_level("a", Level.ADVISORY)
    ledger.lower_level("a", Level.HARDWARE)
    levels = {grant.instance_id: (grant.level, grant.memory_bytes) for grant in ledger.grants()}
    assert levels == {"a": (Level.ADVISORY, 10), "b": (Level.NONE, 20)}
    (released,) = ledger.release("a")
    assert released.memory_bytes == 10


def test_the_bounds_of_the_queue_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    ledger = Ledger.open(path)
    assert ledger.queue() == QueueSettings()
    settings = QueueSettings(per_gpu=3, longest_wait_ms=ByClass(low=5000))
    ledger.keep_queue(settings)
    ledger.close()
    again = Ledger.open(path)
    assert again.queue() == settings
    again.keep_queue(QueueSettings())
    assert again.queue() == QueueSettings()
    again.close()


def test_writes_together_are_one_transaction(ledger: Ledger) -> None:
    first, second = make_instance("a", 20), make_instance("b", 20)
    with ledger.together():
        ledger.charge(first, capacity=CAPACITY)
        ledger.charge(second, capacity=CAPACITY)
        assert ledger.instances() == ()
    assert {one.id for one in ledger.instances()} == {"a", "b"}


def test_an_error_undoes_all_that_was_written_together(ledger: Ledger) -> None:
    ledger.charge(make_instance("a", 20), capacity=CAPACITY)

    def charge_both() -> None:
        with ledger.together():
            ledger.begin("apply", {})
            ledger.charge(make_instance("b", 20), capacity=CAPACITY)
            ledger.charge(make_instance("a", 20), capacity=CAPACITY)

    with pytest.raises(Conflict):
        charge_both()
    assert [one.id for one in ledger.instances()] == ["a"]
    assert ledger.operations() == ()
    ledger.charge(make_instance("b", 20), capacity=CAPACITY)
