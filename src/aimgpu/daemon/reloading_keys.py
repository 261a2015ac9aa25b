"""The API keys as the daemon sees them: read again when the file changes, so that a key counts, or is out, at once."""

import logging
from pathlib import Path

from aimgpu.domain import Priority
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.gateway.auth import Caller, HashedKeys
from aimgpu.keyfile import KeyStore, StoredKey

log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class ReloadingKeys:
    """Raises InvalidInput where the file is damaged at first; one that is damaged later leaves the keys as they were.

    Keys are required from the first one on, and stay so when the last is removed: taking a key away opens no door.
    """

    def __init__(self, path: Path, *, required: bool = False) -> None:
        """`required`: even while there is no key, because others than this machine can reach the daemon."""
        self._path = path
        self._stamp = self._read_stamp()
        self._required = required
        self._keys = self._read()

    @property
    def required(self) -> bool:
        if not self._required:
            self._refresh()
        return self._required

    def find(self, token: bytes) -> Caller | None:
        self._refresh()
        return self._keys.find(token)

    def _refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = self._read()
            except (AimGpuError, OSError) as error:
                log.error("keys.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
                self._required = True  # there is a file of keys, whatever it says

    def _read(self) -> HashedKeys:
        try:
            stored = KeyStore(self._path).read()
            self._required = self._required or bool(stored)
            return HashedKeys({key.sha256: _caller(key) for key in stored})
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
