"""Responses that a later request may go on from: bounded, each seen by its own key only, and forgotten after a while."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import orjson

from aimgpu.errors import InvalidRequest, NotFound

Fields = dict[str, Any]
_KEPT_SECONDS = 3600.0
_MOST_BYTES = 64 * 1024 * 1024
_SHARE_OF_ONE = 4  # no caller may have more than this part of it
_MOST_TURNS = 1000
_LONGEST_CONVERSATION = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    caller: str
    response: Fields
    input_items: list[Fields]  # of this turn alone
    input_bytes: int  # of the request that they came in
    previous: str | None


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    size: int
    used: float


class ResponseStore:
    """Keeps what was used last. What does not fit is not kept: going on from it is refused, nothing else fails."""

    def __init__(
        self, *, kept_seconds: float = _KEPT_SECONDS, most_bytes: int = _MOST_BYTES, now: Callable[[], float] = monotonic
    ) -> None:
        self._kept_seconds = kept_seconds
        self._most_bytes = most_bytes
        self._most_of_one = most_bytes // _SHARE_OF_ONE
        self._now = now
        self._lock = threading.Lock()  # long answers are put beside the event loop
        # By caller and identifier, least recently used first. Callers of vLLM may choose an identifier, also one of another.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._bytes: dict[str, int] = {}  # by caller

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())

    def put(self, stored: StoredResponse) -> None:
        key = (stored.caller, str(stored.response["id"]))
        try:
            size = len(orjson.dumps(stored.response)) + stored.input_bytes
        except orjson.JSONEncodeError:  # nested too deep to be shown again
            size = self._most_of_one + 1
        with self._lock:
            self._put(key, stored, size)

    def _put(self, key: tuple[str, str], stored: StoredResponse, size: int) -> None:
        self._drop(key)
        if size > self._most_of_one:
            return
        self._entries[key] = _Entry(stored, size, self._now())
        self._bytes[stored.caller] = self._bytes.get(stored.caller, 0) + size
        self._expire()
        while self._bytes[stored.caller] > self._most_of_one:  # a caller pushes out its own first
            self._drop(next(one for one in self._entries if one[0] == stored.caller))
        while self.total_bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def find(self, identity: str, caller: str) -> StoredResponse:
        """Raises NotFound; another caller's response is not found either."""
        with self._lock:
            self._expire()
            entry = self._entries.get((caller, identity))
            if entry is not None:
                entry.used = self._now()
                self._entries.move_to_end((caller, identity))
        if entry is None:
            minutes = self._kept_seconds / 60
            raise NotFound(
                f"There is no response '{identity[:80]}' here.",
                hint=f"Responses are kept for {minutes:.0f} minutes after their last use, and not with 'store': false.",
            )
        return entry.stored

    def delete(self, identity: str, caller: str) -> None:
        self.find(identity, caller)
        with self._lock:
            self._drop((caller, identity))

    def history(self, identity: str, caller: str) -> tuple[list[Fields], int]:
        """Every item of the conversation up to and with this response, oldest first, and about how many bytes they are."""
        turns: list[StoredResponse] = []
        size = 0
        following: str | None = identity
        while following is not None:
            if len(turns) >= _MOST_TURNS:
                raise InvalidRequest(f"The conversation is longer than {_MOST_TURNS} turns.", param="previous_response_id")
            turns.append(self.find(following, caller))
            size += self._sizes(turns[-1])
            if size > _LONGEST_CONVERSATION:
                text = f"The conversation is longer than {_LONGEST_CONVERSATION} bytes."
                raise InvalidRequest(text, param="previous_response_id")
            following = turns[-1].previous
        items: list[Fields] = []
        for turn in reversed(turns):
            items += [*turn.input_items, *(turn.response.get("output") or ())]
        return items, size

    def _sizes(self, stored: StoredResponse) -> int:
        entry = self._entries.get((stored.caller, str(stored.response["id"])))
        return entry.size if entry is not None else stored.input_bytes

    def _expire(self) -> None:
        oldest = self._now() - self._kept_seconds
        while self._entries and (first := next(iter(self._entries.items())))[1].used < oldest:
            self._drop(first[0])

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            left = self._bytes[entry.stored.caller] - entry.size
            if left:
                self._bytes[entry.stored.caller] = left
            else:
                del self._bytes[entry.stored.caller]
