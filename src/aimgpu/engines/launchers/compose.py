"""Services of a stack as a compose file: what people write by hand for several engines on one GPU, with numbers that add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aimgpu.engines.launchers.container import container_body, container_environment
from aimgpu.engines.protocols import Command
from aimgpu.errors import PlacementRefused
from aimgpu.units import format_bytes

_NOWHERE = Path("/tmp")  # noqa: S108 - a compose file has no run directory
_KEY_VARIABLE = "AIMGPU_ENGINE_KEY"
_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY")
_HEALTH = {
    "vllm": ["CMD", "python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health', timeout=3)"],
    "llamacpp": ["CMD", "curl", "-fsS", "http://127.0.0.1:{port}/health"],
    "ollama": ["CMD", "ollama", "list"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeService:
    """One service of a compose file."""

    name: str
    engine: str
    command: Command
    port: int
    memory_bytes: Mapping[str, int]  # partition id -> bytes granted of it


def render_compose(services: Sequence[ComposeService], partitions: Mapping[str, int], *, simulated: bool = False) -> str:
    """The file's text. `partitions` gives the size of each; more than that is refused."""
    lines = ["# The GPU is simulated: the services get no devices, and the images are those for CPUs."] if simulated else []
    lines += ["# Start with: AIMGPU_ENGINE_KEY=$(openssl rand -hex 16) docker compose up"]
    lines += [f"# {line}" for line in _sums(services, partitions)]
    lines += [f"# {service.name}: http://127.0.0.1:{service.port}/v1" for service in services]
    last_on: dict[str, str] = {}
    content: dict[str, Any] = {}
    for service in services:
        before = sorted({last_on[place] for place in service.memory_bytes if place in last_on})
        content[service.name] = _service(service, before)
        last_on |= dict.fromkeys(service.memory_bytes, service.name)
    return "\n".join(lines) + "\n" + yaml.safe_dump({"services": content}, sort_keys=False, width=120)


def _sums(services: Sequence[ComposeService], partitions: Mapping[str, int]) -> list[str]:
    lines = []
    for place, size in partitions.items():
        parts = {service.name: service.memory_bytes[place] for service in services if place in service.memory_bytes}
        total = sum(parts.values())
        if total > size:
            raise PlacementRefused(f"{place} has {format_bytes(size)}, and {', '.join(parts)} need {format_bytes(total)}")
        if parts:
            named = " + ".join(f"{name} {format_bytes(part)}" for name, part in parts.items())
            exact = f"{total} of {size} bytes"
            lines.append(f"{place}: {named} = {format_bytes(total)} of {format_bytes(size)} ({exact})")
    return lines


def _service(service: ComposeService, before: list[str]) -> dict[str, Any]:
    """Engines on one partition start one after the other: each measures the memory that it finds free."""
    command = service.command
    host = container_body(service.name, command, _NOWHERE, "", with_cdi=False)["HostConfig"]
    content: dict[str, Any] = {
        "image": command.image,
        "entrypoint": [_escape(command.argv[0])],
        "command": [_escape(word) for word in command.argv[1:]],
        "environment": {
            **{name: _escape(value) for name, value in container_environment(command).items()},
            **{name: _from_outside(name) for name in command.secrets},
        },
        "ports": [f"127.0.0.1:{service.port}:{service.port}"],
        "cap_drop": host["CapDrop"],
        "init": True,
        "security_opt": host["SecurityOpt"],
        **({"ipc": "host"} if host["IpcMode"] == "host" else {"shm_size": host["ShmSize"]}),
        "restart": "unless-stopped",
        "healthcheck": {
            "test": [word.format(port=service.port) for word in _HEALTH[service.engine]],
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "10m",
        },
    }
    if command.mounts:
        content["volumes"] = [f"{one.path}:{one.path}" + ("" if one.writable else ":ro") for one in command.mounts]
    if before:
        content["depends_on"] = {name: {"condition": "service_healthy"} for name in before}
    return content | _devices(host)


def _devices(host: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if "Devices" in host:
        content["devices"] = [f"{device['PathOnHost']}:{device['PathInContainer']}" for device in host["Devices"]]
        content["group_add"] = host["GroupAdd"]
    if "DeviceRequests" in host:
        ids = [uuid for request in host["DeviceRequests"] for uuid in request["DeviceIDs"]]
        reservation = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        content["deploy"] = {"resources": {"reservations": {"devices": [reservation]}}}
    return content


def _from_outside(name: str) -> str:
    """Keys and tokens are never written into the file."""
    return f"${{{_KEY_VARIABLE}:?choose a key}}" if name in _KEYS else f"${{{name}:-}}"


def _escape(text: str) -> str:
    """Compose replaces variables in every value; `$$` is a plain dollar."""
    return text.replace("$", "$$")
