"""What simulated Devices remember: a JSON file, or memory.

```json
{"devices": {"sim-mi300x-0": {"layout": "CPX/NPS1", "pending_memory_mode": null}},
 "foreign": [{"device": "sim-mi300x-0", "pid": 4242, "name": "python", "memory_bytes": 1073741824, "partition": null}],
 "faults": {"sim-mi300x-0": "stuck"}}
```
`foreign` puts processes of someone else on a Device; `faults` makes a Device misbehave ("stuck": a change is accepted and does
not take effect). Both are there to be edited by hand or by a test while a daemon runs.
"""

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from aimgpu.errors import HardwareUnavailable


class DeviceState(BaseModel):
    model_config = ConfigDict(extra="forbid")
    layout: str
    pending_memory_mode: str | None = None


class ForeignState(BaseModel):
    model_config = ConfigDict(extra="forbid")
    device: str
    pid: int = 0
    name: str | None = None
    memory_bytes: int | None = None
    partition: str | None = None


class State(BaseModel):
    model_config = ConfigDict(extra="forbid")
    devices: dict[str, DeviceState] = {}
    foreign: list[ForeignState] = []
    faults: dict[str, str] = {}

    def copy_deep(self) -> Self:
        return self.model_copy(deep=True)


class StateStore:
    """Reads and replaces the State as a whole; with a path, what a crash leaves is the old file or the new one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory = State()
        self._lock = threading.RLock()

    def read(self) -> State:
        if self._path is None:
            return self._memory
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return State()
        try:
            return State.model_validate(json.loads(text))
        except (ValidationError, ValueError) as error:
            raise HardwareUnavailable(
                f"the state of the simulated GPUs cannot be read: {self._path}",
                hint="Remove the file to start from unpartitioned GPUs.",
            ) from error

    @contextmanager
    def edit(self) -> Iterator[State]:
        """A copy to change, which replaces the State unless the block raises. One editor at a time, across processes."""
        with self._lock, self._locked_file():
            state = self.read().copy_deep()
            yield state
            if self._path is None:
                self._memory = state
            else:
                _write_atomically(self._path, state.model_dump(mode="json"))

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(self._path.name + ".lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(content, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
