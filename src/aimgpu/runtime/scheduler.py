"""Many models on the partitions of one GPU, with exact accounting."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import Self

from aimgpu.control.snapshots import foreign_bytes
from aimgpu.domain import Ask, Device, Grant, Level, Memory, Priority, Refusal
from aimgpu.errors import AimGpuError, InvalidInput, NotFound, NotInitialized
from aimgpu.placement import DeviceState, NodeState, ReasonCode, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.procfs import read_tree
from aimgpu.runtime.accounting import accounting_problems
from aimgpu.runtime.partitioner import MemoryPartition, ROCmPartitioner, RuntimePartitioner, find_partition, memory_partitions
from aimgpu.runtime.priorities import parse_priority
from aimgpu.runtime.sizing import ModelSizingConfig, gigabytes, is_number, round_down, round_up, shown

_NODE = "here"
_MOST_REMOVED = 1000  # models that are remembered after they were removed

Scheduled = tuple[bool, int | None, str | None]


class ModelStatus(StrEnum):
    """A scheduled model has its memory until it is removed, whether it runs or not."""

    SCHEDULED = "scheduled"
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstance:
    """A scheduled model, where it is and what it was charged."""

    model_id: str
    precision: str
    partition_id: int
    memory_bytes: int  # what was charged, and will be given back
    priority: Priority | int  # as it was given, a number from 1 to 10 as that number
    status: ModelStatus
    grant: Grant
    pid: int | None = None  # of its process, where set_status() was given it
    reason: str | None = None  # why it failed or stopped, as set_status() was given it


class ModelScheduler:
    """Safe to use from several threads. A model is charged once however often it is scheduled.

    One scheduler at a time grants a GPU: a second one raises LedgerOwned until the first is closed. On a real GPU that holds
    for other processes and for the daemon too. Without a `partitioner` it has a simulated GPU 0: initialize
    `scheduler.partitioner`.
    """

    def __init__(self, partitioner: RuntimePartitioner | None = None, sizing_config: ModelSizingConfig | None = None) -> None:
        self.partitioner: RuntimePartitioner = ROCmPartitioner() if partitioner is None else partitioner
        self._sizing = sizing_config or ModelSizingConfig()
        self._models: dict[str, ModelInstance] = {}
        self._removed: dict[str, None] = {}
        self._lock = self.partitioner.claim.lock
        self.partitioner.claim.take(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; another scheduler may then grant this GPU."""
        with self._lock:
            for model_id in tuple(self._models):
                self.unschedule_model(model_id)
            if self.partitioner.claim.holder is self:
                self.partitioner.claim.give_back()

    def schedule_model(
        self,
        model_id: str,
        precision: str | None = None,
        *,
        preferred_partition: int | None = None,
        priority: Priority | str | int = Priority.MEDIUM,
    ) -> Scheduled:
        """(True, partition, None), or (False, None, reason) with nothing changed.

        `precision` None is as the model is published. Where a preferred partition is full, another is taken and the third value
        names it; one that does not exist is refused. `priority` is low, medium or high, or a number from 1 to 10.
        """
        with self._lock:
            try:
                self.partitioner.claim.take(self)
                size = self._sizing.get_model_size(model_id, precision)
                ask = Ask(
                    name=model_id,
                    deployment=model_id,
                    want=Memory(memory_bytes=size.memory_bytes),
                    footprint_bytes=size.memory_bytes,
                    priority=parse_priority(priority),
                )
                known = self._models.get(model_id)
                if known is not None:
                    return _again(known, size.precision)
                given = priority if isinstance(priority, int) else ask.priority
                return self._place(ask, size.precision, given, preferred_partition)
            except AimGpuError as error:
                return False, None, str(error)

    def unschedule_model(self, model_id: str) -> tuple[bool, str | None]:
        """Give back exactly what was charged."""
        with self._lock:
            if self._models.pop(model_id, None) is None:
                return False, f"{model_id} is not scheduled"
            self._removed[model_id] = None
            if len(self._removed) > _MOST_REMOVED:
                del self._removed[next(iter(self._removed))]
        return True, None

    def set_status(
        self, model_id: str, status: ModelStatus | str, *, pid: int | None = None, reason: str | None = None
    ) -> ModelInstance | None:
        """What the caller knows of the model; `removed` gives its memory back.

        The process with this `pid`, and its children, count as the model's own and not as foreign. Raises NotFound for a model
        that is not scheduled, and InvalidInput for a status that does not exist or a pid that cannot be.
        """
        if pid is not None and (not is_number(pid) or not isinstance(pid, int) or pid <= 0):
            raise InvalidInput(f"pid cannot be {shown(pid)}", hint="Give the number of the model's process.")
        if status not in list(ModelStatus):
            raise InvalidInput(f"{shown(status)} is not a status", hint=f"Known: {', '.join(ModelStatus)}.")
        with self._lock:
            known = self._models.get(model_id)
            if known is None:
                raise NotFound(f"{model_id} is not scheduled", hint="Call schedule_model() first.")
            if status == ModelStatus.REMOVED:
                self.unschedule_model(model_id)
                return None
            new = replace(known, status=ModelStatus(status), reason=reason, pid=known.pid if pid is None else pid)
            self._models[model_id] = new
            return new

    def get_model(self, model_id: str) -> ModelInstance | None:
        """None where it is not scheduled."""
        with self._lock:
            return self._models.get(model_id)

    def get_model_status(self, model_id: str) -> ModelStatus | None:
        """`removed` for a model that was scheduled before; None for one that never was."""
        with self._lock:
            found = self._models.get(model_id)
            if found is not None:
                return found.status
            return ModelStatus.REMOVED if model_id in self._removed else None

    def list_models(self) -> tuple[ModelInstance, ...]:
        """Every scheduled model, in the order in which they were scheduled."""
        with self._lock:
            return tuple(self._models.values())

    def model_ids(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(model.model_id for model in self.list_models())

    def partitions(self) -> tuple[MemoryPartition, ...]:
        """Every partition with what is charged on it now, and what is reserved or used by other processes."""
        with self._lock:
            device = self.partitioner.device()
            return memory_partitions(device, self._grants(), self._other_bytes(device))

    def validate(self) -> tuple[str, ...]:
        """What is wrong with the accounting, one sentence each; empty where nothing is.

        A layout that was changed by someone else, a partition that is charged more than it has or that other processes have
        filled, a model that uses more than it was granted.
        """
        with self._lock:
            try:
                device, usage = self.partitioner.device(), self.partitioner.usage()
            except NotInitialized as error:
                return (error.message,)
            found = list(accounting_problems(device, self._grants(), usage, self._processes()))
            for partition in memory_partitions(device, self._grants(), self._other_bytes(device)):
                free = partition.size_bytes - partition.allocated_bytes - partition.other_bytes
                if partition.allocated_bytes <= partition.size_bytes and free < 0 < partition.allocated_bytes:
                    found.append(f"other processes use memory of {partition.stable_id} that was granted to models")
            return tuple(found)

    def _place(self, ask: Ask, precision: str, priority: Priority | int, preferred: int | None) -> Scheduled:
        device = self.partitioner.device()
        state = DeviceState(device=device, grants=self._grants(), foreign_bytes=self._other_bytes(device))
        snapshot = Snapshot(nodes=(NodeState(name=_NODE, devices=(state,)),))
        note = None
        decision = None
        if preferred is not None:
            decision = decide(snapshot, replace(ask, partition_id=find_partition(device, preferred).id))
            if isinstance(decision, Refusal):
                note = f"partition {preferred} does not have the room"
        if decision is None or isinstance(decision, Refusal):
            decision = decide(snapshot, ask)
        if isinstance(decision, Refusal):
            return False, None, self._why(ask, decision, device)
        (slot,) = decision.slots
        index = next(each.index for each in device.layout.partitions if each.id == slot.partition_id)
        grant = slot.granted(f"{ask.name}/0", ask.name, ask.name, ask.priority, Level.NONE)
        self._models[ask.name] = ModelInstance(
            model_id=ask.name,
            precision=precision,
            partition_id=index,
            memory_bytes=slot.memory_bytes,
            priority=priority,
            status=ModelStatus.SCHEDULED,
            grant=grant,
        )
        self._removed.pop(ask.name, None)
        return True, index, None if note is None else f"{note}; partition {index} was taken instead"

    def _why(self, ask: Ask, refusal: Refusal, device: Device) -> str:
        """In GB, as everything here."""
        if refusal.reasons[0].code not in {ReasonCode.MEMORY, ReasonCode.FOREIGN}:
            return refusal.summary
        best = max(memory_partitions(device, self._grants(), self._other_bytes(device)), key=lambda each: each.available_bytes)
        other = f", {gigabytes(best.other_bytes)} GB reserved or used by other processes" if best.other_bytes else ""
        has = f"{round_down(best.available_bytes)} of {gigabytes(best.size_bytes)} GB available{other}"
        return f"{ask.name} needs {round_up(ask.footprint_bytes or 0)} GB; partition {best.partition_id} has the most, {has}"

    def _grants(self) -> tuple[Grant, ...]:
        return tuple(model.grant for model in self._models.values())

    def _other_bytes(self, device: Device) -> dict[str, int]:
        """By partition: the reserve, and what processes that are not of these models were measured to use."""
        ours = frozenset(pid for pid, _ in self._processes())
        foreign = foreign_bytes(device, self.partitioner.usage(), self._grants(), ours)
        reserve = self.partitioner.reserve_bytes
        unknown = foreign.get("", 0)
        return {each.id: reserve + unknown + foreign.get(each.id, 0) for each in device.layout.partitions}

    def _processes(self) -> Iterator[tuple[int, Grant]]:
        for model in self._models.values():
            if model.pid is not None:
                yield from ((pid, model.grant) for pid in {model.pid, *read_tree(model.pid)})


def _again(known: ModelInstance, precision: str) -> Scheduled:
    if known.precision == precision:
        return True, known.partition_id, None
    why = f"{known.model_id} is scheduled as {known.precision}; unschedule it before scheduling it as {precision}"
    return False, None, why
