"""NVML without a binding, and a thread that reads it, for the isolation benchmark."""

import ctypes
import functools
import threading
from abc import ABC, abstractmethod
from typing import Self


@functools.cache
def open_nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
        raise OSError("NVML does not answer")
    return library, device


class Sampler(ABC):
    """Reads from a thread of its own until the block ends."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Until `_done` is set."""
