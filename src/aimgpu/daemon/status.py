"""What runs where, for the command line and the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aimgpu.control.controller import Controller
from aimgpu.domain import Device, DeviceUsage, Grant, Instance, granted_to
from aimgpu.engines.protocols import Remarker

_SIMULATED = " (simulated)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    version: str
    pid: int
    url: str  # "http://127.0.0.1:8080"


def describe_status(controller: Controller, addresses: Addresses) -> dict[str, Any]:
    devices = controller.devices()
    usage = {item.device_id: item for item in controller.parts.hardware.read_usage()}
    grants = controller.parts.ledger.grants()
    return {
        "simulated": any(device.simulated for device in devices),
        "version": addresses.version,
        "pid": addresses.pid,
        "deployments": [{"name": item.name, "replicas": item.replicas} for item in controller.deployments()],
        "gpus": [_gpu(device, usage.get(device.id), grants) for device in devices],
        "instances": [_instance(item, devices, addresses) for item in controller.instances()],
        "waiting": _waiting(controller),
        "models_url": f"{addresses.url}/v1",
        "page_url": f"{addresses.url}/",
        "notes": read_notes(controller),
    }


def _waiting(controller: Controller) -> list[dict[str, Any]]:
    """Wanted, and not running for want of room: no instance stands for it."""
    wanted = {deployment.name: deployment for deployment in controller.deployments()}
    running = {(instance.deployment, instance.replica) for instance in controller.instances()}
    return [
        {
            "name": item.deployment,
            "model": wanted[item.deployment].model,
            "priority": wanted[item.deployment].ask.priority.value,
            "replicas": sum((item.deployment, number) not in running for number in range(wanted[item.deployment].replicas)),
            "reason": item.reason,
        }
        for item in controller.waiting()
        if item.deployment in wanted
    ]


def read_notes(controller: Controller) -> list[str]:
    """What the owner should read first."""
    aside = controller.parts.ledger.set_aside
    corrupt = f"The ledger was corrupt at this start. It is kept as {aside}; the books were written anew from what ran."
    return [*([corrupt] if aside else []), *_remarks(controller)]


def _remarks(controller: Controller) -> Iterator[str]:
    """Of instances that do not serve as one would expect."""
    for instance in controller.instances():
        engine = controller.parts.engines.get(instance.engine)
        if isinstance(engine, Remarker) and (remark := engine.remark(controller.parts.runs / instance.id)):
            yield f"{instance.deployment} {remark}"


def _gpu(device: Device, usage: DeviceUsage | None, grants: tuple[Grant, ...]) -> dict[str, Any]:
    here = [grant for grant in grants if grant.device_id == device.id]
    granted = {part.id: sum(g.memory_bytes for g in here if g.partition_id == part.id) for part in device.layout.partitions}
    return {
        "id": device.id,
        "index": device.index,
        "product": device.product,
        "name": _device_name(device),
        "vendor": device.vendor.value,
        "layout": device.layout.name,
        "simulated": device.simulated,
        "memory_bytes": device.memory_bytes,
        "granted_bytes": sum(granted.values()),
        "free_bytes": device.layout.memory_bytes - sum(granted.values()),
        "measured_bytes": usage.used_bytes if usage else None,
        "utilization_percent": usage.utilization_percent if usage else None,
        "partitions": [
            {
                "id": part.id,
                "kind": part.kind,
                "memory_bytes": part.memory_bytes,
                "granted_bytes": granted[part.id],
                "compute_units": part.compute_units,
            }
            for part in device.layout.partitions
        ],
    }


def _instance(item: Instance, devices: tuple[Device, ...], addresses: Addresses) -> dict[str, Any]:
    grant = item.grants[0] if item.grants else None
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
        "concurrency": item.concurrency,
        "kv_tokens": item.kv_tokens,
        "reason": item.reason,
        "last_lines": list(item.last_lines),
        "endpoint": f"{addresses.url}/v1" if item.state.value == "ready" else None,
    }


def _compute_text(grants: tuple[Grant, ...], devices: tuple[Device, ...]) -> str | None:
    """What was granted of the GPU's compute; None where it is not limited."""
    found = [compute.text for compute in (granted_to(grant, devices) for grant in grants) if compute is not None]
    return ", ".join(dict.fromkeys(found)) or None


def _grant(grant: Grant, devices: tuple[Device, ...]) -> dict[str, Any]:
    """Each with what makes it true: an instance on several Devices may be held differently on each."""
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
    return name + _SIMULATED if device.simulated else name
