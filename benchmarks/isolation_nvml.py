"""NVML without a binding, for the isolation benchmark."""

import ctypes
import functools


@functools.cache
def open_nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
        raise OSError("NVML does not answer")
    return library, device
