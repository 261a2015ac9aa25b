"""The kernel's partition rules for MI300-class GPUs: which modes go together, and what each partition then owns.

Pure. An XCC (also XCD) is a compute die. Source: Linux 7.2 drivers/gpu/drm/amd/amdgpu/{aqua_vanjaram,amdgpu_xcp,amdgpu_gmc}.c;
the sizes equal those recorded on an MI308X in CPX/NPS4.
"""

from collections.abc import Collection
from dataclasses import dataclass

from aimgpu.domain import Layout, Partition

PAGE_BYTES = 4096
RESERVED_BYTES = 16 << 20  # taken from the last memory partition
_GFX950 = 90500
_MOST_XCCS = 64  # the largest GPU has 8; a damaged count must not become as many partitions
_MOST_DIGITS = 3

_COMPUTE_MODES = {8: ("SPX", "DPX", "QPX", "CPX"), 6: ("SPX", "TPX", "CPX"), 4: ("SPX", "DPX", "CPX")}
_FEW_XCCS_MODES = ("SPX", "CPX")
_PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
_MEMORY_MODES = {"SPX": (1,), "DPX": (1, 2), "TPX": (1, 4), "QPX": (1, 4), "CPX": (1, 4)}
_MEMORY_MODES_GFX950 = _MEMORY_MODES | {"QPX": (1, 2, 4), "CPX": (1, 2, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What the rules need to know of a GPU."""

    xccs: int
    compute_units_each: int
    memory_bytes: int
    gfx_target: int  # 90402 is gfx942, 90500 is gfx950
    apu: bool = False  # shares the host's memory: no reserve, no switchable memory mode


def compute_modes(xccs: int) -> tuple[str, ...]:
    """The modes of a GPU with this many dies."""
    return _COMPUTE_MODES.get(xccs, _FEW_XCCS_MODES)


def xccs_of(modes: Collection[str]) -> int | None:
    """The number of dies that a GPU with all these modes has; None where it could be several."""
    return next((xccs for xccs, known in _COMPUTE_MODES.items() if set(known) == set(modes)), None)


def partition_count(compute_mode: str, xccs: int) -> int | None:
    """None for a mode that these rules do not know."""
    if compute_mode == "CPX":
        return xccs if 0 < xccs <= _MOST_XCCS else None
    return _PARTITIONS.get(compute_mode)


def memory_ranges(memory_mode: str) -> int | None:
    """4 for "NPS4"; None for anything else than NPS and a number."""
    digits = memory_mode.removeprefix("NPS")
    if digits == memory_mode or not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        return None
    return int(digits) or None


def are_compatible(compute_mode: str, memory_mode: str, gfx_target: int) -> bool:
    """Whether the kernel allows these modes together."""
    table = _MEMORY_MODES_GFX950 if gfx_target >= _GFX950 else _MEMORY_MODES
    return memory_ranges(memory_mode) in table.get(compute_mode, ())


def mode_after_reload(memory_mode: str, chip: Chip) -> str:
    """The compute mode that the driver chooses by itself when it is loaded."""
    ranges = memory_ranges(memory_mode) or 1
    if ranges == 1:
        return "SPX"
    if ranges * 2 in (chip.xccs, chip.xccs * 2):
        return "TPX" if chip.apu else "CPX"
    return "DPX"


def partition_bytes(compute_mode: str, memory_mode: str, chip: Chip) -> tuple[int, ...] | None:
    """Bytes that each partition may use, as KFD reports and enforces them; None where the rules do not say."""
    count, ranges = partition_count(compute_mode, chip.xccs), memory_ranges(memory_mode)
    if count is None or ranges is None or count % ranges:
        return None
    reserved = 0 if chip.apu else RESERVED_BYTES
    each = (chip.memory_bytes + reserved) // ranges
    sizes = [each] * (ranges - 1) + [chip.memory_bytes - each * (ranges - 1)]
    sharers = count // ranges
    return tuple(sizes[index // sharers] // sharers // PAGE_BYTES * PAGE_BYTES for index in range(count))


def layout_name(compute_mode: str, memory_mode: str) -> str:
    """`CPX/NPS4`, as layouts are named everywhere."""
    return f"{compute_mode}/{memory_mode}"


def predict_layout(device_id: str, compute_mode: str, memory_mode: str, chip: Chip) -> Layout | None:
    """The layout that a device would have in these modes; None where the rules do not say."""
    sizes = partition_bytes(compute_mode, memory_mode, chip)
    if sizes is None:
        return None
    kind = compute_mode.lower()
    units = chip.compute_units_each * (chip.xccs // len(sizes))
    return Layout(
        name=layout_name(compute_mode, memory_mode),
        compute_mode=compute_mode,
        memory_mode=memory_mode,
        partitions=tuple(
            Partition(
                id=f"{device_id}/{kind}-{index}",
                device_id=device_id,
                index=index,
                kind=kind,
                memory_bytes=size,
                compute_units=units,
            )
            for index, size in enumerate(sizes)
        ),
    )


def wanted_modes(text: str, current_memory_mode: str) -> tuple[str, str]:
    """("CPX", "NPS4") of "cpx/nps4"; "CPX" alone keeps the memory mode that there is."""
    compute, _, memory = text.strip().upper().partition("/")
    return compute.strip(), memory.strip() or current_memory_mode
