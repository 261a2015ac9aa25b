"""Tries the NVIDIA backend on a real GPU: reading, use by a process of our own, MPS with a memory limit. Changes no setting.

    PYTHONPATH=src:. python tests/live/nvidia_live.py OUT_FOLDER

Writes OUT_FOLDER/nvidia_live.json (what was seen, and what did not hold) and a masked recording; fails if anything did not.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.hardware.contract import check_identity, check_reading, check_usage
from tools.record_device import write_recording

from aimgpu.errors import PartitionBusy
from aimgpu.hardware.nvidia import NvidiaHardware
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.nvidia.mps_processes import find_mps_processes
from aimgpu.hardware.nvidia.nvml import Nvml
from aimgpu.hardware.nvidia.recording import record_nvidia
from aimgpu.units import GIB, MIB

failures: list[str] = []
HOLD = 3 * GIB
LIMIT = 4 * GIB
STEP = 64 * MIB


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1] == "--hold":
        return hold_memory()
    out, hardware, nvml, seen = Path(sys.argv[1]), NvidiaHardware(), Nvml(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as folder:
        daemons = MpsDaemons(Path(folder))
        attempts: dict[str, Callable[[], Any]] = {
            "device": lambda: try_reading(hardware),
            "own_process": lambda: try_own_process(hardware),
            "mps": lambda: try_mps(hardware, daemons, Path(folder)),
            "recording": lambda: record(nvml, out),
        }
        for name, attempt in attempts.items():
            try:
                seen[name] = attempt()
            except Exception:  # noqa: BLE001 - time on the machine is short: note it and try the rest
                failures.append(f"{name}: {traceback.format_exc()}")
    text = json.dumps({**seen, "failures": failures}, indent=1, default=str)
    (out / "nvidia_live.json").write_text(text)
    sys.stdout.write(text + "\n")
    return 1 if failures else 0


def expect(condition: bool, sentence: str) -> None:  # noqa: FBT001 - as assert, but the rest is still tried
    if not condition:
        failures.append(sentence)


def try_reading(hardware: NvidiaHardware) -> dict[str, Any]:
    devices = check_reading(hardware)
    check_usage(hardware, devices)
    check_identity(hardware, devices)
    device = devices[0]
    return {
        **asdict(device),
        "id": "masked",
        "layout": device.layout.name,
        "layouts": len(device.layouts),
        "findings": [(finding.code, finding.text.replace(device.id, "masked")) for finding in hardware.inspect()],
        "cpu_ms": {"read_devices": cpu_ms(hardware.read_devices), "read_usage": cpu_ms(hardware.read_usage)},
    }


def record(nvml: Nvml, out: Path) -> str:
    recorded = record_nvidia(nvml)
    assert recorded is not None
    checked = () if failures else ("processes", "mps")
    return write_recording(recorded, out, None, checked).name


def try_own_process(hardware: NvidiaHardware) -> dict[str, Any]:
    """A process of ours holds memory: it is listed with its bytes, and gone when it ends."""
    (device,) = hardware.read_devices()[:1]
    identity = hardware.identify(device, device.layout.partitions[0])
    missing = [node for node in identity.device_nodes if not Path(node).exists()]
    before = hardware.read_usage()[0]
    with holder(identity.environment, HOLD) as (pid, told):
        during = hardware.read_usage()[0]
        listed = {process.pid: process for process in during.processes}
        reserved = hardware.read_devices()[0].reserved_bytes
    after = hardware.read_usage()[0]
    grown = (during.used_bytes or 0) - (before.used_bytes or 0)
    expect(grown >= HOLD, f"used grew by {grown}, the process holds {HOLD}")
    expect(pid in listed, f"the process is not among the {len(listed)} that NVML lists")
    return {
        "used_before": before.used_bytes,
        "used_grew_by": grown,
        "used_after": after.used_bytes,
        "process": {**asdict(listed[pid]), "pid": "masked", "partition_id": "masked"} if pid in listed else None,
        "reserved_before_and_during": [device.reserved_bytes, reserved],
        "cuda_told": told,
        "device_nodes_missing": missing,
    }


def try_mps(hardware: NvidiaHardware, daemons: MpsDaemons, root: Path) -> dict[str, Any]:
    """Our own daemon: a tenant cannot take more than its limit, keeps the daemon from being stopped, and all ends clean."""
    device = hardware.read_devices()[0]
    identity = hardware.identify(device, device.layout.partitions[0])
    began = time.monotonic()
    daemons.start(device.id)
    started = time.monotonic() - began
    try:
        pipe = next(root.glob("*/pipe"))
        limits = daemons.tenant_environment(device.id, memory_bytes=LIMIT, compute_ppm=300_000)
        with holder({**identity.environment, **limits}, 2 * LIMIT) as (pid, told):
            tenants = daemons.tenants(device.id)
            listed = [asdict(process) for process in hardware.read_usage()[0].processes]
            refused = refuses(lambda: daemons.stop(device.id))
            processes = len(find_mps_processes(pipe))
        expect(told["allocated"] <= LIMIT, f"a tenant with a limit of {LIMIT} took {told['allocated']}")
        expect(refused, "the daemon was stopped under a tenant")
        with holder({**identity.environment, **daemons.tenant_environment(device.id)}, HOLD) as (_, free):
            pass
        began = time.monotonic()
        daemons.stop(device.id)
        stopped = time.monotonic() - began
        expect(find_mps_processes(pipe) == (), "MPS processes are left after stop")
        daemons.start(device.id)
        recovered = daemons.recover(())
        expect(find_mps_processes(pipe) == (), "MPS processes are left after recover")
    finally:
        daemons.stop(device.id, force=True)
    return {
        "start_seconds": round(started, 3),
        "stop_seconds": round(stopped, 3),
        "tenant_was_listed": pid in tenants,
        "processes_of_the_daemon": processes,
        "nvml_listed": [{**process, "pid": process["pid"] == pid, "partition_id": "masked"} for process in listed],
        "limited_tenant": told,
        "free_tenant": free,
        "recovered": len(recovered),
        "states_of_ended_processes": sorted(states_of("nvidia-cuda-mps")),
    }


def states_of(name: str) -> Iterator[str]:
    """Z is an ended process that its parent has not buried; on a machine whose first process buries none, they stay."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, rest = stat.read_text().rpartition(")")
            if head.endswith(f"({name}"):
                yield rest.split()[0]


@contextmanager
def holder(environment: Mapping[str, str], hold: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """A process that takes device memory through libcuda until it has `hold` bytes or gets no more."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--hold"],
        env={**os.environ, **environment, "HOLD_BYTES": str(hold)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the holder ended with status {process.wait()}"
        yield process.pid, json.loads(line)
    finally:
        process.communicate("", timeout=60)


def hold_memory() -> int:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, total, free = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    units = ctypes.c_int()
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        cuda.cuDeviceGetAttribute(ctypes.byref(units), 16, device),  # multiprocessors
    ):
        assert code == 0, f"CUDA error {code}"
    taken, code = 0, 0
    while taken < int(os.environ["HOLD_BYTES"]):
        code = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(STEP))
        if code:
            break
        taken += STEP
    told = {"allocated": taken, "last_error": code, "total": total.value, "free": free.value, "multiprocessors": units.value}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


def refuses(action: Callable[[], object]) -> bool:
    try:
        action()
    except PartitionBusy:
        return True
    return False


def cpu_ms(action: Callable[[], object], repeats: int = 20) -> float:
    action()
    began = time.process_time()
    for _ in range(repeats):
        action()
    return round((time.process_time() - began) * 1000 / repeats, 3)


if __name__ == "__main__":
    sys.exit(main())
