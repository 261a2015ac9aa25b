"""Who stays awake, who sleeps with its weights in host memory, who sleeps without them, who stops, who is woken ahead.

One pure function over the models of one GPU: `decide_residency`. It returns the moves to begin now, and a sentence per model.

Rules, in their order:

 1. What is being moved is left alone and charged with the larger of its two sizes. Its end is the next time to decide.
 2. A model that works, or that callers wait for, is never put to sleep. One with `keep_seconds` None never is.
 3. Idle for as long as it is to be kept: asleep. One that just became ready stays for `least_residency_seconds`, for all but
    a higher priority.
 4. Host memory is bounded: for all, for each model, and for pinned memory, counted apart. Weights that do not fit are not kept:
    the model sleeps without them. Where the bound is passed already, those worth least there give way: without weights where
    that can be done by way of awake, else stopped.
 5. Callers wait: the highest priority first; then who brings the most requests in time for each second of waking, those that
    wait where that is still possible, and those expected soon. Who waited for `patience_seconds` comes before all others, the
    longest wait first. One model at a time copies from host memory and one reads the disk; starts run beside them.
 6. Room for a wake comes from those idle whose absence makes the fewest requests late for each byte (`ModelUse.loss`). Who is
    late already waits where the room would make more requests late than it saves, but no longer than `patience_seconds`.
 7. Where not even all that is awake would give room, sleepers are stopped for what they hold asleep, those worth least first.
 8. Weights are kept in host memory by what they save there for each byte: a sleeper leaves room for the largest of those awake
    that would save more. When nobody waits, the one that saves least is loaded and put to sleep without weights for them.
 9. Nobody waits: the model with the most to lose is woken ahead, in free room, or in the room of idle ones that lose only a
    small part of that.
10. Equal cases are decided by name. The same models and the same room give the same moves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from aimgpu.domain import Priority
from aimgpu.units import format_bytes

WEIGHT = {Priority.HIGH: 4.0, Priority.MEDIUM: 2.0, Priority.LOW: 1.0}
_WORTH_SWAPPING = 0.1  # wake ahead in the room of others only where they lose less than this part of what it gains
_SOONEST_SECONDS = 0.05
_COPYING = 0.3  # late requests of others for each second of copying
_SURENESS = 3  # half of the promised time taken: one request in eight is late
_MUCH_DENSER = 1.5
_HORIZON_SECONDS = 10.0  # what is gained by waking one, and lost by those that make room, is counted over this time
_MOST_AHEAD = 3  # that are looked at, those with the most to lose
_AHEAD_SECONDS = 600.0  # a request expected later than this does not wake a model ahead


class Residence(StrEnum):
    """What of a model is where."""

    AWAKE = "awake"
    WEIGHTS = "asleep, weights in host memory"
    EMPTY = "asleep without weights"
    STOPPED = "stopped"


def expected_loss(seconds: float, *, expected_seconds: float, first_token_seconds: float, copied: float = 0.0) -> float:
    """Late requests that the absence of a model is expected to make, for each second of it, when waking takes `seconds`.

    The next request is late the surer the longer that takes, and so are those that come meanwhile.
    """
    expected = max(expected_seconds, _SOONEST_SECONDS)
    late = min(seconds / first_token_seconds, 1.0) ** _SURENESS + max(seconds - first_token_seconds, 0.0) / expected
    return (late + _COPYING * (seconds + copied)) / expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """One model as it is used, and what each of its moves takes."""

    name: str
    residence: Residence
    awake_bytes: int
    asleep_bytes: int  # on the GPU, asleep with or without weights
    host_bytes: int  # of its weights
    pinned: bool = False  # whether host memory that holds them is pinned
    wake_seconds: float  # from WEIGHTS
    reload_seconds: float | None  # from EMPTY; None: its engine cannot sleep so
    start_seconds: float  # from STOPPED
    sleep_seconds: float
    expected_seconds: float  # until its next request
    moving_to: Residence | None = None
    in_flight: int = 0
    waiting: int = 0
    waited_seconds: float = 0.0  # by the first of them
    idle_seconds: float = 0.0
    resident_seconds: float = inf  # since it was ready
    keep_seconds: float | None = inf  # None: always
    priority: Priority = Priority.MEDIUM
    first_token_seconds: float = 2.0  # what callers were promised

    @property
    def weight(self) -> float:
        return WEIGHT[self.priority]

    def bytes_in(self, residence: Residence) -> int:
        """On the GPU."""
        if residence is Residence.AWAKE:
            return self.awake_bytes
        return 0 if residence is Residence.STOPPED else self.asleep_bytes

    def seconds_from(self, residence: Residence) -> float:
        """Until it is awake; sleeping without weights where its engine cannot counts as stopped."""
        if residence is Residence.AWAKE:
            return 0.0
        if residence is Residence.WEIGHTS:
            return self.wake_seconds
        if residence is Residence.EMPTY and self.reload_seconds is not None:
            return self.reload_seconds
        return self.start_seconds

    def loss(self, seconds: float, copied: float = 0.0) -> float:
        """See `expected_loss`. `copied`: seconds of copying beside, which make others wait too."""
        return self.weight * expected_loss(
            seconds, expected_seconds=self.expected_seconds, first_token_seconds=self.first_token_seconds, copied=copied
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """What one GPU and its host have for models, and how patient callers are taken to be."""

    gpu_bytes: int
    host_bytes: int  # for the weights of sleepers
    host_bytes_per_model: int | None = None
    pinned_bytes: int | None = None  # of host_bytes, how much may be pinned; None: all
    least_residency_seconds: float = 0.0
    patience_seconds: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Begin to bring a model to another residence. WEIGHTS to EMPTY goes by way of awake."""

    name: str
    to: Residence
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Moves in the order in which they must begin; `why` has a sentence for every model."""

    moves: tuple[Move, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)


def decide_residency(models: Iterable[ModelUse], room: MemoryRoom) -> Decision:
    """See the rules above."""
    board = _Board(sorted(models, key=lambda model: model.name), room)
    _sleep_the_idle(board)
    _relieve_the_host(board)
    _serve_the_waiting(board)
    if not board.waiting():
        _wake_ahead(board)
        _ready_the_host(board)
    reasons = {move.name: f"{move.to.value}: {move.because}" for move in board.moves}
    return Decision(
        moves=tuple(board.moves), why={model.name: reasons.get(model.name) or board.explain(model) for model in board.models}
    )


class _Board:
    """The models as they will be once the moves are done, and what that leaves of the room."""

    def __init__(self, models: Sequence[ModelUse], room: MemoryRoom) -> None:
        self.models = models
        self.room = room
        self.moves: list[Move] = []
        self.after = {model.name: model.moving_to or model.residence for model in models}
        self._put_off: dict[str, str] = {}
        self.gpu_free = room.gpu_bytes - sum(self._held(model) for model in models)
        self._host_used = self._pinned_used = 0
        for model in models:
            if Residence.WEIGHTS in (model.residence, model.moving_to):
                self._note_host(model, 1)
        self._density = {model.name: _host_density(model) for model in models}

    def is_taken(self, way: Residence) -> bool:
        """Whether another is being woken from there: one at a time copies from host memory, one reads the disk."""
        woken = {move.name for move in self.moves if move.to is Residence.AWAKE}
        return way is not Residence.STOPPED and any(
            model.residence is way and (model.moving_to is Residence.AWAKE or model.name in woken) for model in self.models
        )

    def _held(self, model: ModelUse) -> int:
        return max(model.bytes_in(model.residence), model.bytes_in(self.after[model.name]))

    def waiting(self) -> list[ModelUse]:
        """Not awake, not on its way anywhere, and callers wait."""
        return [
            model for model in self.models if model.waiting and model.residence is not Residence.AWAKE and self._stays(model)
        ]

    def move(self, model: ModelUse, to: Residence, because: str) -> None:
        """What it gives back counts as free from here on: its move comes before those that need it."""
        before = self.after[model.name]
        self.gpu_free -= model.bytes_in(to) - model.bytes_in(before)
        if to is Residence.WEIGHTS:
            self._note_host(model, 1)
        elif before is Residence.WEIGHTS and to is not Residence.AWAKE:
            self._note_host(model, -1)
        self.after[model.name] = to
        self.moves.append(Move(name=model.name, to=to, because=because))

    def put_off(self, model: ModelUse, because: str) -> None:
        self._put_off[model.name] = because

    def may_sleep(self, model: ModelUse, rank: int | None = None) -> bool:
        """`rank`: of the priority that needs the room."""
        if model.in_flight or model.waiting or model.keep_seconds is None:
            return False
        if rank is not None and model.priority.rank > rank:
            return False
        settled = model.resident_seconds >= self.room.least_residency_seconds
        return settled or (rank is not None and model.priority.rank < rank)

    def awake_idle(self, rank: int | None = None) -> list[ModelUse]:
        return [
            model
            for model in self.models
            if model.residence is Residence.AWAKE and self._stays(model) and self.may_sleep(model, rank)
        ]

    def _stays(self, model: ModelUse) -> bool:
        """Neither on its way nor moved by this decision."""
        return model.moving_to is None and self.after[model.name] is model.residence

    def could_free(self, rank: int) -> int:
        """Bytes, by putting to sleep all that may be once it is idle."""
        return sum(
            model.awake_bytes - model.asleep_bytes
            for model in self.models
            if self.after[model.name] is Residence.AWAKE and model.keep_seconds is not None and model.priority.rank <= rank
        )

    def asleep_idle(self, *residences: Residence) -> list[ModelUse]:
        return [model for model in self.models if model.residence in residences and self._stays(model) and not model.waiting]

    def host_used(self, *, pinned_only: bool = False) -> int:
        """One that wakes gives its host memory back only when it is awake."""
        return self._pinned_used if pinned_only else self._host_used

    def _note_host(self, model: ModelUse, sign: int) -> None:
        self._host_used += sign * model.host_bytes
        self._pinned_used += sign * model.host_bytes if model.pinned else 0

    def density(self, model: ModelUse) -> float:
        """What its weights save in host memory, for each byte."""
        return self._density[model.name]

    def host_takes(self, model: ModelUse) -> bool:
        room = self.room
        if room.host_bytes_per_model is not None and model.host_bytes > room.host_bytes_per_model:
            return False
        if self.host_used() + model.host_bytes > room.host_bytes:
            return False
        if not model.pinned or room.pinned_bytes is None:
            return True
        return self.host_used(pinned_only=True) + model.host_bytes <= room.pinned_bytes

    def residence_asleep(self, model: ModelUse) -> Residence:
        """Where it would sleep now. Weights that loading brings back as fast are not kept."""
        if model.reload_seconds is not None and model.reload_seconds <= model.wake_seconds:
            return Residence.EMPTY
        if self.host_takes(model) and self._is_worth_host(model):
            return Residence.WEIGHTS
        return Residence.STOPPED if model.reload_seconds is None else Residence.EMPTY

    def _is_worth_host(self, model: ModelUse) -> bool:
        """Whether the largest of the awake ones that would save more per byte of host memory could still come in too."""
        mine = self._density[model.name]
        better = (
            other.host_bytes
            for other in self.models
            if self._density[other.name] > mine and self.after[other.name] is Residence.AWAKE
        )
        return self.host_used() + model.host_bytes + max(better, default=0) <= self.room.host_bytes

    def explain(self, model: ModelUse) -> str:
        here = self.after[model.name].value
        if model.moving_to is not None:
            return f"on its way to {here}"
        if model.name in self._put_off:
            return f"{here}: {self._put_off[model.name]}"
        if self.after[model.name] is Residence.AWAKE:
            return f"{here}: {_why_awake(model)}"
        return (
            f"{here}: next request expected in {format_seconds(model.expected_seconds)}, back in {format_seconds(_back(model))}"
        )


def _sleep_the_idle(board: _Board) -> None:
    for model in board.awake_idle():
        if model.keep_seconds is not None and model.idle_seconds >= model.keep_seconds:
            board.move(
                model, board.residence_asleep(model), f"idle for {format_seconds(model.idle_seconds)}, as long as it is kept"
            )


def _relieve_the_host(board: _Board) -> None:
    room = board.room
    sleepers = sorted(board.asleep_idle(Residence.WEIGHTS), key=lambda model: (_host_density(model), model.name))
    for model in sleepers:
        too_large = room.host_bytes_per_model is not None and model.host_bytes > room.host_bytes_per_model
        too_pinned = model.pinned and room.pinned_bytes is not None and board.host_used(pinned_only=True) > room.pinned_bytes
        if not (too_large or too_pinned or board.host_used() > room.host_bytes):
            continue
        through_awake = model.reload_seconds is not None and board.gpu_free >= model.host_bytes
        because = f"host memory for sleepers is {format_bytes(room.host_bytes)}, and its weights save least there"
        board.move(model, Residence.EMPTY if through_awake else Residence.STOPPED, because)


def _serve_the_waiting(board: _Board) -> None:
    """Wakes one; all that are stopped and fit are started beside it, because a start hardly uses the link."""
    for model in sorted(board.waiting(), key=lambda model: _urgency(model, board.room)):
        if board.is_taken(model.residence):
            board.put_off(model, "another is being woken first")
            continue
        missing = model.awake_bytes - model.bytes_in(model.residence)
        victims = _find_victims(board, missing, model.priority.rank, keep=model.name)
        if victims is None:
            board.put_off(model, f"{format_bytes(missing, up=True)} are not free, and who has them works or is kept")
            continue
        lost = sum(cost for _, _, cost in victims) * _HORIZON_SECONDS
        if victims and _may_be_put_off(model, board.room) and lost > _gain(model):
            board.put_off(
                model, f"its callers are late already, and {lost:.1f} others would be late for {_gain(model):.1f} of its own"
            )
            continue
        _clear(board, victims, f"makes room for {model.name}")
        board.move(model, Residence.AWAKE, f"{model.waiting} wait")


def _wake_ahead(board: _Board) -> None:
    asleep = board.asleep_idle(Residence.WEIGHTS, Residence.EMPTY, Residence.STOPPED)
    due = [model for model in asleep if _is_due(model) and not board.is_taken(model.residence)]
    for model in sorted(due, key=lambda model: (-_ahead_density(model), model.name))[:_MOST_AHEAD]:
        missing = model.awake_bytes - model.bytes_in(model.residence)
        victims = _find_victims(board, missing, model.priority.rank, keep=model.name)
        if victims is None or any(to is Residence.STOPPED for _, to, _ in victims):
            continue
        if sum(cost for _, _, cost in victims) > _WORTH_SWAPPING * model.loss(model.seconds_from(model.residence)):
            continue
        _clear(board, victims, f"makes room for {model.name}, which is due sooner")
        board.move(model, Residence.AWAKE, f"ahead: next request expected in {format_seconds(model.expected_seconds)}")
        return


def _ready_the_host(board: _Board) -> None:
    """So that the densest of those awake finds room there when it must sleep."""
    if board.is_taken(Residence.WEIGHTS):
        return
    sleepers = [one for one in board.asleep_idle(Residence.WEIGHTS) if one.reload_seconds is not None]
    least = min(sleepers, key=lambda one: (board.density(one), one.name), default=None)
    if least is None or board.gpu_free < least.host_bytes:
        return
    denser = [
        model
        for model in board.models
        if board.after[model.name] is Residence.AWAKE and board.density(model) > _MUCH_DENSER * board.density(least)
    ]
    wanted = max((model.host_bytes for model in denser), default=0)
    if board.room.host_bytes - board.host_used() < wanted:
        board.move(least, Residence.EMPTY, "others that are awake would save more in host memory")


def _is_due(model: ModelUse) -> bool:
    return model.expected_seconds <= max(_AHEAD_SECONDS, 2 * model.seconds_from(model.residence))


Clearing = list[tuple[ModelUse, Residence, float]]


def _find_victims(board: _Board, missing: int, rank: int, *, keep: str) -> Clearing | None:
    """The cheapest set found that frees these bytes: idle ones put to sleep, then remains of sleepers stopped."""
    short = missing - board.gpu_free
    if short <= 0:
        return []
    options: list[tuple[float, ModelUse, Residence, float, int]] = []
    for model in board.awake_idle(rank):
        asleep = board.residence_asleep(model)
        cost = model.loss(model.seconds_from(asleep), model.sleep_seconds if asleep is Residence.WEIGHTS else 0.0)
        freed = model.awake_bytes - model.bytes_in(asleep)
        if freed > 0:
            options.append((cost / freed, model, asleep, cost, freed))
    options.sort(key=lambda option: (option[0], option[1].name))
    found = _cheapest(options, short)
    if found is None and board.could_free(rank) < short:  # also not once those that work are idle
        remains = [
            (model.loss(model.start_seconds), model, Residence.STOPPED, model.loss(model.start_seconds), model.asleep_bytes)
            for model in board.asleep_idle(Residence.WEIGHTS, Residence.EMPTY)
            if model.name != keep and model.asleep_bytes and model.keep_seconds is not None and model.priority.rank <= rank
        ]
        remains.sort(key=lambda option: (option[0], option[1].name))
        found = _cheapest([*options, *remains], short)
    return None if found is None else [(model, to, cost) for _, model, to, cost, _ in found]


Option = tuple[float, ModelUse, Residence, float, int]


def _cheapest(options: Sequence[Option], short: int) -> list[Option] | None:
    """The cheapest per byte until it is enough, without those that proved unnecessary; or one alone, if that is cheaper."""
    chosen: list[Option] = []
    freed = 0
    for option in options:
        if freed >= short:
            break
        chosen.append(option)
        freed += option[4]
    if freed < short:
        return None
    for option in sorted(chosen, key=lambda option: -option[3]):
        if freed - option[4] >= short:
            chosen.remove(option)
            freed -= option[4]
    single = min((option for option in options if option[4] >= short), key=lambda option: option[3], default=None)
    if single is not None and single[3] < sum(option[3] for option in chosen):
        return [single]
    return chosen


def _clear(board: _Board, victims: Clearing, because: str) -> None:
    for model, to, _ in victims:
        # Host memory that the one before took is no longer there for this one.
        now = board.residence_asleep(model) if to in (Residence.WEIGHTS, Residence.EMPTY) and _is_awake(board, model) else to
        board.move(model, now, f"{because}; its own next request is expected in {format_seconds(model.expected_seconds)}")


def _is_awake(board: _Board, model: ModelUse) -> bool:
    return board.after[model.name] is Residence.AWAKE


def _urgency(model: ModelUse, room: MemoryRoom) -> tuple[bool, int, float, str]:
    patient = model.waited_seconds < room.patience_seconds
    gained = _gain(model) / max(model.seconds_from(model.residence), _SOONEST_SECONDS)
    return (patient, -model.priority.rank, -gained if patient else -model.waited_seconds, model.name)


def _slack(model: ModelUse) -> float:
    return model.first_token_seconds - model.waited_seconds - model.seconds_from(model.residence)


def _may_be_put_off(model: ModelUse, room: MemoryRoom) -> bool:
    return _slack(model) < 0 and model.waited_seconds < room.patience_seconds and model.residence is not Residence.STOPPED


def _gain(model: ModelUse) -> float:
    """Requests that are in time by waking it now: those that wait, if that is still possible, and those expected soon."""
    in_time = model.waiting if _slack(model) >= 0 else 0
    return model.weight * (in_time + _HORIZON_SECONDS / max(model.expected_seconds, _SOONEST_SECONDS))


def _host_density(model: ModelUse) -> float:
    """What its weights save in host memory, for each byte."""
    without = model.start_seconds if model.reload_seconds is None else model.reload_seconds
    return (model.loss(without) - model.loss(model.wake_seconds, model.sleep_seconds)) / max(model.host_bytes, 1)


def _ahead_density(model: ModelUse) -> float:
    return model.loss(model.seconds_from(model.residence)) / max(model.awake_bytes - model.bytes_in(model.residence), 1)


def _why_awake(model: ModelUse) -> str:
    if model.in_flight:
        return f"{model.in_flight} in flight"
    if model.keep_seconds is None:
        return "kept always"
    return f"idle for {format_seconds(model.idle_seconds)}, next request expected in {format_seconds(model.expected_seconds)}"


def _back(model: ModelUse) -> float:
    return model.seconds_from(model.residence)


def format_seconds(value: float) -> str:
    """For people."""
    if value == inf:
        return "no time known"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"  # noqa: PLR2004
