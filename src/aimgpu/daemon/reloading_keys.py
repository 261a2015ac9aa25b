"""Keeps the gateway's key table equal to the key file, so that a key counts, or is refused, within a fraction of a second."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.gateway.auth import Caller, KeyTable, caller_of
from aimgpu.keyfile import KeyStore, write_last_used

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_NOTE_SECONDS = 60.0  # how exactly the last use of a key is known on disk
_Stamp = tuple[int, int, int]


class ReloadingKeys:
    """Looks at the file from a thread; requests only read `table`.

    A damaged file leaves the keys as they were, and where there were none no one gets in: the models go on, and `down` works.
    Keys are required from the first one on, and stay so when the last is removed: removing a key opens no door.
    """

    def __init__(self, path: Path, *, required: bool = False) -> None:
        """`required`: even while there is no key, because other machines can reach the daemon."""
        self._path = path
        self._stamp: _Stamp | None = None
        self._callers: dict[str, Caller] = {}
        self.table = KeyTable(required=required)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="keys", daemon=True)
        self.refresh()

    def start(self) -> None:
        """Follow the file from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Follow it no longer."""
        self._stopped.set()
        self._thread.join()

    def refresh(self) -> None:
        """Read the file again where it has changed."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        required = True  # there is a key file, whatever it holds
        try:
            self._callers = self._read()
            required = bool(self._callers)
        except (AimGpuError, OSError) as error:
            log.error("keys.unreadable", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it
        self.table.replace(self._callers, required=self.table.required or required)

    def _follow(self) -> None:
        noted, written = monotonic(), self.table.last_used()
        while not self._stopped.wait(_LOOK_SECONDS):
            self.refresh()
            if monotonic() - noted >= _NOTE_SECONDS:
                noted, written = monotonic(), self._note_use(written)
        self._note_use(written)

    def _note_use(self, written: Mapping[str, float]) -> Mapping[str, float]:
        used = self.table.last_used()
        if used != written:
            try:
                write_last_used(self._path, used)
            except OSError as error:
                log.warning("keys.use_not_noted", extra={"data": {"error": str(error)}})
        return used

    def _read(self) -> dict[str, Caller]:
        try:
            found = {key.sha256: caller_of(key) for key in KeyStore(self._path).read()}
            KeyTable(found)
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            hint = "Move it away and add the keys again with `aimgpu keys add`."
            raise InvalidInput(f"{self._path} is damaged: {error}", hint=hint) from error
        return found

    def _read_stamp(self) -> _Stamp | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
