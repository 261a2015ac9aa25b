"""Many models on the Partitions of one GPU, with exact books."""

import threading
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.domain import Ask, Grant, Level, Memory, Priority, Refusal
from aimgpu.errors import AimGpuError
from aimgpu.placement import DeviceState, NodeState, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.runtime.partitioner import MemoryPartition, RuntimePartitioner
from aimgpu.runtime.sizing import ModelSizingConfig

_NODE = "here"


class ModelStatus(StrEnum):
    SCHEDULED = "scheduled"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstance:
    model_id: str
    precision: str
    partition_id: int
    memory_bytes: int  # what was charged, and will be given back
    priority: Priority
    status: ModelStatus
    grant: Grant


class ModelScheduler:
    """Safe to use from several threads. A model is charged once however often it is scheduled."""

    def __init__(self, partitioner: RuntimePartitioner, sizing_config: ModelSizingConfig | None = None) -> None:
        self._partitioner = partitioner
        self._sizing = sizing_config or ModelSizingConfig()
        self._models: dict[str, ModelInstance] = {}
        self._lock = threading.Lock()

    def schedule_model(
        self,
        model_id: str,
        precision: str | None = None,
        *,
        preferred_partition: int | None = None,
        priority: Priority | str = Priority.MEDIUM,
    ) -> tuple[bool, int | None, str | None]:
        """(True, partition, None), or (False, None, why) with nothing changed.

        `precision` None is as the model is published. A preferred partition that does not exist is an error; one that is full
        is passed over only by asking again without it.
        """
        try:
            size = self._sizing.get_model_size(model_id, precision)
            ask = Ask(
                name=model_id,
                deployment=model_id,
                want=Memory(memory_bytes=size.memory_bytes),
                footprint_bytes=size.memory_bytes,
                priority=Priority(priority),
                partition_id=self._name_of(preferred_partition),
            )
        except (AimGpuError, ValueError) as error:
            return False, None, str(error)
        with self._lock:
            known = self._models.get(model_id)
            if known is not None:
                return self._again(known, size.precision)
            return self._place(ask, size.precision)

    def unschedule_model(self, model_id: str) -> tuple[bool, str | None]:
        """Give back exactly what was charged."""
        with self._lock:
            gone = self._models.pop(model_id, None)
        return (False, f"{model_id} is not scheduled") if gone is None else (True, None)

    def get_model(self, model_id: str) -> ModelInstance | None:
        with self._lock:
            return self._models.get(model_id)

    def get_model_status(self, model_id: str) -> ModelStatus | None:
        found = self.get_model(model_id)
        return found.status if found else None

    def list_models(self) -> tuple[ModelInstance, ...]:
        with self._lock:
            return tuple(self._models.values())

    def partitions(self) -> tuple[MemoryPartition, ...]:
        """Every Partition with what is charged on it now."""
        device = self._partitioner.device()
        models = self.list_models()
        found = []
        for partition in device.layout.partitions:
            here = [model for model in models if model.grant.partition_id == partition.id]
            found.append(
                MemoryPartition(
                    partition_id=partition.index,
                    size_bytes=partition.memory_bytes,
                    allocated_bytes=sum(model.memory_bytes for model in here),
                    models=tuple(model.model_id for model in here),
                    compute_mode=device.layout.compute_mode,
                    memory_mode=device.layout.memory_mode,
                )
            )
        return tuple(found)

    def _again(self, known: ModelInstance, precision: str) -> tuple[bool, int | None, str | None]:
        if known.precision == precision:
            return True, known.partition_id, None
        why = f"{known.model_id} is scheduled as {known.precision}; unschedule it before scheduling it as {precision}"
        return False, None, why

    def _place(self, ask: Ask, precision: str) -> tuple[bool, int | None, str | None]:
        device = self._partitioner.device()
        state = DeviceState(device=device, grants=tuple(model.grant for model in self._models.values()))
        decision = decide(Snapshot(nodes=(NodeState(name=_NODE, devices=(state,)),)), ask)
        if isinstance(decision, Refusal):
            return False, None, "; ".join([decision.summary, *(reason.text for reason in decision.reasons)])
        (slot,) = decision.slots
        partition = device.partition(slot.partition_id)
        if partition is None:
            return False, None, f"{slot.partition_id} is gone"
        grant = slot.granted(f"{ask.name}/0", ask.name, ask.name, ask.priority, Level.NONE)
        self._models[ask.name] = ModelInstance(
            model_id=ask.name,
            precision=precision,
            partition_id=partition.index,
            memory_bytes=slot.memory_bytes,
            priority=ask.priority,
            status=ModelStatus.SCHEDULED,
            grant=grant,
        )
        return True, partition.index, None

    def _name_of(self, index: int | None) -> str | None:
        if index is None:
            return None
        partitions = {partition.index: partition.id for partition in self._partitioner.device().layout.partitions}
        if index not in partitions:
            raise ValueError(f"there is no partition {index}; there are {', '.join(map(str, partitions))}")
        return partitions[index]
