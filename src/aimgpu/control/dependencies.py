"""What a controller is wired from, and its time bounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aimgpu.control.effects import REAL, Effects
from aimgpu.control.unattributed_memory import UnattributedMemory
from aimgpu.domain import Deployment, Footprint, Instance
from aimgpu.engines.protocols import Engine, Launcher, LocalModel, ModelStore
from aimgpu.errors import InvalidInput
from aimgpu.hardware.protocols import Hardware, HelperProcesses, NoHelperProcesses
from aimgpu.isolation.protocols import Isolator
from aimgpu.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Bounds and pauses."""

    load_timeout_seconds: float = 600.0
    poll_seconds: float = 0.05
    wake_timeout_seconds: float = 120.0  # also to fall asleep: weights go to host memory
    drain_seconds: float = 30.0
    quiet_seconds: float = 0.2  # without a request before an engine sleeps: the gateway must have learned of it
    grace_seconds: float = 5.0
    ask_seconds: float = 5.0  # between two questions to a ready engine
    silence_seconds: float = 120.0  # a ready engine that does not answer for longer is restarted
    restart_delay_seconds: float = 0.5  # doubles with each failure in a row
    restart_longest_seconds: float = 300.0
    restart_jitter: float = 0.2  # part of the pause by which it is varied, so that many do not start at once
    restart_limit: int = 8  # failures in a row after which nothing is tried any more
    close_seconds: float = 15.0  # for operations under way when the daemon ends; the next one goes on with them
    room_retry_seconds: float = 5.0  # between two tries to place what is wanted and has no room
    error_retry_seconds: float = 60.0  # the same after an error, such as a download that failed
    least_residency_seconds: float = 30.0  # a model that was just loaded is not unloaded for another


RESTART_LIMIT_VARIABLE = "AIMGPU_RESTART_LIMIT"
_MOST_RESTARTS = 1000


def read_timing(environment: Mapping[str, str]) -> Timing:
    """With what `AIMGPU_RESTART_LIMIT` sets; raises InvalidInput where that is no such number."""
    text = environment.get(RESTART_LIMIT_VARIABLE, "").strip()
    if not text:
        return Timing()
    if not (text.isascii() and text.isdigit() and int(text) <= _MOST_RESTARTS):
        raise InvalidInput(
            f"{RESTART_LIMIT_VARIABLE} is {text!r}, not a number from 0 to {_MOST_RESTARTS}",
            hint="Set it to how often in a row a model may fail before it is not tried again until the next `aimgpu up`.",
        )
    return Timing(restart_limit=int(text))


class Sizer(Protocol):
    """What a deployment needs."""

    def __call__(self, deployment: Deployment, engine: str, local: LocalModel | None, vendor: str) -> Footprint: ...


# Called once an instance is ready, with the lines of its log; never raises.
Learner = Callable[[Instance, Footprint, tuple[str, ...]], None]


def learn_nothing(_instance: Instance, _footprint: Footprint, _lines: tuple[str, ...]) -> None:
    """Where no measurements are kept."""


# Called when a start died at its memory limit, with the bytes that it missed; never raises.
ShortfallNote = Callable[[Instance, Footprint, int], None]


def note_nothing(_instance: Instance, _footprint: Footprint, _missing_bytes: int) -> None:
    """Where no measurements are kept."""


def no_requests(_instance_id: str) -> int:
    """Requests in flight, where no gateway counts them."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What a controller works with."""

    hardware: Hardware
    ledger: Ledger
    isolator: Isolator
    engines: Mapping[str, Engine]  # best first
    launchers: Mapping[str, Launcher]
    models: ModelStore
    size: Sizer
    runs: Path  # one private folder per instance
    node: str
    in_flight: Callable[[str], int] = no_requests
    timing: Timing = field(default_factory=Timing)
    learn: Learner = learn_nothing
    note_shortfall: ShortfallNote = note_nothing
    effects: Effects = REAL
    unattributed: UnattributedMemory = field(default_factory=UnattributedMemory)
    helpers: HelperProcesses = field(default_factory=NoHelperProcesses)
