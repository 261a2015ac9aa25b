"""The configuration of the device plugin from a ConfigMap: followed as it changes, chosen by a label of the node."""

import logging
from collections.abc import Callable, Mapping

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Mirror
from aimgpu.kubernetes.api.resources import CONFIG_MAPS
from aimgpu.kubernetes.vocabulary.names import LABEL_PLUGIN_CONFIG, NVIDIA_PLUGIN_CONFIG
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig, parse_config

log = logging.getLogger(__name__)

DEFAULT_KEY = "default"
_NOT_CONFIGURED = "the node has no label, and the ConfigMap no default"


class FollowedConfig:
    """A configuration that cannot be used leaves the former one in force, as NVIDIA's config manager does."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._namespace, self._name = namespace, name
        self._map = Mirror(client, CONFIG_MAPS, _read_data, namespaces=(namespace,), fields=f"metadata.name={name}")
        self._used: SharingConfig | None = None
        self._complaint: str | None = None

    async def watch(self, changed: Callable[[], None]) -> None:
        """Until cancelled."""
        self._map.listen(lambda *_: changed())
        await self._map.run()

    async def listed(self) -> None:
        """Return when the ConfigMap has been looked for."""
        await self._map.synced.wait()

    def choose(self, labels: Mapping[str, str]) -> SharingConfig | None:
        """For a node with these labels; None: it is given none, or has never been given one that can be used."""
        data = self._map.kept.get((self._namespace, self._name), {})
        label = labels.get(LABEL_PLUGIN_CONFIG) or labels.get(NVIDIA_PLUGIN_CONFIG)
        if label is None and DEFAULT_KEY not in data:  # not set up, or no longer
            if self._complaint != _NOT_CONFIGURED:
                log.info("plugin.not_configured", extra={"data": {"configmap": f"{self._namespace}/{self._name}"}})
            self._used, self._complaint = None, _NOT_CONFIGURED
            return None
        key = label or DEFAULT_KEY
        complaint = None
        if key not in data:
            complaint = f"configmap {self._namespace}/{self._name} has no key {key}"
        else:
            try:
                self._used = parse_config(data[key])
            except InvalidInput as error:
                complaint = error.message
        if complaint is not None and complaint != self._complaint:
            log.warning("plugin.configuration_refused", extra={"data": {"key": key, "reason": complaint}})
        self._complaint = complaint
        return self._used


def _read_data(config_map: Object) -> Mapping[str, str]:
    return config_map.get("data") or {}
