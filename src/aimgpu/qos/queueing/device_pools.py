"""The limits of devices: how many requests run on one at once, over all its models."""

from collections.abc import Iterable

from aimgpu.qos.queueing.backend import BackendState, Pool
from aimgpu.qos.queueing.policy import QueuePolicy


class DevicePools:
    """What runs on each device that has a limit; the others are not counted."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._pools: dict[str, Pool] = {}
        self.limited = policy.limits_devices

    def change_limits(self, policy: QueuePolicy, states: Iterable[BackendState]) -> None:
        """What runs now counts against the new limits at once, and is let run where it is too much."""
        before = self._pools
        self._policy, self._pools, self.limited = policy, {}, policy.limits_devices
        for state in states:
            if state.device_id is not None and policy.limit_of(state.device_id) is not None:
                pool = self._pool(state.device_id)
                pool.in_flight += state.pool.in_flight
                pool.by_rank = [mine + more for mine, more in zip(pool.by_rank, state.pool.by_rank, strict=True)]
        for device, pool in self._pools.items():
            if device in before:
                pool.reserved = before[device].reserved

    def in_flight(self, device_id: str) -> int | None:
        """None where nothing is counted."""
        return None if self._policy.limit_of(device_id) is None else self._pool(device_id).in_flight

    def has_room(self, device_id: str, rank: int, now: float, low_share: float) -> bool:
        """Whether a request of this rank may start on the device."""
        limit = self._policy.limit_of(device_id)
        return limit is None or self._pool(device_id).has_room(rank, limit, self._policy, now, low_share)

    def is_full(self, device_id: str) -> bool:
        """Whether the device has a limit, and runs as many as that."""
        limit = self._policy.limit_of(device_id)
        return limit is not None and self._pool(device_id).in_flight >= limit

    def began(self, device_id: str | None, rank: int) -> None:
        """A request runs on the device."""
        if device_id is not None and self._policy.limit_of(device_id) is not None:
            self._pool(device_id).began(rank)

    def ended(self, device_id: str | None, rank: int) -> None:
        """A request on the device is over."""
        pool = self._pools.get(device_id) if device_id is not None else None
        if pool is not None:
            pool.ended(rank)

    def note_need(self, device_id: str | None, rank: int, waiting: int, now: float) -> None:
        """A request of this rank came while `waiting` like it wait."""
        if device_id is not None and self._policy.limit_of(device_id) is not None:
            self._pool(device_id).note_need(rank, waiting, now, self._policy.reserve_seconds)

    def _pool(self, device_id: str) -> Pool:
        pool = self._pools.get(device_id)
        if pool is None:
            pool = self._pools[device_id] = Pool()
        return pool
