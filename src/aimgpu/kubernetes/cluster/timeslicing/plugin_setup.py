"""What an administrator sets up around a device plugin, as plain values: ConfigMap, node labels, ClusterPolicy. Pure."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import yaml

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary.names import LABEL_PLUGIN_CONFIG, NVIDIA_PLUGIN_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """A device plugin and the names of what belongs to it."""

    name: str
    daemon_set: str
    config_map: str
    label: str  # of a node: which key of the ConfigMap its plugin reads
    resource: str
    namespace: str  # where it usually is
    follows: bool  # it reads a changed ConfigMap by itself; others are restarted


NVIDIA = PluginKind(
    name="nvidia",
    daemon_set="nvidia-device-plugin-daemonset",
    config_map="time-slicing-config",
    label=NVIDIA_PLUGIN_CONFIG,
    resource="nvidia.com/gpu",
    namespace="gpu-operator",
    follows=False,
)
AIM = PluginKind(
    name="aim",
    daemon_set="aim-gpu-sharing-agent",
    config_map="time-slicing-config",
    label=LABEL_PLUGIN_CONFIG,
    resource="amd.com/gpu",
    namespace="aim-gpu-sharing",
    follows=True,
)
KINDS = {kind.name: kind for kind in (NVIDIA, AIM)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSetup:
    """As it is, or as it should be. None: there is no such object, or no such value."""

    config: Mapping[str, str] | None  # the ConfigMap's keys
    labels: Mapping[str, str | None]  # by node
    policy: Mapping[str, str] | None  # spec.devicePlugin.config of the ClusterPolicy

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Self:
        try:
            found = json.loads(text)
            return cls(config=found["config"], labels=dict(found["labels"]), policy=found["policy"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput("the record of the former setup cannot be read", hint="Undo by hand: kubectl edit.") from error


def with_sharing(setup: PluginSetup, key: str, text: str, config_map: str, *, default: bool = False) -> PluginSetup:
    """The setup with this configuration under a key, chosen by the nodes of `setup.labels`. Other keys stay."""
    policy = setup.policy
    if policy is not None:
        known = {*(setup.config or {}), key}
        wrong = bool(policy.get("default")) and policy["default"] not in known  # a default that is not a key gives nothing
        policy = {**policy, "name": config_map} | ({"default": key} if default or wrong else {})
    return replace(setup, config={**(setup.config or {}), key: text}, labels=dict.fromkeys(setup.labels, key), policy=policy)


def needs_restart(kind: PluginKind, before: PluginSetup, after: PluginSetup) -> bool:
    """A plugin that runs reads another key when the label changes, but not the changed text of a key that it has read.

    A changed ClusterPolicy makes the operator restart it; a new key has been read by none.
    """
    if kind.follows or before.policy != after.policy:
        return False
    old, new = before.config or {}, after.config or {}
    return any(key in new and old[key] != new[key] for key in old)


def show_difference(kind: PluginKind, namespace: str, before: PluginSetup, after: PluginSetup) -> list[str]:
    """A unified diff of what changes, object by object."""
    return [line for parts in _objects(kind, namespace, before, after) for line in _diff(*parts)]


def _objects(kind: PluginKind, namespace: str, before: PluginSetup, after: PluginSetup) -> Iterator[tuple[str, object, object]]:
    yield f"configmap/{kind.config_map} ({namespace})", before.config, after.config
    for node in sorted({*before.labels, *after.labels}):
        yield f"node/{node}", _label(kind, before.labels.get(node)), _label(kind, after.labels.get(node))
    yield "clusterpolicy: spec.devicePlugin.config", before.policy, after.policy


def _label(kind: PluginKind, value: str | None) -> dict[str, str] | None:
    return {kind.label: value} if value is not None else None


def _diff(name: str, before: object, after: object) -> Sequence[str]:
    old, new = (_lines(value) for value in (before, after))
    return [line.rstrip("\n") for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=2)]


def _lines(value: Any) -> list[str]:  # noqa: ANN401 - YAML
    if value is None:
        return []
    if isinstance(value, Mapping) and any("\n" in str(item) for item in value.values()):
        return [line + "\n" for key in sorted(value) for line in (f"{key}: |", *(f"  {x}" for x in value[key].splitlines()))]
    return yaml.safe_dump(dict(value)).splitlines(keepends=True)
