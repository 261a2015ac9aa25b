"""Kubeconfig files, several of them merged as kubectl does: of two entries with one name the first file's counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aimgpu.errors import ClusterFailed

_KINDS = {"contexts": "context", "clusters": "cluster", "users": "user"}
_HINT = "Set KUBECONFIG to a kubeconfig file."


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeconfigEntry:
    """A cluster, user or context; paths in it are relative to the folder of its file."""

    value: Mapping[str, Any]
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedContext:
    """A context with the cluster and the user that it names."""

    namespace: str | None
    cluster: KubeconfigEntry
    user: KubeconfigEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubeconfig:
    files: tuple[Path, ...]
    current: str
    entries: Mapping[tuple[str, str], KubeconfigEntry]  # by kind and name

    def select(self, context: str = "") -> SelectedContext:
        """The context of that name, or the current one. Raises ClusterFailed."""
        contexts = ", ".join(name for kind, name in self.entries if kind == "contexts") or "none"
        name = context or self.current
        if not name:
            raise ClusterFailed(f"{self} has no current context", hint=f"Pass --context. Contexts: {contexts}.")
        chosen = self.entries.get(("contexts", name))
        if chosen is None:
            raise ClusterFailed(f"{self} has no context {name!r}", hint=f"Contexts: {contexts}.")
        return SelectedContext(
            namespace=chosen.value.get("namespace") or None,
            cluster=self._named("clusters", name, chosen),
            user=self._named("users", name, chosen)
            if chosen.value.get("user")
            else KubeconfigEntry(value={}, file=chosen.file),
        )

    def _named(self, kind: str, context: str, chosen: KubeconfigEntry) -> KubeconfigEntry:
        word = _KINDS[kind]
        name = str(chosen.value.get(word) or "")
        found = self.entries.get((kind, name))
        if found is None:
            raise ClusterFailed(f"context {context!r} in {chosen.file} names the {word} {name!r}, which {self} does not have")
        return found

    def __str__(self) -> str:
        return " and ".join(map(str, self.files))


def read_merged(files: Sequence[Path]) -> Kubeconfig:
    """Files of a list need not exist, as long as one of them does; one alone must. Raises ClusterFailed."""
    paths = tuple(dict.fromkeys(files))
    present = paths if len(paths) == 1 else tuple(path for path in paths if path.exists())
    if not present:
        raise ClusterFailed(f"none of the kubeconfig files exists: {', '.join(map(str, paths))}", hint=_HINT)
    current = ""
    entries: dict[tuple[str, str], KubeconfigEntry] = {}
    for path in present:
        config = _read(path)
        current = current or str(config.get("current-context") or "")
        for key, value in _entries(path, config):
            entries.setdefault(key, value)
    return Kubeconfig(files=present, current=current, entries=entries)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ClusterFailed(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ClusterFailed(f"{path} is not a kubeconfig file: {error}") from error
    if not isinstance(config, Mapping):
        raise ClusterFailed(f"{path} is not a kubeconfig file")
    return config


def _entries(path: Path, config: Mapping[str, Any]) -> list[tuple[tuple[str, str], KubeconfigEntry]]:
    try:
        return [
            ((kind, str(entry["name"])), KubeconfigEntry(value=dict(entry[word] or {}), file=path))
            for kind, word in _KINDS.items()
            for entry in config.get(kind) or ()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterFailed(f"{path} is not a kubeconfig file: an entry has no name or no content") from error
