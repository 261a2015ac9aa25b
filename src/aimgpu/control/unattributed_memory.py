"""Use of a GPU that no visible process explains: how much of it is foreign."""

import threading


class UnattributedMemory:
    """Remembers what was foreign before something of ours was placed beside it. Thread-safe.

    Where our own processes cannot be distinguished from others' (in a container without the host's process ids, or before an
    engine has opened the GPU), what we granted would else seem to explain what was in use already.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()

    def estimate(self, place: str, unexplained: int, granted: int) -> int:
        """Bytes of others at this place (a partition or a device); `granted`: to instances of ours that cannot be seen.

        At least what their grants cannot explain; at most what is there; between the two, what was known before.
        """
        with self._lock:
            known = min(self._known.get(place, 0), unexplained)
            found = self._known[place] = max(0, unexplained - granted, known)
            return found
