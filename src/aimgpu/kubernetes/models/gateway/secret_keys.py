"""The callers' keys in a Secret, followed by a watch: one that is added counts, and one that is removed is refused, at once."""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import replace

from aimgpu.errors import AimGpuError
from aimgpu.gateway.auth import Caller, KeyTable, caller_of
from aimgpu.keyfile import parse_keys
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.mirror import Key, Mirror, as_it_is
from aimgpu.kubernetes.api.resources import SECRETS
from aimgpu.kubernetes.models.gateway.served_models import ReplicaShare
from aimgpu.kubernetes.models.serving.key_secret import KEYS_FILE

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


def own_part(caller: Caller, share: ReplicaShare) -> Caller:
    """What a key may do at this replica: requests are spread over all of them. Each answers one at a time at least."""
    rate, most = caller.requests_per_second, caller.concurrency
    return replace(
        caller,
        requests_per_second=None if rate is None else rate / share.count,
        concurrency=None if most is None else max(1, share.of(most, 0)),
    )


class SecretKeys:
    """A Secret that cannot be read leaves the keys as they were; one that is deleted lets nobody in."""

    def __init__(self, client: Client, namespace: str, secret: str, share: Callable[[], ReplicaShare] = ReplicaShare) -> None:
        """`share`: which of the gateways this one is now; limits of a key hold over all of them."""
        self._share, self._in_force = share, ReplicaShare()
        self._callers: dict[str, Caller] = {}
        self._secret = Mirror(
            client, SECRETS, as_it_is, namespaces=(namespace,), fields=f"metadata.name={secret}", on_change=self._saw
        )
        self.table = KeyTable(required=True)

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._secret.run())
            group.create_task(self._follow_replicas())

    async def _follow_replicas(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._share() != self._in_force:
                self._apply()

    def _apply(self) -> None:
        self._in_force = self._share()
        parts = {digest: own_part(caller, self._in_force) for digest, caller in self._callers.items()}
        self.table.replace(parts, required=True)

    def _saw(self, key: Key, _before: Object | None, secret: Object | None) -> None:
        try:
            data = ((secret or {}).get("data") or {}).get(KEYS_FILE) or ""
            text = base64.b64decode(data, validate=True).decode()
            self._callers = {one.sha256: caller_of(one) for one in parse_keys(text, f"Secret {key[1]}")} if text else {}
            self._apply()
        except (AimGpuError, ValueError, binascii.Error) as error:
            log.error("keys.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
