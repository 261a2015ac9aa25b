"""The callers' keys in a Secret, followed by a watch: one that is added counts, and one that is removed is refused, at once."""

import base64
import binascii
import logging

from aimgpu.errors import AimGpuError
from aimgpu.gateway.auth import KeyTable, caller_of
from aimgpu.keyfile import parse_keys
from aimgpu.kubernetes.api_client import Client, Object
from aimgpu.kubernetes.serving.key_secret import KEYS_FILE
from aimgpu.kubernetes.standard_resources import SECRETS

log = logging.getLogger(__name__)


class SecretKeys:
    """A Secret that cannot be read leaves the keys as they were; one that is deleted lets nobody in."""

    def __init__(self, client: Client, namespace: str, secret: str) -> None:
        self._client = client
        self._namespace, self._secret = namespace, secret
        self.table = KeyTable(required=True)

    async def run(self) -> None:
        """For ever."""
        async for event in self._client.watch(SECRETS, self._namespace, fields=f"metadata.name={self._secret}"):
            if event.type == "DELETED":
                self.table.replace({}, required=True)
            elif event.type != "SYNCED":
                self._read(event.object)

    def _read(self, secret: Object) -> None:
        try:
            text = base64.b64decode((secret.get("data") or {}).get(KEYS_FILE) or "", validate=True).decode()
            callers = {key.sha256: caller_of(key) for key in parse_keys(text, f"Secret {self._secret}")} if text else {}
            self.table.replace(callers, required=True)
        except (AimGpuError, ValueError, binascii.Error) as error:
            log.error("keys.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
