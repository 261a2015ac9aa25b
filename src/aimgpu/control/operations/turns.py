"""Turns: until a more urgent one is planned, the less urgent are not placed."""

import threading

_TURN_SECONDS = 5.0  # for which a less urgent one waits: preparing may mean a download


class PlanningTurn:
    """Ends once its holder is planned; `end` is what to pass as `planned`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._ended = threading.Event()

    def wait(self) -> None:
        """For its end, or for a while."""
        self._ended.wait(_TURN_SECONDS)

    def end(self) -> None:
        """Safe to call twice."""
        self._ended.set()
