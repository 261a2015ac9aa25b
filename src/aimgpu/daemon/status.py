"""What runs where, for the command line and the page."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.effects import REAL
from aimgpu.control.waiting import describe_retry, ends_of
from aimgpu.domain import Device, DeviceUsage, Grant, Instance, InstanceState, granted_to
from aimgpu.engines.protocols import Engine, Remarker
from aimgpu.hardware.protocols import Hardware
from aimgpu.ledger import Retry
from aimgpu.placement import DeviceState
from aimgpu.placement.fit import device_free_bytes, free_bytes
from aimgpu.sizing.surplus import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the daemon answers."""

    version: str
    pid: int
    url: str  # of this machine's commands and browsers: "http://127.0.0.1:8080"
    tls_url: str | None = None  # of callers, where they have another: "https://127.0.0.1:8080"

    @property
    def models_url(self) -> str:
        """Where clients of OpenAI's API look for models."""
        return f"{self.tls_url or self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    """What a status is put together from."""

    controller: Controller
    hardware: Hardware
    engines: Mapping[str, Engine]
    runs: Path
    corrupt_ledger: Path | None = None  # kept aside at this start
    read_blocked: Callable[[], Mapping[str, str]] = dict  # sleeping models that find no room, with the reason
    explain_residence: Callable[[], Mapping[str, str]] = dict  # why models are awake or asleep

    @classmethod
    def of(
        cls,
        controller: Controller,
        dependencies: Dependencies,
        read_blocked: Callable[[], Mapping[str, str]] = dict,
        explain_residence: Callable[[], Mapping[str, str]] = dict,
    ) -> "StatusSources":
        """Those of a daemon."""
        return cls(
            controller=controller,
            hardware=dependencies.hardware,
            engines=dependencies.engines,
            runs=dependencies.runs,
            corrupt_ledger=dependencies.ledger.set_aside,
            read_blocked=read_blocked,
            explain_residence=explain_residence,
        )


def describe_status(sources: StatusSources, addresses: Addresses) -> dict[str, Any]:
    """As the API answers it; reads the devices, so call it in a thread."""
    controller = sources.controller
    states = sorted((state for _, state in controller.snapshot().devices()), key=lambda state: state.device.index)
    devices = tuple(state.device for state in states)
    usage = {item.device_id: item for item in sources.hardware.read_usage()}
    blocked, residence = sources.read_blocked(), sources.explain_residence()
    instances = [
        replace(one, reason=blocked.get(one.deployment, one.reason)) if one.state is InstanceState.SLEEPING else one
        for one in controller.instances()
    ]
    retries = {retry.deployment: retry for retry in controller.waiting()}
    return {
        "simulated": any(device.simulated for device in devices),
        "version": addresses.version,
        "pid": addresses.pid,
        "deployments": [
            {
                "name": item.name,
                "replicas": item.replicas,
                "aliases": list(item.aliases),
                "default": item.default,
                "adapters": [each.name for each in item.overrides.adapters],
                "command": shlex.join(item.overrides.program.argv) if item.overrides.program else None,
                "residence": residence.get(item.name),
            }
            for item in controller.deployments()
        ],
        "gpus": [_gpu(state, usage.get(state.device.id)) for state in states],
        "instances": [_instance(item, devices, addresses, retries.get(item.deployment)) for item in instances],
        "waiting": list(_waiting(controller)),
        "models_url": addresses.models_url,
        "page_url": f"{addresses.url}/",
        "notes": read_notes(sources),
    }


def _waiting(controller: Controller) -> Iterator[dict[str, Any]]:
    """Wanted, and not running: no instance stands for it."""
    known = {(instance.deployment, instance.replica) for instance in controller.instances()}
    for wait in controller.waits():
        name, item = wait.deployment.name, wait.deployment
        missing = sum((name, number) not in known for number in wait.replicas)
        if missing:
            retry = wait.retry or Retry(deployment=name, reason=wait.reason)
            reason = describe_retry(retry, REAL.wall_ms()) if wait.retry is not None else wait.reason
            entry = {"name": name, "model": item.model, "priority": item.ask.priority.value, "replicas": missing}
            yield {**entry, "reason": reason, **_retry(retry), "ends_on": wait.ends_on.value}


def _retry(retry: Retry) -> dict[str, Any]:
    left = None if retry.retry_at_ms is None else max(0.0, (retry.retry_at_ms - REAL.wall_ms()) / 1000)
    return {"failures": retry.failures, "next_try_seconds": left, "gave_up": retry.exhausted, "ends_on": ends_of(retry).value}


def read_notes(sources: StatusSources) -> list[str]:
    """What the owner should read first."""
    aside = sources.corrupt_ledger
    corrupt = f"The ledger was corrupt at this start. It is kept as {aside}; a new one was written from what ran."
    return [*([corrupt] if aside else []), *_remarks(sources)]


def _remarks(sources: StatusSources) -> Iterator[str]:
    """Of instances that do not serve as one would expect."""
    for instance in sources.controller.instances():
        engine = sources.engines.get(instance.engine)
        if isinstance(engine, Remarker) and (remark := engine.remark(sources.runs / instance.id)):
            yield f"{instance.deployment} {remark}"


def _gpu(state: DeviceState, usage: DeviceUsage | None) -> dict[str, Any]:
    device, here = state.device, state.grants
    granted = {part.id: sum(g.memory_bytes for g in here if g.partition_id == part.id) for part in device.layout.partitions}
    return {
        "id": device.id,
        "index": device.index,
        "product": device.product,
        "name": _device_name(device),
        "vendor": device.vendor.value,
        "layout": device.layout.name,
        "simulated": device.simulated,
        "software": device.software,
        "memory_bytes": device.memory_bytes,
        "granted_bytes": sum(granted.values()),
        "free_bytes": device_free_bytes(state),
        "measured_bytes": usage.used_bytes if usage else None,
        "utilization_percent": usage.utilization_percent if usage else None,
        "partitions": [
            {
                "id": part.id,
                "kind": part.kind,
                "memory_bytes": part.memory_bytes,
                "granted_bytes": granted[part.id],
                "free_bytes": max(0, free_bytes(state, part)),
                "compute_units": part.compute_units,
            }
            for part in device.layout.partitions
        ],
    }


def _instance(item: Instance, devices: tuple[Device, ...], addresses: Addresses, retry: Retry | None) -> dict[str, Any]:
    grant = item.grants[0] if item.grants else None
    failed = item.state is InstanceState.FAILED
    device = next((device for device in devices if grant and device.id == grant.device_id), None)
    return {
        "id": item.id,
        "name": item.deployment,
        "model": item.model,
        "engine": item.engine,
        "launcher": item.launcher,
        "replica": item.replica,
        "device": grant.device_id if grant else None,
        "device_name": _device_name(device) if device else None,
        "partition": grant.partition_id.rpartition("/")[2] if grant else None,
        "memory_bytes": sum(g.memory_bytes for g in item.grants) if item.grants else None,
        "level": min((g.level for g in item.grants), key=lambda level: level.rank).value if grant else None,
        "mechanism": ", ".join(dict.fromkeys(g.mechanism for g in item.grants if g.mechanism)) or None,
        "compute": _compute_text(item.grants, devices),
        "grants": [_grant(g, devices) for g in item.grants],
        "priority": grant.priority.value if grant else None,
        "state": item.state.value,
        "percent": item.percent,
        "stage": item.stage,
        "concurrency": None if item.is_program else item.concurrency,
        "context_tokens": item.context_tokens,
        "kv_tokens": item.kv_tokens,
        "kv_cache_bytes": item.kv_cache_bytes,
        "unused_bytes": _unused_bytes(item),
        "in_host_memory": item.in_host_memory,
        "service": list(_describe_service(item)),
        "reason": describe_retry(retry, REAL.wall_ms()) if failed and retry and retry.failures else item.reason,
        "retry": _retry(retry) if failed and retry else None,
        "last_lines": list(item.last_lines),
        "endpoint": addresses.models_url if item.state.value == "ready" and not item.is_program else None,
        "pid": item.process.pid if item.process and item.is_program else None,
        "end": asdict(item.end) if item.end else None,
    }


def _describe_service(item: Instance) -> Iterator[str]:
    """What its grant serves beyond its number of requests, and what stays unused."""
    if (
        item.state not in (InstanceState.READY, InstanceState.LOADING)
        or item.kv_cache_bytes is None
        or item.context_tokens is None
    ):
        return
    service = Service(
        engine=item.engine,
        granted_bytes=min((grant.memory_bytes for grant in item.grants), default=0),
        concurrency=item.concurrency or 1,
        context_tokens=item.context_tokens,
        kv_cache_bytes=item.kv_cache_bytes,
        kv_tokens=item.kv_tokens,
        unused_bytes=_unused_bytes(item) or 0,
        in_host_memory=bool(item.in_host_memory),
    )
    texts = (service.text if service.kv_tokens is not None else None, service.unused_text)
    yield from (text for text in texts if text)


def _unused_bytes(item: Instance) -> int | None:
    """Of each of its grants, what it was not started to use; None where it is not known, or it does not run."""
    if item.sized_bytes is None or item.is_program or not item.grants or item.state is InstanceState.SLEEPING:
        return None
    return max(0, min(grant.memory_bytes for grant in item.grants) - item.sized_bytes)


def _compute_text(grants: tuple[Grant, ...], devices: tuple[Device, ...]) -> str | None:
    """What was granted of the GPU's compute; None where it is not limited."""
    found = [compute.text for compute in (granted_to(grant, devices) for grant in grants) if compute is not None]
    return ", ".join(dict.fromkeys(found)) or None


def _grant(grant: Grant, devices: tuple[Device, ...]) -> dict[str, Any]:
    """Each with what makes it true: an instance on several devices may be held differently on each."""
    compute = granted_to(grant, devices)
    return {
        "id": grant.id,
        "device": grant.device_id,
        "partition": grant.partition_id,
        "memory_bytes": grant.memory_bytes,
        "compute_ppm": grant.compute_ppm,
        "compute": None if compute is None else compute.to_json(),
        "exclusive": grant.exclusive,
        "level": grant.level.value,
        "mechanism": grant.mechanism,
    }


def _device_name(device: Device) -> str:
    name = device.market_name or device.product
    return name + device.kind_note
