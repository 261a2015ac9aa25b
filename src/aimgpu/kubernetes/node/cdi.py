"""Specifications of the Container Device Interface: what a container runtime adds to a container that names a device.

One file per owner (a claim, or the replicas of a resource), written under another name and renamed, so that the runtime never
reads half a file. https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_FOLDER = Path("/var/run/cdi")
VERSION = "0.6.0"
OWNER_ANNOTATION, LABEL_ANNOTATION = "gpu.aim.amd.com/owner", "gpu.aim.amd.com/label"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiMount:
    host_path: str
    container_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEdits:
    """What is added to a container."""

    environment: Mapping[str, str] = field(default_factory=dict)
    device_nodes: tuple[str, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    checks: tuple[tuple[str, ...], ...] = ()  # commands that must succeed in the container before its program starts

    def merged(self, other: "ContainerEdits") -> "ContainerEdits":
        return ContainerEdits(
            environment={**self.environment, **other.environment},
            device_nodes=tuple(dict.fromkeys((*self.device_nodes, *other.device_nodes))),
            mounts=tuple(dict.fromkeys((*self.mounts, *other.mounts))),
            checks=tuple(dict.fromkeys((*self.checks, *other.checks))),
        )

    def to_json(self) -> dict[str, Any]:
        edits: dict[str, Any] = {}
        if self.environment:
            edits["env"] = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        if self.device_nodes:
            edits["deviceNodes"] = [{"path": path, "hostPath": path, "permissions": "rw"} for path in self.device_nodes]
        if self.mounts:
            edits["mounts"] = [
                {
                    "hostPath": mount.host_path,
                    "containerPath": mount.container_path,
                    "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "bind"],
                }
                for mount in self.mounts
            ]
        if self.checks:
            edits["hooks"] = [{"hookName": "startContainer", "path": one[0], "args": list(one)} for one in self.checks]
        return edits


class SpecFolder:
    """The specifications of one kind (``vendor.com/class``) in a folder that the container runtime reads."""

    def __init__(self, kind: str, folder: Path = DEFAULT_FOLDER) -> None:
        self._kind = kind
        self._folder = folder

    def device_id(self, owner: str, device: str) -> str:
        """The name by which the kubelet asks the runtime for a device; unique over all owners."""
        return f"{self._kind}={_name(owner, device)}"

    def write(self, owner: str, devices: Mapping[str, ContainerEdits], *, label: str = "") -> None:
        """`label`: for whom, to find them again by the file alone."""
        entries = [{"name": _name(owner, name), "containerEdits": edits.to_json()} for name, edits in devices.items()]
        # A device without edits is refused by the runtime; a variable that names it does no harm.
        for entry in entries:
            entry["containerEdits"] = entry["containerEdits"] or {"env": [f"AIM_GPU_DEVICE={entry['name']}"]}
        spec: dict[str, Any] = {"cdiVersion": VERSION, "kind": self._kind, "devices": entries}
        if label:
            spec["annotations"] = {OWNER_ANNOTATION: owner, LABEL_ANNOTATION: label}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(owner)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")  # no .json at its end: never read
        fresh = fresh.with_suffix(".fresh")
        with fresh.open("w", encoding="utf-8") as handle:
            json.dump(spec, handle)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.rename(path)

    def exists(self, owner: str) -> bool:
        return self._path(owner).exists()

    def labels(self) -> dict[str, str]:
        """Of every file of this kind that a container can use, by owner; empty: the file does not say for whom it is."""
        prefix, found = f"{self._kind.replace('/', '-')}-", {}
        for path in sorted(self._folder.glob(f"{prefix}*.json")):
            try:
                spec = json.loads(path.read_text(encoding="utf-8"))
                usable = spec["kind"] == self._kind and bool(spec["devices"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # no runtime reads it either
            if usable:
                notes = spec.get("annotations") or {}
                found[notes.get(OWNER_ANNOTATION) or path.stem.removeprefix(prefix)] = notes.get(LABEL_ANNOTATION) or ""
        return found

    def remove(self, owner: str) -> None:
        """What is not there is removed: also where the folder is none, so that what was granted can be given back."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._path(owner).unlink()

    def keep_only(self, owners: Iterable[str]) -> tuple[str, ...]:
        """Remove what belongs to none of these, also half-written files; returns their names."""
        kept = {self._path(owner).name for owner in owners}
        prefix = self._kind.replace("/", "-")
        removed = []
        for path in self._folder.glob(f"*{prefix}*"):
            ours = path.name.startswith(prefix) or (path.name.startswith(f".{prefix}") and path.suffix == ".fresh")
            if ours and path.name not in kept:
                path.unlink(missing_ok=True)
                removed.append(path.name)
        return tuple(removed)

    def _path(self, owner: str) -> Path:
        return self._folder / f"{self._kind.replace('/', '-')}-{_UNSAFE.sub('_', owner)}.json"


def _name(owner: str, device: str) -> str:
    return _UNSAFE.sub("_", f"{owner}-{device}" if device else owner)
