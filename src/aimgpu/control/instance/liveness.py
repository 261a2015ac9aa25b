"""How long an engine that runs has not answered. Pure; time is passed in."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Contact:
    asked: float
    heard: float


@dataclass(slots=True)
class Liveness:
    _contacts: dict[str, _Contact] = field(default_factory=dict)

    def is_due(self, instance_id: str, now: float, every_seconds: float) -> bool:
        """Whether to ask it again; one that was just met is asked at once."""
        contact = self._contacts.get(instance_id)
        return contact is None or now - contact.asked >= every_seconds

    def note(self, instance_id: str, now: float, *, answered: bool) -> float:
        """Seconds since it was last heard, or met."""
        contact = self._contacts.setdefault(instance_id, _Contact(asked=now, heard=now))
        contact.asked = now
        if answered:
            contact.heard = now
        return now - contact.heard

    def forget(self, instance_id: str) -> None:
        self._contacts.pop(instance_id, None)
