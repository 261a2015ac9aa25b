"""The bounds of a cluster's gateway queue: a ConfigMap beside the gateway, which every replica follows."""

import json
from collections.abc import Mapping
from typing import Any

from aimgpu.domain import QueueSettings
from aimgpu.domain.codec import decode, encode, split_known
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import CONFIG_MAPS, SERVICES
from aimgpu.kubernetes.models.serving.cluster_view import GATEWAY_SELECTOR
from aimgpu.kubernetes.vocabulary.names import GROUP

QUEUE_MAP = "aim-gpu-sharing-queue"
_QUEUE_FILE = "queue.json"
_SET_BY = f"{GROUP}/set-by"  # annotation: NAMESPACE/STACK


def read_bounds(found: Mapping[str, Any] | None) -> QueueSettings:
    """The defaults where there is no ConfigMap. Raises ValueError for one that was written by hand and makes no sense."""
    text = ((found or {}).get("data") or {}).get(_QUEUE_FILE)
    if not text:
        return QueueSettings()
    known, _ = split_known(QueueSettings, json.loads(text))
    settings: QueueSettings = decode(QueueSettings, known, QUEUE_MAP)
    return settings


class QueueBounds:
    """As the stack `set_by` (NAMESPACE/STACK) wants them; one gateway serves all stacks, and the last that gives some holds."""

    def __init__(self, client: Client, namespace: str, set_by: str) -> None:
        """`namespace`: of the gateway."""
        self._client = client
        self._namespace = namespace
        self._set_by = set_by

    async def change(self, settings: QueueSettings, *, dry_run: bool = False) -> bool:
        """Whether they differ from what was in force."""
        found = await self._client.find(CONFIG_MAPS, QUEUE_MAP, self._namespace)
        try:
            if read_bounds(found) == settings:
                return False
        except ValueError:  # made by hand: it is replaced
            pass
        if dry_run:
            return True
        if settings == QueueSettings():
            await self._client.delete(CONFIG_MAPS, QUEUE_MAP, self._namespace)
            return True
        metadata = {
            "name": QUEUE_MAP,
            "labels": {"app.kubernetes.io/part-of": "aim-gpu-sharing"},
            "annotations": {_SET_BY: self._set_by},
            "ownerReferences": await self._owner(),
        }
        data = {_QUEUE_FILE: json.dumps(encode(settings))}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        await self._client.patch(CONFIG_MAPS, QUEUE_MAP, body, self._namespace, kind="apply")
        return True

    async def reset(self, *, dry_run: bool = False) -> bool:
        """The defaults again, unless another stack has set the bounds since."""
        found = await self._client.find(CONFIG_MAPS, QUEUE_MAP, self._namespace)
        if found is None or (found["metadata"].get("annotations") or {}).get(_SET_BY) != self._set_by:
            return False
        return await self.change(QueueSettings(), dry_run=dry_run)

    async def _owner(self) -> list[Object]:
        """The gateway's Service: the bounds go with it when the chart is uninstalled."""
        services, _ = await self._client.list(SERVICES, self._namespace, labels=GATEWAY_SELECTOR)
        return [
            {"apiVersion": "v1", "kind": "Service", "name": one["metadata"]["name"], "uid": one["metadata"]["uid"]}
            for one in services[:1]
        ]
