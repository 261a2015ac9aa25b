"""Asks the GPU for a multiple of the memory that it sees, and shows what it gets. It knows nothing of aimgpu.

    aimgpu exec --memory 1GiB --software MI300X -- python examples/gpu_memory.py 10

Nothing but the vendor's driver is needed: CUDA's, or that of the software GPU.
"""

import ctypes
import json
import sys
import time

driver = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status != 0:
        sys.exit(f"{name} failed with status {status}")


def allocate(size: int) -> bool:
    """Whether it was given."""
    address = ctypes.c_uint64()
    return size > 0 and driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    asked = times * total.value
    granted = allocate(asked)
    held, size = (asked if granted else 0), total.value
    while not granted and size:  # in ever smaller pieces, down to one byte
        if allocate(size):
            held += size
        else:
            size //= 2
    found = {"sees_bytes": total.value, "asked_bytes": asked, "granted": granted, "held_bytes": held}
    print(json.dumps(found), flush=True)
    if "hold" in sys.argv:
        time.sleep(3600)


if __name__ == "__main__":
    main()
