"""A bound on calls into the driver: one that hangs is left behind, and the caller gets an error instead of waiting for ever."""

import threading
from collections.abc import Callable
from typing import TypeVar

from aimgpu.errors import HardwareUnavailable

READ_SECONDS = 30.0  # a read takes milliseconds; a driver in trouble takes seconds for each GPU
CHANGE_SECONDS = 180.0  # of MIG instances, with a reset of the GPU

_Answer = TypeVar("_Answer")


class BoundedCalls:
    """Runs each call in a thread of its own: a thread inside the driver cannot be stopped, only left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stuck: threading.Thread | None = None

    def run(self, doing: str, seconds: float, call: Callable[[], _Answer]) -> _Answer:
        """Returns or raises as the call does. HardwareUnavailable after `seconds`, and at once while an earlier call hangs."""
        with self._lock:
            if self._stuck is not None and self._stuck.is_alive():
                raise HardwareUnavailable(
                    f"cannot {doing}: an earlier call into the NVIDIA driver still gets no answer",
                    hint="The driver hangs: look at dmesg for Xid messages, then reset the GPU or reboot.",
                )
            self._stuck = None
        answers: list[_Answer] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=work, name=f"nvml: {doing}", daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if answers:
            return answers[0]
        with self._lock:
            self._stuck = thread
        raise HardwareUnavailable(
            f"cannot {doing}: the NVIDIA driver gave no answer within {seconds:g} s",
            hint="Look at dmesg for Xid messages, then reset the GPU or reboot.",
        )
