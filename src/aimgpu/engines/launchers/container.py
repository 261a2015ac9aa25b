"""A Command as a container: only the granted Partition's device nodes, the model, and the run directory."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aimgpu.engines.launchers.groups import path_from_root
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.engines.protocols import Command, Mount

HOME_LABEL = "aimgpu.home"
INSTANCE_LABEL = "aimgpu.instance"
_KFD = "/dev/kfd"
_LOGGED = 'exec "$@" >>"$0" 2>&1'  # $0 is the log: one place for it, whatever the launcher
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))


def container_body(instance_id: str, command: Command, run_directory: Path, home: str, *, with_cdi: bool) -> dict[str, Any]:
    """What POST /containers/create takes."""
    environment = {**container_environment(command), **command.secrets}
    user = {} if os.geteuid() == 0 else {"User": f"{os.geteuid()}:{os.getegid()}"}
    return {
        **user,
        "Image": command.image,
        "Entrypoint": ["/bin/sh", "-c", _LOGGED, str(run_directory / LOG_NAME)],
        "Cmd": list(command.argv),
        "Env": [f"{name}={value}" for name, value in {"HOME": str(run_directory), **environment}.items()],
        "WorkingDir": str(run_directory),
        "Labels": {HOME_LABEL: home, INSTANCE_LABEL: instance_id},
        "HostConfig": {
            "NetworkMode": "host",  # engines listen on loopback only, in a container as outside
            "Init": True,  # passes signals on and reaps
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
        return {"DeviceRequests": [_nvidia_request(uuids, with_cdi=with_cdi)], "IpcMode": "host"}
    if not command.device_nodes:
        return {}
    return {
        "Devices": [{"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"} for node in command.device_nodes],
        "GroupAdd": _groups(command.device_nodes),
        "IpcMode": "host",  # torch hands tensors between processes through shared memory
    }


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
        Mount(path=str(run_directory), writable=True),
        *command.mounts,
        *(Mount(path=path) for path in libraries if Path(path).exists()),
        *(Mount(path=path, writable=True) for path in shared if Path(path).exists()),
    )
    return tuple({mount.path: mount for mount in found}.values())


def _bind(mount: Mount) -> dict[str, Any]:
    return {"Type": "bind", "Source": mount.path, "Target": mount.path, "ReadOnly": not mount.writable}
