"""The bytes of a region, as native/region.h lays them out; a test compares the two."""

import ctypes

MAGIC = int.from_bytes(b"AIMGPUR1", "little")
VERSION = 3
TENANTS = 64
PROCESSES = 32
WRITERS = 4
NAME_BYTES = 64
PAUSES = 48
LIFE_OFFSET = 1 << 20  # bytes that live processes keep locked
SENDER_LIFE_OFFSET = 1 << 21  # bytes that live senders of request signals keep locked
FREE, ACTIVE, CLAIMED = 0, 1, 2

_FIRST_OCTAVE = 13
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class ProcessRecord(ctypes.LittleEndianStructure):
    """One process of a tenant; written by that process."""

    _fields_ = (
        ("state", _u32),
        ("pid", _u32),
        ("start_ticks", _u64),
        ("pid_namespace", _u64),
        ("used_bytes", _u64),
        ("context_bytes", _u64),
        ("attached_ns", _u64),
        ("measured_ns", _u64),
        ("life_locked", _u64),
        ("launched", _u64),
        ("done", _u64),
        ("launch_ns", _u64),
        ("done_ns", _u64),
        ("waiting", _u64),
        ("asked_ns", _u64),
        ("inflight_until_ns", _u64),
        ("turn_wait_ns", _u64),
        ("bursts", _u64),
        ("burst_ns", _u64),
        ("burst_began_ns", _u64),
        ("window", _u64),
        ("window_launches", _u64),
        ("spare1", _u64 * 3),
    )


class Writer(ctypes.LittleEndianStructure):
    """A sender of request signals, such as a gateway; one cell per sender."""

    _fields_ = (
        ("pid", _u32),
        ("begun", _u32),
        ("start_ticks", _u64),
        ("running", _u64),
        ("begun_ns", _u64),
        ("ended_ns", _u64),
        ("request_ns", _u64),
        ("pid_namespace", _u64),
        ("spare", _u64),
    )


class Tenant(ctypes.LittleEndianStructure):
    """One tenant: its limits, its accounting, its part of the gate, and its processes."""

    _fields_ = (
        ("state", _u32),
        ("rank", _u32),
        ("epoch", _u64),
        ("name", ctypes.c_char * NAME_BYTES),
        ("cap_bytes", _u64),
        ("context_bytes", _u64),
        ("rounding_bytes", _u64),
        ("compute_ppm", _u32),
        ("process_high", _u32),
        ("peak_bytes", _u64),
        ("denied", _u64),
        ("spare0", _u64 * 8),
        ("quiet_ns", _u64),
        ("paid", _u64),
        ("gpu_ns", _u64),
        ("wait_since_ns", _u64),
        ("waited_ns", _u64),
        ("overruns", _u64),
        ("batches", _u64),
        ("process_turn", _u64),
        ("process_turn_since_ns", _u64),
        ("longest_launch_ns", _u64),
        ("held", _u64),
        ("held_ns", _u64),
        ("touched", _u64),
        ("spent_ppm", _u64),
        ("window", _u64),
        ("yield_ppm", _u64),
        ("yield_paid_ns", _u64),
        ("yield_burst_ns", _u64),
        ("step_pause_ns", _u64),
        ("fill_until_ns", _u64),
        ("overrun_ns", _u64),
        ("spare1", _u64 * 3),
        ("pauses", _u32 * PAUSES),
        ("writers", Writer * WRITERS),
        ("processes", ProcessRecord * PROCESSES),
    )


class Header(ctypes.LittleEndianStructure):
    """Identity of the region, the bounds of the gate, and whose turn it is."""

    _fields_ = (
        ("magic", _u64),
        ("version", _u32),
        ("header_bytes", _u32),
        ("region_bytes", _u64),
        ("tenants", _u32),
        ("processes", _u32),
        ("tenant_bytes", _u32),
        ("process_bytes", _u32),
        ("boot", _u64),
        ("device_bytes", _u64),
        ("device", ctypes.c_char * NAME_BYTES),
        ("tenant_high", _u32),
        ("pad", _u32),
        ("spare0", _u64 * 7),
        ("hang_ns", _u64),
        ("starve_ns", _u64),
        ("room_ns", _u64),
        ("quiet_min_ns", _u64),
        ("quiet_max_ns", _u64),
        ("quantum_ns", _u64),
        ("batch_ns", _u64),
        ("lead_ns", _u64),
        ("unwaited_ns", _u64),
        ("allowance_ppm", _u64),
        ("long_ns", _u64),
        ("absent_ns", _u64),
        ("silence_ns", _u64),
        ("spare1", _u64 * 3),
        ("turn", _u64),
        ("turn_until_ns", _u64),
        ("turn_since_ns", _u64),
        ("wake", _u32),
        ("waiters", _u32),
        ("gap_ns", _u64),
        ("light_ns", _u64),
        ("overdraft_ns", _u64),
        ("pause_wait_ns", _u64),
        ("burst_ns", _u64),
        ("yield_room_ns", _u64),
        ("fill_ns", _u64),
        ("admitted", _u64 * 4),
        ("step_pauses", _u32 * PAUSES),
        ("lengths", _u32 * PAUSES),
        ("spare2", _u64 * 410),
    )


class RegionLayout(ctypes.LittleEndianStructure):
    """The whole file."""

    _fields_ = (("header", Header), ("tenants", Tenant * TENANTS))


REGION_BYTES = ctypes.sizeof(RegionLayout)


def boot_hash(boot_id: str) -> int:
    """FNV-1a of the boot id, as the library computes it."""
    value = 14695981039346656037
    for byte in boot_id.encode():
        value = ((value ^ byte) * 1099511628211) % (1 << 64)
    return value


def pause_bucket(nanoseconds: int) -> int:
    """Where a pause belongs in a tenant's histogram: half octaves from 8 microseconds, as the library divides them."""
    octave = max(1, nanoseconds).bit_length() - 1
    half = (nanoseconds >> max(0, octave - 1)) & 1
    return min(max((octave - _FIRST_OCTAVE) * 2 + half, 0), PAUSES - 1)


def layout_defect(header: Header, size: int) -> str | None:
    """Why a file of this size with this header is not a region of this version; None: it is."""
    if size < REGION_BYTES:
        return "is too short"
    if header.magic != MAGIC:
        return "is not a region"
    if header.version != VERSION:
        return f"has version {header.version}, this is {VERSION}"
    expected = (ctypes.sizeof(Header), REGION_BYTES, TENANTS, PROCESSES, ctypes.sizeof(Tenant), ctypes.sizeof(ProcessRecord))
    found = (
        header.header_bytes,
        header.region_bytes,
        header.tenants,
        header.processes,
        header.tenant_bytes,
        header.process_bytes,
    )
    return None if found == expected else "has another layout"
