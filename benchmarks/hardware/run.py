"""What reading GPUs costs: CPU milliseconds for a machine of 8 MI300X in CPX (64 partitions), as plain files.

The tree is that of the simulator, so what the kernel itself needs to answer a read of its real files is not in these figures.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.hardware.emulation.emulated import EmulatedGpu, EmulatedProcess
from tests.hardware.emulation.sysfs_tree import EmulatedMachine, lay_out, write_tree

from aimgpu.hardware.amd import AmdHardware, Sysfs
from aimgpu.hardware.simulated import SimulatedHardware, find_product
from benchmarks.recording import write_result

GPUS, PARTITIONS = 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, processes in _machines().items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_tree(root, lay_out(EmulatedMachine(gpus=_gpus(), processes=processes)))
            hardware = AmdHardware(Sysfs(root))
            partitions = sum(len(device.layout.partitions) for device in hardware.read_devices())
            row = {
                "machine": name,
                "partitions": partitions,
                "read_cpu_ms": _cpu_ms(hardware.read_devices, rounds),
                "poll_cpu_ms": _cpu_ms(hardware.read_usage, rounds),
                "poll_one_gpu_changed_cpu_ms": _cpu_ms(hardware.read_usage, rounds, _change_use(root, processes, 1)),
                "poll_every_gpu_changed_cpu_ms": _cpu_ms(hardware.read_usage, rounds, _change_use(root, processes, GPUS)),
                "poll_all_files_cpu_ms": _cpu_ms(hardware.read_usage, rounds, _change_use(root, (), GPUS, step=1 << 26)),
                "first_poll_cpu_ms": _cpu_ms(partial(_first_poll, root), rounds),
            }
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    figures["read_64_partitions_cpu_ms"] = rows[0]["read_cpu_ms"]
    for key in rows[0]:
        if "poll" in key:
            figures[key] = max(row[key] for row in rows)
    simulated = SimulatedHardware([("MI300X", GPUS)])
    figures["simulated_read_cpu_ms"] = _cpu_ms(simulated.read_devices, rounds)
    figures["simulated_poll_cpu_ms"] = _cpu_ms(simulated.read_usage, rounds)
    write_result("hardware", figures, rows)


def _gpus() -> tuple[EmulatedGpu, ...]:
    part = find_product("MI300X")
    return tuple(EmulatedGpu(product=part, number=number, compute_mode="CPX", memory_mode="NPS4") for number in range(GPUS))


def _machines() -> dict[str, tuple[EmulatedProcess, ...]]:
    """A process sees every partition unless a device cgroup hides the others, and then has a file for each."""
    everywhere = [(gpu, partition) for gpu in range(GPUS) for partition in range(PARTITIONS)]
    apart = {number: {place: 1 << 30} for number, place in enumerate(everywhere)}
    together = {number: dict.fromkeys(everywhere, 0) | places for number, places in apart.items()}
    return {
        "idle": (),
        "64 processes, each sees its own partition": _processes(apart),
        "8 processes that see every partition": _processes({number: together[number * 8] for number in range(8)}),
        "64 processes that see every partition": _processes(together),
    }


def _processes(places: dict[int, dict[tuple[int, int], int]]) -> tuple[EmulatedProcess, ...]:
    return tuple(EmulatedProcess(pid=1000 + number, bytes_by_partition=place) for number, place in places.items())


def _first_poll(root: Path) -> object:
    return AmdHardware(Sysfs(root)).read_usage()


def _change_use(root: Path, processes: tuple[EmulatedProcess, ...], count: int, *, step: int = 4096) -> Callable[[], None]:
    """Other used bytes on the first GPUs at each call, and of these processes where they have bytes there, as in use.

    A change that no process explains has every file of every process read.
    """
    files = [root / f"bus/pci/devices/{gpu.bdf}/mem_info_vram_used" for gpu in _gpus()[:count]]
    for process in processes:
        busy = [
            _gpus()[gpu].gpu_id(partition)
            for (gpu, partition), size in process.bytes_by_partition.items()
            if size and gpu < count
        ]
        files += [root / f"class/kfd/kfd/proc/{process.pid}/vram_{gpu_id}" for gpu_id in busy]
    numbers = itertools.count(1 << 30, step)

    def change() -> None:
        for file in files:
            file.write_text(f"{next(numbers)}\n", encoding="utf-8")

    return change


def _cpu_ms(work: Callable[[], object], rounds: int, prepare: Callable[[], object] = lambda: None) -> float:
    """The median: other work on the machine shows in the tail. `prepare` is not counted."""
    work()
    times = []
    for _ in range(rounds):
        prepare()
        before = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - before)
    return round(sorted(times)[rounds // 2] / 1e6, 2)


if __name__ == "__main__":
    main()
