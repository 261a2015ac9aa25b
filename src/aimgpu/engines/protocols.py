"""What an engine, a launcher and a model store are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from aimgpu.domain import Deployment, EngineOverrides, Footprint, Instance, ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether an engine can run here; if not, or not as one would expect, why, and what would change that."""

    available: bool
    version: str | None = None
    reason: str | None = None
    hint: str | None = None
    where: str | None = None  # the program that is used, if there is a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What an engine turns into a command line."""

    instance: Instance
    model_path: Path | None  # local file or folder, if there is one
    footprint: Footprint
    environment: Mapping[str, str]  # identity of the partition, isolation
    device_nodes: tuple[str, ...]
    run_directory: Path  # private to the instance: log, endpoint file, key
    api_key: str  # the engine answers only to who has it
    partition_memory_bytes: int | None = None  # of the partition that was granted, if known
    port: int | None = None  # where it must listen; None: any that is free
    control_group: Path | None = None  # for the launcher; engines leave it alone
    may_sleep: bool = False  # it is to be put to sleep in place; for an engine that is a Sleeper
    prepared: bool = True  # a prepared process may become it
    overrides: EngineOverrides = field(default_factory=EngineOverrides)  # the user's own; joined to the Command by the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or file that a container must see, under the same path."""

    path: str
    writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImports:
    """What a program written in Python may do before it is known what it will serve; it must not use a GPU."""

    modules: tuple[str, ...]  # to import; those that this version does not have are left out
    varying: tuple[str, ...] = ()  # beginnings of the names of variables that no import reads
    environment: tuple[tuple[str, str], ...] = ()  # what the program would set itself for what it spawns
    preload: tuple[str, ...] = ()  # likewise: libraries below a folder of packages, as patterns
    spawns: int = 1  # processes that it starts by multiprocessing's `spawn` and that need the same modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a launcher starts."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None  # for launchers that run containers
    device_nodes: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()  # the run directory is always there
    secrets: Mapping[str, str] = field(default_factory=dict)  # environment that is never printed
    port: int | None = None  # where it listens, for launchers that run containers: published on loopback alone
    control_group: Path | None = None  # cgroup v2: its processes belong there from their first instruction
    process: ProcessIdentity | None = None  # that waits to become the program, with what it is given; None: it is started
    preparation: PreparedImports | None = None  # for the launcher of processes: it may start it by a fork


class HealthState(StrEnum):
    """How far an engine is."""

    STARTING = "starting"  # not answering yet
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"
    BROKEN = "broken"  # answers, but cannot serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer to one question to an engine."""

    state: HealthState
    endpoint: str | None = None  # "http://127.0.0.1:41234", once known
    percent: int | None = None
    stage: str | None = None  # what it does while it starts: "loading weights", "compiling"
    reason: str | None = None


class Engine(Protocol):
    """A program that serves models."""

    name: str
    fetches_models: bool  # brings models that are not on disk by itself
    takes_priority: bool  # orders requests by a "priority" in their body, lower first
    formats: frozenset[str]  # of local models that it can serve ("gguf", "safetensors")

    @property
    def runs_without_gpu(self) -> bool:
        """Can serve on a simulated device."""

    @property
    def starts_alone(self) -> bool:
        """One at a time on a device: it measures the memory that it finds free."""

    def availability(self) -> Availability:
        """Whether this machine can run it; probed in a child process where a wheel may crash."""

    def command(self, request: LaunchRequest) -> Command:
        """The command line for one instance; may write files into its run directory."""

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        """Ask the engine once, with a short bound; never raises for an engine that is down or talks garbage."""

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """A sentence for people, read from the log of an engine that died."""


@runtime_checkable
class ShortfallReader(Protocol):
    """An engine whose log says how much memory it missed when it died."""

    def missing_bytes(self, last_lines: tuple[str, ...]) -> int | None:
        """Bytes that it wanted and that were not free; None: it did not die for want of GPU memory."""


@runtime_checkable
class Remarker(Protocol):
    """An engine whose instances may serve otherwise than their owner would expect, such as on the CPU beside a GPU."""

    def remark(self, run_directory: Path) -> str | None:
        """What is so; the end of a sentence that begins with the instance's name."""


@runtime_checkable
class ResizeNoter(Protocol):
    """An engine that does not use a share that changes while it runs at once."""

    resize_note: str  # what it makes of it; the beginning of a sentence


@runtime_checkable
class ServerEngine(Protocol):
    """An engine for servers that are not known: chosen only by name, and nobody can size what it runs."""

    def check(self, deployment: Deployment, *, installed: bool) -> None:
        """Raises EngineUnavailable or InvalidInput for what could not be started. `installed`: on this machine, in no image."""

    def served_models(self, run_directory: Path) -> tuple[str, ...]:
        """As the server calls them, the first before the others; empty: it did not say."""

    def ready_seconds(self, run_directory: Path) -> float | None:
        """How long it may load; None: as long as any."""


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory back without ending, and take it again; others are stopped and started.

    It must be started with `may_sleep`. Only the caller commands it: an engine that sleeps by itself would make the ledger
    wrong, so llama-server's own `--sleep-idle-seconds` does not make it a Sleeper.
    """

    gives_back: frozenset[str]  # terms of the footprint that leave the device when it sleeps
    keeps_on_host: frozenset[str]  # of these, what host memory holds meanwhile, unless the sleep is deep

    def why_no_sleep(self, *, in_image: bool, simulated: bool) -> str | None:
        """Why instances cannot sleep here, the beginning of a sentence; None: they can. `in_image`: it comes in an image."""

    def sleep(self, run_directory: Path, api_key: str, *, deep: bool = False) -> None:
        """Returns when the memory is free. `deep` holds nothing on the host, and takes longer to wake. Raises EngineFailed."""

    def wake(self, run_directory: Path, api_key: str) -> None:
        """Returns when it has its memory again; `check_health` reports when it can serve. Raises EngineFailed."""


@runtime_checkable
class EndingEngine(Protocol):
    """An engine whose instances end by themselves."""

    def exit_code(self, run_directory: Path) -> int | None:
        """Of the run that ended; None: it is not known."""


class Launcher(Protocol):
    """Starts, finds and stops engine processes."""

    name: str
    brings_engines: bool  # images hold the engine: what is installed on this machine does not matter

    @property
    def joins_groups(self) -> bool:
        """Whether it puts what it starts into the control group that a Command names, from its first instruction."""

    def check(self) -> None:
        """Raises EngineUnavailable, EngineFailed or NotAllowed where it could start nothing now."""

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        """Start it detached from this process, marked so that `find_started` finds it again."""

    def is_running(self, process: ProcessIdentity) -> bool:
        """Whether this very process is alive."""

    def how_it_ended(self, process: ProcessIdentity) -> str | None:
        """Its status or signal, as a sentence; None where it runs, or its end was not seen."""

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        """Ask, wait, then force; returns when it and its children are gone. Never another process with a reused pid."""

    def find_started(self) -> Mapping[str, ProcessIdentity]:
        """Instance id -> live process, of everything this launcher's home ever started."""

    def last_lines(self, run_directory: Path, count: int = 20) -> tuple[str, ...]:
        """The end of the log of a run."""


@runtime_checkable
class Fetcher(Protocol):
    """A launcher that must bring something here before it can start an engine, such as an image."""

    def fetch(
        self, command: Command, run_directory: Path, report: Callable[[int | None], None], give_up: Callable[[], None]
    ) -> None:
        """Returns when `start` can begin; may take long. `report` receives the percent, `give_up` raises to end it."""


@runtime_checkable
class OtherWays(Protocol):
    """A launcher that can start a command in more than one way."""

    def start_otherwise(self, process: ProcessIdentity) -> bool:
        """Of one that did not get ready: whether its next start goes another way, and may succeed."""


Progress = Callable[[str, int, int | None], None]  # what, bytes done, bytes in all where known


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine's disk."""

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"


class ModelStore(Protocol):
    """Models on this machine's disk, and how they get there."""

    def find(self, model: str) -> LocalModel | None:
        """A path the user gave, or what the cache holds; no download."""

    def find_config(self, model: str, *, fetch: bool) -> LocalModel | None:
        """The folder with a hub model's config.json, without its weights: enough to size it. `fetch` brings just that file."""

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        """Find it or bring it as GGUF, checked by hash, never half-written. Raises ModelUnavailable with what to do."""
