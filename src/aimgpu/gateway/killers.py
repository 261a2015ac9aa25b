"""Requests that kill their engine: recognised when they come again, and refused for a while."""

from dataclasses import dataclass, field

from aimgpu.errors import RequestQuarantined

_ENOUGH = 1.9  # two deaths with nothing else running
_FORGOTTEN_AFTER_SECONDS = 600.0
_TOGETHER_SECONDS = 2.0  # disconnects of one engine so close to each other are one death
_MOST_KNOWN = 1000
_MOST_SAFE = 10_000


@dataclass(slots=True)
class _Suspicion:
    weight: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class KillerRequests:
    """Knows requests by a hash, never by their text. One of k that were there when an engine died is suspected by a k-th."""

    suspicions: dict[int, _Suspicion] = field(default_factory=dict)  # empty: nothing to check
    _safe: dict[int, None] = field(default_factory=dict)
    _deaths: dict[str, tuple[float, int]] = field(default_factory=dict)  # instance -> when, how many requests it had

    def note_safe(self, model: str, body: bytes) -> None:
        """An engine has answered it: another may be asked should one break off."""
        key = hash((model, body))
        self.suspicions.pop(key, None)
        self._safe[key] = None
        if len(self._safe) > _MOST_SAFE:
            del self._safe[next(iter(self._safe))]

    def is_safe(self, model: str, body: bytes) -> bool:
        """Whether an engine has answered it lately."""
        return hash((model, body)) in self._safe

    def check(self, model: str, body: bytes, now: float) -> None:
        """Raises RequestQuarantined for one that has ended its engine repeatedly."""
        found = self.suspicions.get(hash((model, body)))
        if found is None or found.weight < _ENOUGH:
            return
        left = found.last + _FORGOTTEN_AFTER_SECONDS - now
        if left <= 0:
            del self.suspicions[hash((model, body))]
            return
        raise RequestQuarantined(
            f"Engines of '{model}' died on this very request before; it is refused for {left / 60:.0f} more minutes.",
            hint="Change the request: a shorter prompt, another grammar, fewer images.",
        )

    def note_death(self, model: str, body: bytes, instance_id: str, in_flight: int, now: float) -> None:
        """The connection to the engine broke off after it had got this request. `in_flight`: requests it had, this one too."""
        when, together = self._deaths.get(instance_id, (float("-inf"), 0))
        if now - when > _TOGETHER_SECONDS:
            together = max(in_flight, 1)
            self._deaths[instance_id] = (now, together)
        key = hash((model, body))
        found = self.suspicions.pop(key, None)
        if found is None or now - found.last > _FORGOTTEN_AFTER_SECONDS:
            found = _Suspicion()
        found.weight += 1 / together
        found.last = now
        self.suspicions[key] = found
        if len(self.suspicions) > _MOST_KNOWN:
            del self.suspicions[next(iter(self.suspicions))]
        if len(self._deaths) > _MOST_KNOWN:
            del self._deaths[next(iter(self._deaths))]
