"""Reading what `amd-smi` prints: every shape of it since ROCm 6.1, and what it prints instead of JSON.

Pure. Values that the tool does not know ("N/A") are None.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_STATUS = re.compile(r"AMDSMI_STATUS_([A-Z_]+)")
_CLI_ERROR = re.compile(r"AmdSmi([A-Za-z]+)Exception: ([^\n]*)")
_STARTS = re.compile(r"[\[{]")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}  # its "MB" are MiB
_VERSION = re.compile(r"ROCm version: ([0-9]{1,6})\.([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiGpu:
    """One row of `amd-smi list`: a partition, in the tool's numbering."""

    gpu: int
    bdf: str | None
    uuid: str | None
    kfd_id: int | None
    partition_id: int | None
    render: str | None
    hip_uuid: str | None = None
    hip_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiProcess:
    """A process as the tool reports it."""

    gpu: int
    pid: int
    name: str | None
    memory_bytes: int | None


def find_json(text: str) -> list[Any] | dict[str, Any] | None:
    """The JSON in a text that may begin with warnings and prompts; the longest there is, None if there is none."""
    decoder = json.JSONDecoder()
    best: tuple[int, Any] | None = None
    position = 0
    while (match := _STARTS.search(text, position)) is not None:
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            position = match.end()
            continue
        except RecursionError:  # deeper than any answer of the tool, and so is what follows
            break
        if best is None or end - match.start() > best[0]:
            best = (end - match.start(), value)
        position = end
    return best[1] if best else None


def rows(text: str) -> list[dict[str, Any]]:
    """One dictionary a GPU, from a list or from the `gpu_data` wrapper. Empty if the text holds none."""
    found = find_json(text)
    if isinstance(found, dict):
        found = found.get("gpu_data", [found])
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def known(value: object) -> Any:  # noqa: ANN401 - whatever the tool printed
    """None for "N/A" and the empty cells of continuation rows."""
    if isinstance(value, dict) and "value" in value:
        return known(value["value"])
    return None if value in ("N/A", "") else value


def words(value: object) -> str | None:
    """A text; None for anything else."""
    found = known(value)
    return found if isinstance(found, str) else None


def number(value: object) -> int | None:
    """A count; None for anything else."""
    found = known(value)
    try:
        count = int(found) if found is not None else -1
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count >= 0 else None


def size_bytes(value: object) -> int | None:
    """Bytes of {"value": 196592, "unit": "MB"}."""
    count = number(value)
    unit = value.get("unit", "B") if isinstance(value, dict) else "B"
    return count * _UNITS[unit] if count is not None and isinstance(unit, str) and unit in _UNITS else None


def parse_list(text: str) -> tuple[SmiGpu, ...]:
    """GPUs and partitions of `amd-smi list`."""
    return tuple(
        SmiGpu(
            gpu=gpu,
            bdf=words(row.get("bdf")),
            uuid=words(row.get("uuid")),
            kfd_id=number(row.get("kfd_id")),
            partition_id=number(row.get("partition_id")),
            render=words(row.get("render")),
            hip_uuid=words(row.get("hip_uuid")),
            hip_id=number(row.get("hip_id")),
        )
        for row in rows(text)
        if (gpu := number(row.get("gpu"))) is not None
    )


def parse_partition_modes(text: str) -> dict[int, tuple[str | None, str | None]]:
    """(compute mode, memory mode) by GPU number, from `static --partition`; secondary partitions know neither."""
    found: dict[int, tuple[str | None, str | None]] = {}
    for row in rows(text):
        gpu, partition = number(row.get("gpu")), row.get("partition")
        if gpu is None or not isinstance(partition, dict):
            continue
        compute = words(partition.get("accelerator_partition", partition.get("compute_partition")))
        found[gpu] = (compute, words(partition.get("memory_partition")))
    return found


def parse_memory(text: str) -> dict[int, int]:
    """Bytes by GPU number, from `metric --mem-usage`. A GPU's first partition shows the whole GPU, the others their own."""
    found = ((number(row.get("gpu")), row.get("mem_usage")) for row in rows(text))
    sizes = (
        (gpu, size_bytes(memory.get("total_vram"))) for gpu, memory in found if gpu is not None and isinstance(memory, dict)
    )
    return {gpu: size for gpu, size in sizes if size is not None}


def parse_market_names(text: str) -> dict[int, str]:
    """By GPU number, from `static --asic`."""
    found = ((number(row.get("gpu")), row.get("asic")) for row in rows(text))
    return {
        gpu: name
        for gpu, asic in found
        if gpu is not None and isinstance(asic, dict) and (name := words(asic.get("market_name"))) is not None
    }


def parse_processes(text: str) -> tuple[SmiProcess, ...]:
    """Before ROCm 10.0 the tool lists a process on every GPU. An empty list is a sentence where a dictionary would be."""
    return tuple(
        SmiProcess(gpu=gpu, pid=pid, name=words(info.get("name")), memory_bytes=_process_bytes(info))
        for row in rows(text)
        if (gpu := number(row.get("gpu"))) is not None
        for info in _process_infos(row)
        if (pid := number(info.get("pid"))) is not None
    )


def parse_version(text: str) -> tuple[int, int] | None:
    """ROCm's version, from `version` as text or JSON."""
    for row in rows(text):
        release = words(row.get("rocm_version"))
        if release is not None:
            text = f"ROCm version: {release}"
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None


def find_failure(text: str) -> tuple[str, str] | None:
    """(status, its line) of a failure described in words: "BUSY", "SETTING_UNAVAILABLE", "PermissionDenied"."""
    status = _STATUS.search(text)
    if status and status[1] != "SUCCESS":
        return status[1], _line_at(text, status.start())
    error = _CLI_ERROR.search(text)
    if error:
        return error[1], error[2].strip()
    if "requires elevation" in text:
        return "PermissionDenied", _line_at(text, text.index("requires elevation"))
    return None


def _process_infos(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    listed = row.get("process_list", [])
    for entry in listed if isinstance(listed, list) else []:
        info = entry.get("process_info", entry) if isinstance(entry, dict) else None
        if isinstance(info, dict):
            yield info


def _process_bytes(info: dict[str, Any]) -> int | None:
    """KFD's figure; if there is none, that of the graphics driver."""
    own = size_bytes(info.get("mem_usage", info.get("mem")))
    usage = info.get("memory_usage")
    return own if own is not None or not isinstance(usage, dict) else size_bytes(usage.get("vram_mem"))


def _line_at(text: str, position: int) -> str:
    start, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
    return text[start : end if end >= 0 else None].strip()
