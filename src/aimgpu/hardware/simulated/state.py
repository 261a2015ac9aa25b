"""What simulated devices remember: a JSON file, or memory.

```json
{"devices": {"sim-mi300x-0": {"layout": "CPX/NPS1", "pending_memory_mode": null}},
 "foreign": [{"device": "sim-mi300x-0", "pid": 4242, "name": "python", "memory_bytes": 1073741824, "partition": null}],
 "faults": {"sim-mi300x-0": "stuck"}}
```
`foreign` puts processes of someone else on a device; `faults` makes a device misbehave ("stuck": a change is accepted and does
not take effect; "lost": it does not answer). Both are there to be edited by hand or by a test while a daemon runs.
"""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import TypeVar

from aimgpu.errors import HardwareUnavailable
from aimgpu.files import locked, write_private

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class SimulatedState:
    layout: str
    pending_memory_mode: str | None = None


@dataclass(slots=True, kw_only=True)
class ForeignState:
    device: str
    pid: int = 0
    name: str | None = None
    memory_bytes: int | None = None
    partition: str | None = None


@dataclass(slots=True, kw_only=True)
class State:
    """What simulated GPUs remember between commands."""

    devices: dict[str, SimulatedState] = field(default_factory=dict)
    foreign: list[ForeignState] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)


_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    SimulatedState: {"layout": (str,), "pending_memory_mode": (str, NoneType)},
    ForeignState: {
        "device": (str,),
        "pid": (int,),
        "name": (str, NoneType),
        "memory_bytes": (int, NoneType),
        "partition": (str, NoneType),
    },
    State: {"devices": (dict,), "foreign": (list,), "faults": (dict,)},
}


def parse_state(value: object) -> State:
    """Raises ValueError for anything that is not a State, down to a misspelt key."""
    state = _parse(State, value)
    return State(
        devices={str(name): _parse(SimulatedState, entry) for name, entry in state.devices.items()},
        foreign=[_parse(ForeignState, entry) for entry in state.foreign],
        faults={str(name): str(fault) for name, fault in state.faults.items()},
    )


def _parse(kind: type[_T], value: object) -> _T:
    known = _FIELDS[kind]
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise ValueError(f"not a {kind.__name__}: {value!r}")
    for name, entry in value.items():
        if not isinstance(entry, known[name]) or isinstance(entry, bool):
            raise ValueError(f"{kind.__name__}.{name} cannot be {entry!r}")  # noqa: TRY004 - one error for any wrong file
    try:
        return kind(**value)
    except TypeError as error:
        raise ValueError(str(error)) from error


class StateStore:
    """Reads and replaces the State as a whole; with a path, what a crash leaves is the old file or the new one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory = State()
        self._lock = threading.RLock()

    def read(self) -> State:
        """Of the file; the defaults where there is none."""
        if self._path is None:
            return self._memory
        try:
            return parse_state(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return State()
        except (ValueError, OSError, RecursionError) as error:
            raise HardwareUnavailable(
                f"the state of the simulated GPUs cannot be read: {self._path}",
                hint="Remove the file to start from unpartitioned GPUs.",
            ) from error

    @contextmanager
    def edit(self) -> Iterator[State]:
        """A copy to change, which replaces the State unless the block raises. One editor at a time, across processes."""
        with self._lock, self._locked_file():
            state = copy.deepcopy(self.read())
            yield state
            if self._path is None:
                self._memory = state
            else:
                write_private(self._path, json.dumps(asdict(state), indent=1))

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with locked(self._path):
            yield
