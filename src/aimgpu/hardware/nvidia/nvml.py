"""NVML in this process: loaded at first use, every failure carries its code and the function that failed."""

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from aimgpu.errors import AimGpuError, HardwareFailed, HardwareUnavailable, NotAllowed, PartitionBusy
from aimgpu.hardware.nvidia.presence import nvidia_may_be_here

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
IN_USE = 19
NO_DATA = 21
NOT_READY = 27

# The device has no answer to this question; everything else is a failure.
_NO_ANSWER = frozenset({INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA, NOT_READY})

_HINTS = {
    NO_PERMISSION: "Run as root, or grant this user access to /dev/nvidiactl and /dev/nvidia-caps.",
    DRIVER_NOT_LOADED: "Load the driver (modprobe nvidia) and look at dmesg.",
    LIBRARY_NOT_FOUND: "Install the NVIDIA driver; in a container, start it with the NVIDIA container toolkit.",
    FUNCTION_NOT_FOUND: "This driver is too old for it; install a newer one.",
    GPU_IS_LOST: "The GPU fell off the bus: look at dmesg for Xid messages, then reset it or reboot.",
    RESET_REQUIRED: "Stop its processes and reset the GPU (nvidia-smi --gpu-reset), or reboot.",
    LIB_RM_VERSION_MISMATCH: "The driver was updated while it was loaded: reload the kernel module or reboot.",
    IN_USE: "Stop the processes that hold it.",
    TIMEOUT: "Look at dmesg for Xid messages.",
}

_KINDS: dict[int, type[AimGpuError]] = {
    NO_PERMISSION: NotAllowed,
    IN_USE: PartitionBusy,
    DRIVER_NOT_LOADED: HardwareUnavailable,
    LIBRARY_NOT_FOUND: HardwareUnavailable,
    FUNCTION_NOT_FOUND: HardwareUnavailable,
    GPU_IS_LOST: HardwareUnavailable,
    RESET_REQUIRED: HardwareUnavailable,
    LIB_RM_VERSION_MISMATCH: HardwareUnavailable,
}


class NvmlFailure(Exception):
    """A function of NVML failed; `code` is NVML's return value."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.function = function
        self.code = code
        self.text = text

    @property
    def hint(self) -> str | None:
        """What to do about it, if known."""
        return _HINTS.get(self.code)


class Presence:
    """Whether NVIDIA may be on this machine, looked up on its bus at most every `again_seconds` while it is not."""

    def __init__(self, look: Callable[[], bool] = nvidia_may_be_here, again_seconds: float = 30.0) -> None:
        self._look = look
        self._again_seconds = again_seconds
        self._absent_since: float | None = None

    def look(self, now: float) -> bool:
        """Whether to try NVML now."""
        if self._absent_since is not None and now - self._absent_since < self._again_seconds:
            return False
        found = self._look()
        self._absent_since = None if found else now
        return found


_presence = Presence()


def import_pynvml() -> Any:  # noqa: ANN401 - the module has no types
    """nvidia-ml-py, imported only where NVIDIA may be: 8000 lines that a machine without need not read."""
    if not _presence.look(time.monotonic()):
        raise NvmlFailure("nvmlInit", LIBRARY_NOT_FOUND, "no NVIDIA GPU and no device file of one is here")
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlFailure("nvmlInit", LIBRARY_NOT_FOUND, "the Python package nvidia-ml-py is not installed") from error


class Nvml:
    """The library, initialised once. `module` is pynvml, or what stands in for it."""

    def __init__(self, load: Callable[[], Any] = import_pynvml) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._module: Any = None
        self._ready = False
        self.remembered: dict[object, Any] = {}  # answers that hold until the driver is reloaded

    @property
    def is_started(self) -> bool:
        """Whether the driver's library was initialised."""
        return self._ready

    @property
    def module(self) -> Any:  # noqa: ANN401 - the module has no types
        """Constants and C structures; loads the module, not the driver's library."""
        if self._module is None:
            self._module = self._load()
        return self._module

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as pynvml answers
        """One function of pynvml. Raises NvmlFailure, also when the library cannot be initialised."""
        self.start()
        try:
            return self._invoke(name, *args, **kwargs)
        except NvmlFailure as failure:
            if failure.code == UNINITIALIZED:  # someone else in this process shut NVML down
                self._ready = False
                self.remembered.clear()
                self.start()
                return self._invoke(name, *args, **kwargs)
            raise

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as pynvml answers
        """Like `call`, but None where this device, driver or user gets no answer. A lost GPU still raises."""
        try:
            return self.call(name, *args, **kwargs)
        except NvmlFailure as failure:
            if failure.code in _NO_ANSWER:
                return None
            raise

    def start(self) -> None:
        """Initialise, unless that was done. A failure is tried again at the next call: a driver may come later."""
        if self._ready:
            return
        with self._lock:
            if not self._ready:
                self._invoke("nvmlInit")
                self._ready = True

    def close(self) -> None:
        """Shut NVML down; the next call starts it again."""
        with self._lock:
            if self._ready:
                self._ready = False
                self._invoke("nvmlShutdown")

    def _invoke(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as pynvml answers
        module = self.module
        function = getattr(module, name, None)
        if function is None:
            raise NvmlFailure(name, FUNCTION_NOT_FOUND, "not in this version of nvidia-ml-py")
        try:
            return function(*args, **kwargs)
        except module.NVMLError as error:
            raise NvmlFailure(name, int(error.value), str(error)) from error


def translate(failure: NvmlFailure, doing: str) -> AimGpuError:
    """The error that a caller outside this room understands."""
    message = f"{doing}: {failure.text} ({failure.function})"
    kind = _KINDS.get(failure.code, HardwareFailed)
    return kind(message, hint=failure.hint)
