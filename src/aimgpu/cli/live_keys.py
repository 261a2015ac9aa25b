"""The API keys as the daemon sees them: read again when the file changes, so that a key that was removed is out at once."""

import logging
from pathlib import Path

from aimgpu.cli.keystore import KeyStore, StoredKey
from aimgpu.domain import Priority
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.gateway.keys import Caller, HashedKeys

log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class LiveKeys:
    """Raises InvalidInput where the file is damaged at first; one that is damaged later leaves the keys as they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = self._read()

    def find(self, token: bytes) -> Caller | None:
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = self._read()
            except (AimGpuError, OSError) as error:
                log.error("keys.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
        return self._keys.find(token)

    def _read(self) -> HashedKeys:
        try:
            return HashedKeys({key.sha256: _caller(key) for key in KeyStore(self._path).read()})
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            hint = "Move it away and add the keys again with `aimgpu keys add`."
            raise InvalidInput(f"{self._path} is damaged: {error}", hint=hint) from error

    def _read_stamp(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _caller(key: StoredKey) -> Caller:
    return Caller(
        name=key.name,
        models=frozenset(key.models) if key.models is not None else None,
        priority=Priority(key.priority) if key.priority is not None else None,
        requests_per_second=key.requests_per_second,
        concurrency=key.concurrency,
    )
