"""Any sequence of writes, restarts and crashes: memory, file and a plain dictionary hold the same."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from tests.examples import examples
from tests.ledger.test_ledger import make_instance

from aimgpu.domain import Ask, Auto, Deployment, Grant, Instance, InstanceState
from aimgpu.errors import Conflict
from aimgpu.ledger import Ledger, Retry, read_grants
from aimgpu.ledger.read_only import read_deployments, read_instances

CAPACITY = {"gpu/spx-0": 100, "gpu/spx-1": 60}
PARTITIONS = st.sampled_from(sorted(CAPACITY))
NAMES = st.sampled_from(["chat", "code", "embed"])
SIZES = st.integers(1, 70)


class LedgerMachine(RuleBasedStateMachine):
    """Restarts close the file in order; crashes go on with a copy of what the disk has at that moment."""

    charged = Bundle("charged")
    begun = Bundle("begun")

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a busy disk is waited for
        self.folder = Path(tempfile.mkdtemp(prefix="aimgpu-test-ledger-", dir=memory))
        self.generation = 0
        self.count = 0
        self.ledger = Ledger.open(self.path)
        self.instances: dict[str, Instance] = {}
        self.wanted: dict[str, Deployment] = {}
        self.retries: dict[str, Retry] = {}
        self.operations: dict[int, str] = {}

    @property
    def path(self) -> Path:
        return self.folder / f"ledger-{self.generation}"

    def held(self, partition: str) -> int:
        return sum(grant.memory_bytes for grant in self.grants() if grant.partition_id == partition)

    def grants(self) -> Iterator[Grant]:
        for instance in self.instances.values():
            yield from instance.grants

    @initialize(name=NAMES)
    def want_first(self, name: str) -> None:
        self.want(name, 1)

    @rule(name=NAMES, concurrency=st.integers(1, 3))
    def want(self, name: str, concurrency: int) -> None:
        deployment = Deployment(name=name, model="m", ask=Ask(name=name, want=Auto()), concurrency=concurrency)
        self.ledger.want(deployment)
        self.wanted[name] = deployment

    @rule(name=NAMES)
    def unwant(self, name: str) -> None:
        self.ledger.unwant(name)
        self.wanted.pop(name, None)

    @rule(target=charged, size=SIZES, partition=PARTITIONS)
    def charge(self, size: int, partition: str) -> str:
        self.count += 1
        instance = make_instance(f"i{self.count:03d}", size, partition)
        if self.held(partition) + size <= CAPACITY[partition]:
            self.ledger.charge(instance, capacity=CAPACITY)
            self.instances[instance.id] = instance
        else:
            with contextlib.suppress(Conflict):
                self.ledger.charge(instance, capacity=CAPACITY)
                raise AssertionError("more was charged than the partition has")
        return instance.id

    @rule(one=charged, size=SIZES)
    def resize(self, one: str, size: int) -> None:
        instance = self.instances.get(one)
        if instance is None or not instance.grants:
            return
        grant = instance.grants[0]
        if self.held(grant.partition_id) - grant.memory_bytes + size > CAPACITY[grant.partition_id]:
            with contextlib.suppress(Conflict):
                self.ledger.resize(grant.id, size, capacity=CAPACITY)
                raise AssertionError("a grant grew over its partition")
            return
        self.ledger.resize(grant.id, size, capacity=CAPACITY)
        self.instances[one] = replace(instance, grants=(replace(grant, memory_bytes=size),))

    @rule(one=charged, state=st.sampled_from(InstanceState))
    def update(self, one: str, state: InstanceState) -> None:
        if one in self.instances:
            self.instances[one] = replace(self.instances[one], state=state)
            self.ledger.update(self.instances[one])

    @rule(one=consumes(charged))
    def release(self, one: str) -> None:
        expected = self.instances.pop(one).grants if one in self.instances else ()
        assert self.ledger.release(one) == expected

    @rule(one=charged)
    def fail(self, one: str) -> None:
        """It holds nothing and stays to be seen."""
        if one in self.instances:
            failed = replace(self.instances[one], state=InstanceState.FAILED, grants=())
            self.ledger.release(one, keep=failed)
            self.instances[one] = failed

    @rule(target=begun, kind=st.sampled_from(["apply", "partition"]), frees=st.booleans())
    def begin(self, kind: str, *, frees: bool) -> int:
        number = self.ledger.begin(kind, {"kind": kind}, frees=frees)
        assert number not in self.operations
        self.operations[number] = kind
        return number

    @rule(number=consumes(begun))
    def finish(self, number: int) -> None:
        self.ledger.finish(number)
        self.operations.pop(number, None)

    @rule(name=NAMES, failures=st.integers(1, 3))
    def keep_retry(self, name: str, failures: int) -> None:
        self.retries[name] = Retry(deployment=name, reason="it died", failures=failures)
        self.ledger.keep_retry(self.retries[name])

    @rule(name=NAMES)
    def forget_retry(self, name: str) -> None:
        self.ledger.forget_retries(name)
        self.retries.pop(name, None)

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.path)
        assert self.ledger.set_aside is None

    @rule()
    def crash(self) -> None:
        before = self.path
        self.generation += 1
        for suffix in ("", "-wal"):
            shutil.copyfile(before.with_name(before.name + suffix), self.path.with_name(self.path.name + suffix))
        self.ledger.close()
        for file in before.parent.glob(f"{before.name}*"):
            file.unlink()
        self.ledger = Ledger.open(self.path)
        assert self.ledger.set_aside is None

    @invariant()
    def memory_holds_what_was_written(self) -> None:
        assert {one.id: one for one in self.ledger.instances()} == self.instances
        assert {one.name: one for one in self.ledger.deployments()} == self.wanted
        assert {one.deployment: one for one in self.ledger.retries()} == self.retries
        assert {one.id: one.kind for one in self.ledger.operations()} == self.operations

    @invariant()
    def no_partition_is_charged_beyond_its_size(self) -> None:
        for partition, size in CAPACITY.items():
            assert sum(one.memory_bytes for one in self.ledger.grants() if one.partition_id == partition) <= size

    @rule()
    def another_process_looks(self) -> None:
        assert {one.id: one for one in read_instances(self.path)} == self.instances
        assert {one.name: one for one in read_deployments(self.path)} == self.wanted
        assert sorted(one.id for one in read_grants(self.path)) == sorted(one.id for one in self.grants())

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(max_examples=examples(12), stateful_step_count=25)
TestAnySequence = LedgerMachine.TestCase
