"""The callers' keys of a cluster's gateway, changed as the key file of one machine is."""

import base64
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from aimgpu.errors import ClusterConflict, ClusterFailed
from aimgpu.files import write_private
from aimgpu.keyfile import KeyStore
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import SECRETS, SERVICES
from aimgpu.kubernetes.models.serving.cluster_view import GATEWAY_SELECTOR

KEYS_FILE = "keys.json"  # of the Secret; the same content as the key file
KEYS_SECRET = "aim-gpu-sharing-keys"  # noqa: S105 - the name of a Secret
_ATTEMPTS = 5
_Answer = TypeVar("_Answer")


class KeySecret:
    """In the gateway's namespace, wherever that is. Only hashes are kept."""

    def __init__(self, client: Client, namespace: str, name: str = KEYS_SECRET) -> None:
        self._client = client
        self._namespace, self._name = namespace, name

    async def change(self, act: Callable[[KeyStore], _Answer]) -> _Answer:
        """Let `act` work on the keys, and keep what it made of them; again where another was faster."""
        for attempt in range(_ATTEMPTS):
            secret = await self._client.find(SECRETS, self._name, self._namespace)
            with TemporaryDirectory(prefix="aimgpu-keys-") as folder:
                path = Path(folder) / KEYS_FILE
                before = base64.b64decode(((secret or {}).get("data") or {}).get(KEYS_FILE) or "").decode()
                if before:
                    write_private(path, before)
                answer = act(KeyStore(path))
                after = path.read_text() if path.exists() else ""
            if after == before:
                return answer
            try:
                await self._write(secret, base64.b64encode(after.encode()).decode())
            except ClusterConflict:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            return answer
        raise AssertionError("unreachable")

    async def _write(self, secret: Object | None, data: str) -> None:
        if secret is None:
            metadata = {"name": self._name, "labels": {"app.kubernetes.io/part-of": "aim-gpu-sharing"}}
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {KEYS_FILE: data}}
            await self._client.create(SECRETS, body, self._namespace)
        else:
            body = {**secret, "data": {**(secret.get("data") or {}), KEYS_FILE: data}}
            await self._client.replace(SECRETS, body, self._namespace)


async def find_gateway_namespace(client: Client) -> str:
    """Where the chart's gateway runs. Raises ClusterFailed where there is none, or several."""
    found = {str(item["metadata"]["namespace"]) for item in (await client.list(SERVICES, labels=GATEWAY_SELECTOR))[0]}
    if len(found) != 1:
        many = f"gateways run in {', '.join(sorted(found))}" if found else "no gateway of AIM GPU Sharing runs in this cluster"
        hint = "Name its namespace with --namespace." if found else "Install the chart with gateway.enabled=true."
        raise ClusterFailed(many, hint=hint)
    return found.pop()


async def gateway_namespace_or(client: Client, usual: str) -> str:
    """Of the gateway; `usual` where there is none yet, or it is not the caller's to see."""
    try:
        return await find_gateway_namespace(client)
    except ClusterFailed:
        return usual
