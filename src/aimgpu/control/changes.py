"""A counter of changes to instances that others can wait on: no change between two looks is missed."""

from aimgpu.control.effects import REAL, Effects


class ChangeCounter:
    """Thread-safe."""

    def __init__(self, effects: Effects = REAL) -> None:
        self._changed = effects.condition()
        self._version = 0

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    def notify(self) -> None:
        """Something changed."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def wait(self, seen: int, seconds: float) -> int:
        """The version, once it differs from `seen` or the time is up."""
        with self._changed:
            if self._version == seen:
                self._changed.wait(seconds)
            return self._version
