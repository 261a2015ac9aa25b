"""Never more requests at an engine than it has slots: the rest waits here, first come first served, up to a bound."""

import asyncio
from collections import deque
from dataclasses import dataclass

from aimgpu.errors import ModelNotReady, QueueFull
from aimgpu.gateway.directory import Backend, Directory, ServedModel

_LOOK_AGAIN_SECONDS = 0.1
_RETRY_SECONDS = 5


@dataclass(slots=True, eq=False)
class Lease:
    """A slot at one engine, to be given back exactly once; giving it back twice does nothing."""

    slots: "Slots"
    model: str
    backend: Backend
    held: bool = True

    def release(self) -> None:
        if self.held:
            self.held = False
            self.slots.give_back(self)


class Slots:
    def __init__(self, directory: Directory, *, max_queued: int) -> None:
        self._directory = directory
        self._max_queued = max_queued
        self._in_flight: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[Lease]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def in_flight(self, instance_id: str) -> int:
        return self._in_flight.get(instance_id, 0)

    def queued(self, model: str) -> int:
        return len(self._waiting.get(model, ()))

    async def take(self, model: ServedModel) -> Lease:
        if not model.backends:
            raise not_ready(model)
        if model.name not in self._waiting:
            lease = self._try_take(model)
            if lease is not None:
                return lease
        return await self._wait(model)

    def give_back(self, lease: Lease) -> None:
        instance = lease.backend.instance_id
        left = self._in_flight[instance] - 1
        if left:
            self._in_flight[instance] = left
        else:
            del self._in_flight[instance]
        if lease.model in self._waiting:
            self._serve_waiting(lease.model)

    async def _wait(self, model: ServedModel) -> Lease:
        queue = self._waiting.get(model.name)
        if queue is not None and len(queue) >= self._max_queued:
            raise QueueFull(f"{len(queue)} requests already wait for '{model.name}'.", retry_after_seconds=_RETRY_SECONDS)
        queue = self._waiting.setdefault(model.name, deque())
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        self._arm()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # granted and cancelled in the same moment
            else:
                self._leave(model.name, waiter)
            raise

    def _leave(self, model: str, waiter: "asyncio.Future[Lease]") -> None:
        queue = self._waiting.get(model)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[model]

    def _try_take(self, model: ServedModel) -> Lease | None:
        best: Backend | None = None
        least = 1.0
        for backend in model.backends:
            load = self._in_flight.get(backend.instance_id, 0) / max(backend.slots, 1)
            if load < least:
                best, least = backend, load
        if best is None:
            return None
        self._in_flight[best.instance_id] = self._in_flight.get(best.instance_id, 0) + 1
        return Lease(self, model.name, best)

    def _serve_waiting(self, name: str) -> None:
        model = self._directory.find(name)
        queue = self._waiting[name]
        while queue:
            waiter = queue[0]
            if waiter.done():
                queue.popleft()
                continue
            if model is None or not model.backends:
                waiter.set_exception(not_ready(model) if model else ModelNotReady(f"'{name}' was removed."))
                queue.popleft()
                continue
            lease = self._try_take(model)
            if lease is None:
                return
            queue.popleft()
            waiter.set_result(lease)
        del self._waiting[name]

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Engines come and go without a word to this room: while somebody waits, look."""
        self._timer = None
        for name in tuple(self._waiting):
            self._serve_waiting(name)
        if self._waiting:
            self._arm()


def not_ready(model: ServedModel) -> ModelNotReady:
    reason = f": {model.reason}" if model.reason else ""
    return ModelNotReady(f"'{model.name}' is {model.state}{reason}.", retry_after_seconds=_RETRY_SECONDS)
