"""The ConfigMap that a device plugin reads: one key per named configuration. Pure."""

from dataclasses import dataclass
from typing import Any

import yaml

from aimgpu.kubernetes.vocabulary.names import MANAGED_BY
from aimgpu.kubernetes.vocabulary.sharing_config import parse_config


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    """What the plugin is to do with each GPU of a node."""

    resource: str
    replicas: int
    rename: bool = False  # advertise RESOURCE.shared
    several: bool = False  # whether a container may ask for more than one replica
    enforced: bool = False  # a block that our plugin reads and NVIDIA's ignores


def plugin_config(settings: SharingSettings) -> str:
    """The configuration as text. Raises InvalidInput where the plugin would refuse it."""
    slicing = {
        "renameByDefault": settings.rename,
        "failRequestsGreaterThanOne": not settings.several,
        "resources": [{"name": settings.resource, "replicas": settings.replicas}],
    }
    config: dict[str, Any] = {"version": "v1", "flags": {"migStrategy": "none"}, "sharing": {"timeSlicing": slicing}}
    if settings.enforced:
        config["aim"] = {"isolation": "enforced"}
    text = yaml.safe_dump(config, sort_keys=False)
    parse_config(text)
    return text


def config_map(name: str, namespace: str, data: dict[str, str]) -> dict[str, Any]:
    """The object; `data` has one configuration per key."""
    metadata = {"name": name, "namespace": namespace, "labels": dict(MANAGED_BY)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
