"""A Command as a container: only the granted partition's device nodes, the model, its log, and a folder of its own.

It has a network of its own, of which one port is published on this machine's loopback, and no capabilities. Its user is that
of the daemon: regions of limits, MPS and the caches of models belong to that.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aimgpu.engines.launchers.groups import path_from_root
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.engines.protocols import Command, Mount
from aimgpu.units import GIB

HOME_LABEL = "aimgpu.home"
INSTANCE_LABEL = "aimgpu.instance"
OWN_FOLDER = "own"  # within the run directory: what a container may write there, beside its log
_KFD = "/dev/kfd"
_LOGGED = 'exec "$@" >>"$0" 2>&1'  # $0 is the log: one place for it, whatever the launcher
_SHARED_MEMORY_BYTES = 8 * GIB  # at most: only what is used is taken; Docker's default of 64 MiB is too small for torch
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))


def container_body(instance_id: str, command: Command, run_directory: Path, home: str, *, with_cdi: bool) -> dict[str, Any]:
    """What POST /containers/create takes."""
    environment = {**container_environment(command), **command.secrets}
    user = {} if os.geteuid() == 0 else {"User": f"{os.geteuid()}:{os.getegid()}"}
    own = str(run_directory / OWN_FOLDER)
    return {
        **user,
        **({"ExposedPorts": {f"{command.port}/tcp": {}}} if command.port else {}),
        "Image": command.image,
        "Entrypoint": ["/bin/sh", "-c", _LOGGED, str(run_directory / LOG_NAME)],
        "Cmd": list(command.argv),
        "Env": [f"{name}={value}" for name, value in {"HOME": own, **environment}.items()],
        "WorkingDir": own,
        "Labels": {HOME_LABEL: home, INSTANCE_LABEL: instance_id},
        "HostConfig": {
            **_network(command),
            "CapDrop": ["ALL"],
            "Init": True,  # passes signals on and reaps
            **_shared_memory(command),
            "Mounts": [_bind(mount) for mount in _mounts(command, run_directory)],
            "SecurityOpt": ["no-new-privileges", *(["seccomp=unconfined"] if _KFD in command.device_nodes else [])],
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
            **({"CgroupParent": path_from_root(command.control_group)} if command.control_group else {}),
            **_devices(command, with_cdi=with_cdi),
        },
    }


def container_environment(command: Command) -> dict[str, str]:
    """A container sees only its own render nodes, so ROCm counts them from 0 again."""
    chosen = command.environment.get("ROCR_VISIBLE_DEVICES", "")
    if _KFD not in command.device_nodes or not chosen.replace(",", "").isdecimal():
        return dict(command.environment)
    count = sum(1 for node in command.device_nodes if "renderD" in node)
    return {**command.environment, "ROCR_VISIBLE_DEVICES": ",".join(str(index) for index in range(max(count, 1)))}


def uses_cdi(info: Mapping[str, Any]) -> bool:
    """Whether this Docker reads CDI files and NVIDIA's toolkit has written one."""
    return bool(info.get("CDISpecDirs")) and any(folder.glob("nvidia*") for folder in _CDI_FOLDERS if folder.is_dir())


def _devices(command: Command, *, with_cdi: bool) -> dict[str, Any]:
    uuids = [uuid for uuid in command.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
    if uuids:
        return {"DeviceRequests": [_nvidia_request(uuids, with_cdi=with_cdi)]}
    if not command.device_nodes:
        return {}
    return {
        "Devices": [{"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"} for node in command.device_nodes],
        "GroupAdd": _groups(command.device_nodes),
    }


def _network(command: Command) -> dict[str, Any]:
    """A bridge: what it listens at is nobody's but what is published, and the machine's loopback is not its own."""
    if command.port is None:
        return {"NetworkMode": "none"}
    return {
        "NetworkMode": "bridge",
        "PortBindings": {f"{command.port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(command.port)}]},
    }


def _shared_memory(command: Command) -> dict[str, Any]:
    """Its own, in which torch hands tensors between processes. MPS talks to its clients through that of the host."""
    if command.environment.get("CUDA_MPS_PIPE_DIRECTORY"):
        return {"IpcMode": "host"}
    return {"IpcMode": "private", "ShmSize": _SHARED_MEMORY_BYTES}


def _nvidia_request(uuids: list[str], *, with_cdi: bool) -> dict[str, Any]:
    if with_cdi:
        return {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in uuids]}
    return {"Driver": "nvidia", "DeviceIDs": uuids, "Capabilities": [["gpu"]]}


def _groups(nodes: Iterable[str]) -> list[str]:
    """The groups that own the device nodes (video, render), by number: the image may name them otherwise."""
    owners = {Path(node).stat().st_gid for node in nodes if Path(node).exists()}
    return [str(group) for group in sorted(owners - {0})]


def _mounts(command: Command, run_directory: Path) -> tuple[Mount, ...]:
    """What the engine needs, and what isolation put into its environment: a library, regions, the pipes of MPS."""
    environment = command.environment
    libraries = [path for path in environment.get("LD_PRELOAD", "").split(":") if path.startswith("/")]
    # Folders, not files: a file that is replaced would stay the old one inside.
    shared = [str(Path(path).parent) for path in environment.get("AIMGPU_REGION", "").split(":") if path.startswith("/")]
    shared += [path for path in (environment.get("CUDA_MPS_PIPE_DIRECTORY", ""),) if path.startswith("/")]
    found = (
        Mount(path=str(run_directory / OWN_FOLDER), writable=True),
        Mount(path=str(run_directory / LOG_NAME), writable=True),
        *command.mounts,
        *(Mount(path=path) for path in libraries if Path(path).exists()),
        *(Mount(path=path, writable=True) for path in shared if Path(path).exists()),
    )
    return tuple({mount.path: mount for mount in found}.values())


def _bind(mount: Mount) -> dict[str, Any]:
    return {"Type": "bind", "Source": mount.path, "Target": mount.path, "ReadOnly": not mount.writable}
