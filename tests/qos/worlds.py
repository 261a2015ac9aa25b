"""Small engines for the queue's tests."""

from dataclasses import dataclass

from aimgpu.domain import Priority
from aimgpu.qos.queueing.dispatcher import Dispatcher
from aimgpu.qos.queueing.policy import QueuePolicy
from aimgpu.qos.queueing.ticket import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    instance_id: str
    slots: int = 1
    device_id: str | None = None


def make(policy: QueuePolicy | None = None, **engines: tuple[Engine, ...]) -> Dispatcher[Engine]:
    return Dispatcher(policy or QueuePolicy(reserve_part=0.0), lambda model: engines.get(model, ()))


def ticket(priority: str = "medium", arrived: float = 0.0, *, model: str = "m", deadline: float | None = None) -> Ticket:
    longest = QueuePolicy().longest_wait_seconds[Priority(priority)]
    due = arrived + (longest if deadline is None else deadline)
    return Ticket(model=model, priority=Priority(priority), arrived=arrived, due=due, has_deadline=deadline is not None)
