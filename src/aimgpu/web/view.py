"""What the status page shows, as plain rows; the daemon fills it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    name: str
    model: str
    engine: str
    gpu: str  # the Device, as people call it
    partition: str
    memory_bytes: int | None  # granted
    level: str
    state: str
    percent: int | None = None  # while loading
    reason: str | None = None  # why it failed or waits
    endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    id: str
    name: str
    layout: str
    total_bytes: int
    granted_bytes: int
    free_bytes: int
    measured_bytes: int | None = None  # None: the device does not say
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseRow:
    model: str
    promised_to: str  # a class, "all", or "others"
    promise: str
    kept: float | None  # None: nothing was seen yet
    budget_left: float | None
    burn: float | None  # over five minutes
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    version: str
    simulated: bool
    api_url: str  # "http://127.0.0.1:8080/v1"
    models: tuple[ModelRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    promises: tuple[PromiseRow, ...] = ()
    refresh_seconds: int = 3
    notes: tuple[str, ...] = ()  # anything the owner should read first
