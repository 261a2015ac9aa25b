"""Models and programs that should run, and the copies that do."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from aimgpu.domain.ask import Ask, Memory, Priority
from aimgpu.domain.grant import Grant
from aimgpu.domain.objective import ServiceObjective
from aimgpu.domain.placement import Slot

PROGRAM = "program"  # stands for the engine where none serves


class WatchdogPolicy(StrEnum):
    """What is done about an instance that takes more than its grant, or is not held."""

    WARN = "warn"
    THROTTLE = "throttle"
    RESTART = "restart"
    STOP = "stop"


class Sharing(StrEnum):
    """What lower-priority neighbours on the GPU may have while this model works."""

    STRICT = "strict"  # nothing: it runs as if alone
    PROMISE = "promise"  # what its service objectives leave free
    FAIR = "fair"  # turns by share, as the driver gives them


class SecretKind(StrEnum):
    FILE = "file"
    VARIABLE = "variable"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSource:
    """Where the value of an environment variable is read when the engine starts; the value itself is never kept."""

    name: str  # of the variable that the engine gets
    kind: SecretKind
    source: str  # path of a file, or name of a variable of the daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A server of the user's own, with placeholders in its words for what it is given."""

    HEALTH: ClassVar[str] = "/health"

    argv: tuple[str, ...]
    directory: str | None = None  # where it runs; None: in the run folder of its instance
    health: str = HEALTH  # path that answers 2xx when it can serve
    models: tuple[str, ...] = ()  # as it calls them; empty: it is asked
    ready_seconds: int | None = None  # how long it may load; None: as long as any engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process that cannot be mistaken for another: pids are reused, start times are not."""

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat: clock ticks after boot
    boot_id: str  # ticks count from a boot; another boot, another process


class RestartPolicy(StrEnum):
    """When a program that ended is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserProgram:
    """Anything but a server of models: it runs in its grant until it ends."""

    argv: tuple[str, ...]
    directory: str | None = None  # where it runs; None: in the run folder of its instance
    restart: RestartPolicy = RestartPolicy.NEVER
    after: tuple[str, ...] = ()  # deployments: it starts once models of these answer and programs ended well
    caller: ProcessIdentity | None = None  # becomes the program itself once it has its grant; None: the daemon starts it


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter of a model: a model of its own to callers."""

    key: str  # in the stack file
    name: str  # as callers call it
    path: str
    priority: Priority | None = None  # None: the model's
    objective: ServiceObjective | None = None  # None: nothing was promised


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverrides:
    """What a user passes to the engine beside what we set. Pairs rather than mappings: a deployment can be hashed."""

    arguments: tuple[tuple[str, ...], ...] = ()  # a flag without dashes, then its values; none: it stands alone
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[SecretSource, ...] = ()
    image: str | None = None  # for launchers that run containers
    adapters: tuple[Adapter, ...] = ()
    server: ServerProgram | None = None  # the program itself, where the engine is whatever the user names
    program: UserProgram | None = None  # what runs instead of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model or program that should run, as the user wrote it."""

    name: str
    model: str
    ask: Ask
    engine: str | None = None  # None: the best that this machine can run
    precision: str | None = None
    context_tokens: int | None = None
    concurrency: int | None = None  # requests at once; None: the engine's own default
    objective: ServiceObjective | None = None
    replicas: int = 1
    keep_seconds: int | None = None  # None: always
    sleeps_in_place: bool = True  # where its engine can; False: it is stopped when it is idle
    launcher: str = "process"
    prepared: bool = True  # a process that has imported its engine may become it
    watchdog: WatchdogPolicy = WatchdogPolicy.WARN
    sharing: Sharing = Sharing.STRICT
    overrides: EngineOverrides = field(default_factory=EngineOverrides)
    aliases: tuple[str, ...] = ()  # other names that callers may use, without Ollama's `:latest`
    default: bool = False  # serves requests that name no model
    resized_bytes: int | None = None  # its share on each device since it was resized while it ran; not of the stack file

    def with_live_settings_of(self, other: "Deployment") -> "Deployment":
        """With what can change while instances run: how many there are, the promises, how the GPU is shared, and names."""
        return replace(
            self,
            replicas=other.replicas,
            objective=other.objective,
            sharing=other.sharing,
            aliases=other.aliases,
            default=other.default,
        )

    @property
    def has_caller(self) -> bool:
        """Whether it is the process of a caller: it runs once, and nobody else can start it."""
        return self.overrides.program is not None and self.overrides.program.caller is not None

    @property
    def present_ask(self) -> Ask:
        """The ask, with the share that a resize gave it in place of the one that the user wrote."""
        if self.resized_bytes is None:
            return self.ask
        return replace(self.ask, want=Memory(memory_bytes=self.resized_bytes))


class InstanceState(StrEnum):
    QUEUED = "queued"
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    ENDED = "ended"  # a program, by itself, and it is not started again
    FAILED = "failed"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepFootprint:
    """What an instance holds while its engine sleeps in place."""

    device_bytes: int  # on each of its devices
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What a program that ended leaves to know."""

    exit_code: int | None  # 128 + N for signal N, as shells report it; None: not known
    granted_bytes: int  # on each of its GPUs
    peak_bytes: int | None = None  # the most that it held on one of them; None: nothing counted it
    seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One copy of a deployment, with what it was granted."""

    id: str
    deployment: str
    replica: int
    model: str
    engine: str
    launcher: str
    state: InstanceState
    revision: str | None = None  # of the deployment that it was started from; None: written by a version that kept none
    reason: str | None = None  # why it failed or waits
    last_lines: tuple[str, ...] = ()  # of its log, when it failed
    process: ProcessIdentity | None = None
    endpoint: str | None = None  # where the engine itself answers, for the gateway only
    grants: tuple[Grant, ...] = ()
    percent: int | None = None  # while loading, where the engine reports it
    sleep_footprint: SleepFootprint | None = None  # None: it cannot sleep in place, and is stopped instead
    awake_slots: tuple[Slot, ...] = ()  # while it sleeps in place: what it must hold again before it wakes
    load_ms: int | None = None  # its start, as last measured
    wake_ms: int | None = None  # its waking in place, as last measured
    concurrency: int | None = None  # requests that its engine serves at once; None: not known
    kv_tokens: int | None = None  # that its KV cache holds; None: not known
    kv_cache_bytes: int | None = None  # of its KV cache, as it was started
    context_tokens: int | None = None  # of one request, as it was started
    sized_bytes: int | None = None  # what it was started to use of each of its grants
    in_host_memory: bool = False  # its GPU is simulated, or its engine runs on the CPU
    stage: str | None = None  # what it does while it loads ("loading weights"), where the engine reports it
    began_ms: int | None = None  # wall clock, of a program
    end: RunEnd | None = None  # of a program that ended

    @property
    def is_program(self) -> bool:
        """Whether it is a program and not a server: it gets no requests and ends by itself."""
        return self.engine == PROGRAM

    @property
    def sleeps_in_place(self) -> bool:
        return self.state is InstanceState.SLEEPING and self.process is not None
