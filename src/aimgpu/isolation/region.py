"""The shared-memory region of one partition: read and configured here, written by the library in the tenants' processes."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import Priority
from aimgpu.errors import NotFound, RegionUnusable, ShareInUse
from aimgpu.isolation import layout, processes
from aimgpu.units import GIB, PPM, format_bytes

MILLISECOND = 1_000_000
MOST_CONTEXT_BYTES = 2 * GIB  # a larger difference is not a context; the watchdog reports it
_LOCK_SECONDS = 5.0
_IMPATIENT_SECONDS = 0.25
_FLOCK = "hhxxxxqqixxxx"
_FUTEX_WAKE = 1
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateBounds:
    """The bounds of the gate, in nanoseconds; docs/explanation/isolation.md documents the defaults."""

    hang_ns: int = 2_000 * MILLISECOND  # a critical tenant without activity for this long delays no one
    starve_ns: int = 1_000 * MILLISECOND  # the longest that a launch waits for other tenants
    room_ns: int = 100 * MILLISECOND  # the longest that a short launch waits for earlier work of its own tenant
    quiet_min_ns: int = 200_000
    quiet_max_ns: int = 20 * MILLISECOND
    quantum_ns: int = 20 * MILLISECOND
    batch_ns: int = MILLISECOND  # work in flight of a gated tenant; a single launch may be longer
    lead_ns: int = 40_000
    unwaited_ns: int = 50 * MILLISECOND  # work that no thread waits for counts as finished after this long
    allowance_ppm: int = 50_000  # requests of a higher tenant that long launches may delay, millionths
    long_ns: int = 3 * MILLISECOND  # launches up to this length are never held back for a pause that may be too short
    absent_ns: int = 30_000 * MILLISECOND  # a tenant without a request for this long holds no long launch back
    silence_ns: int = 1_000 * MILLISECOND  # behind a strict tenant without a sign for this long, a little may be queued


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant was granted."""

    name: str
    cap_bytes: int
    priority: Priority = Priority.MEDIUM
    compute_ppm: int = PPM
    context_bytes: int = 0  # charged for each process that uses the GPU
    rounding_bytes: int = 0  # 0: as the driver rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """What one process of a tenant uses."""

    pid: int  # in its own pid namespace
    start_ticks: int
    pid_namespace: int
    used_bytes: int  # its context included
    context_bytes: int
    asks_driver: bool = False  # for its own memory, when it comes near its cap
    launched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process: what the library had counted when the driver was queried, and what the driver reported."""

    counted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """What the library counted; the driver is not queried."""

    name: str
    cap_bytes: int
    used_bytes: int
    peak_bytes: int
    denied: int
    priority: Priority
    compute_ppm: int
    gpu_seconds: float
    waited_seconds: float
    overruns: int
    quiet_ns: int
    yield_ppm: int
    longest_launch_ns: int  # longest launch seen by the gate; 0: not gated
    held: int  # launches that waited because they would not fit into a pause of a higher tenant
    held_seconds: float
    requests: int  # its own requests, as the gate counts them
    touched: int  # of these, the ones that a long launch of a lower tenant delayed
    processes: tuple[ProcessUse, ...]


class Region:
    """One mapped region. Use `create` on the controller's side, `open` where it exists already."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._admission = threading.Lock()  # two tenants that are admitted at once must not get the same free slot
        self._own_cells: set[tuple[int, int]] = set()  # cells whose life lock this object holds
        size = os.fstat(descriptor).st_size
        if size < layout.REGION_BYTES:
            raise _unusable(path, "is too short")
        self._map = mmap.mmap(descriptor, layout.REGION_BYTES)
        self._mapped = layout.RegionLayout.from_buffer(self._map)
        if (defect := layout.layout_defect(self.header, size)) is not None:
            raise _unusable(path, defect)
        if self.header.boot != layout.boot_hash(procfs.read_boot_id()):
            raise _unusable(path, "is from another boot")

    @classmethod
    def create(
        cls, path: Path, *, device_bytes: int, device: str = "", bounds: GateBounds | None = None, mode: int = 0o600
    ) -> "Region":
        """Make it, or open the existing one, which tenants may hold across a restart of the daemon."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError, RegionUnusable):
            return cls.open(path)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            fresh.write_bytes(bytes(_initial(device_bytes, device, bounds or GateBounds())))
            fresh.chmod(mode)
            fresh.rename(path)
        except OSError as error:  # shared memory is full, or something else is at its place
            fresh.unlink(missing_ok=True)
            raise _unusable(path, f"cannot be made: {error.strerror}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Region":
        """Map an existing region; raises RegionUnusable where it is damaged or of another version or boot."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unusable(path, f"cannot be opened: {error.strerror}") from error
        try:
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def is_whole(self) -> bool:
        """False: the file was truncated, and an access would end this process with SIGBUS."""
        return os.fstat(self._descriptor).st_size >= layout.REGION_BYTES

    @property
    def is_linked(self) -> bool:
        """Whether the file at `path` is still this one: only then can a new process of a tenant find it."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        return False

    @property
    def _layout(self) -> layout.RegionLayout:
        if not self.is_whole:
            raise _unusable(self.path, "was cut")
        return self._mapped

    @property
    def header(self) -> layout.Header:
        """The live header; changes take effect at once."""
        header: layout.Header = self._layout.header
        return header

    def close(self) -> None:
        """Unmap it; the locks that this object holds are released."""
        for index, cell in self._own_cells:
            self._try_lock(_sender_byte(index, cell), fcntl.F_UNLCK)
        del self._mapped
        with contextlib.suppress(BufferError):  # a signal still writes to it
            self._map.close()
        os.close(self._descriptor)

    def admit(self, limits: TenantLimits) -> None:
        """Give the tenant a slot, or change the limits of the one it has (which may refuse, as `resize` does)."""
        name = limits.name.encode()
        if not name or len(name) >= layout.NAME_BYTES or b"\0" in name or b":" in name:
            raise _unusable(self.path, f"cannot hold a tenant named {limits.name!r}")
        with self._admission:
            self._admit(limits, name)

    def _admit(self, limits: TenantLimits, name: bytes) -> None:
        index = self._find(limits.name)
        if index is not None:
            self.resize(limits.name, limits.cap_bytes)
        index = index if index is not None else self._free()
        self.header.tenant_high = max(self.header.tenant_high, index + 1)
        with self._locked(index) as (tenant, _):
            if tenant.state != layout.ACTIVE:
                epoch = tenant.epoch + 1
                ctypes.memset(ctypes.addressof(tenant), 0, ctypes.sizeof(tenant))
                tenant.epoch = epoch
                tenant.name = name
                tenant.cap_bytes = limits.cap_bytes
            tenant.rank = limits.priority.rank
            tenant.compute_ppm = limits.compute_ppm
            tenant.context_bytes = limits.context_bytes
            tenant.rounding_bytes = limits.rounding_bytes
            tenant.state = layout.ACTIVE

    def resize(self, name: str, cap_bytes: int) -> None:
        """Change a cap while the tenant runs; below what is in use raises ShareInUse and changes nothing.

        The new cap is set before the sum is taken, so an allocation that does not wait for the lock is
        either refused by the new cap or part of the sum.
        """
        with self._locked(self._index(name), patient=False) as (tenant, locked):
            if locked:
                self._reap(tenant)
            former, tenant.cap_bytes = tenant.cap_bytes, cap_bytes
            used = _sum(tenant)
            if cap_bytes < min(used, former):  # what was taken since under a larger cap is not put over the former one again
                tenant.cap_bytes = former
                raise ShareInUse(
                    f"{name} uses {format_bytes(used)}, its cap cannot fall to {format_bytes(cap_bytes)}",
                    hint="Let it free memory first, or stop it.",
                )

    def charge_contexts(self, outside: Mapping[tuple[int, int], Measured]) -> None:
        """Charge processes (by pid and start time) for what the driver measured beside what the library counted.

        Only where the count did not change meanwhile. The charge never falls below the constant that a process is charged at
        first, nor below the figure that a process read from the driver itself while none of its calls was under way.
        """
        for index, tenant in enumerate(self._layout.tenants):
            if tenant.state != layout.ACTIVE:
                continue
            with self._locked(index, patient=False):
                for slot in tenant.processes:
                    seen = outside.get((slot.pid, slot.start_ticks)) if slot.state == layout.ACTIVE else None
                    if seen is not None and seen.counted_bytes == slot.used_bytes:
                        beside = min(max(0, seen.measured_bytes - seen.counted_bytes), MOST_CONTEXT_BYTES)
                        least = slot.context_bytes if slot.measured_ns else tenant.context_bytes
                        slot.context_bytes = max(least, beside)

    def throttle(self, name: str, compute_ppm: int) -> bool:
        """Limit its compute from now on; False: it is not a tenant here."""
        index = self._find(name)
        if index is not None:
            self._layout.tenants[index].compute_ppm = compute_ppm
        return index is not None

    def set_yield(self, name: str, yield_ppm: int) -> bool:
        """How much of the device lower tenants may use while this one works; False: it is not a tenant here."""
        index = self._find(name)
        if index is None:
            return False
        self._layout.tenants[index].yield_ppm = yield_ppm
        self.wake()
        return True

    def dismiss(self, name: str) -> None:
        """Take the tenant's slot away: further allocations are refused. Safe to call twice."""
        index = self._find(name)
        if index is None:
            return
        with self._locked(index, patient=False) as (tenant, _):
            tenant.state = layout.FREE
            tenant.epoch += 1
        self.wake()

    def reap(self) -> int:
        """Release what dead processes and dead senders of signals held; returns how many there were.

        A tenant whose lock is held by a process that does not run (stopped, or in a debugger) is left for the next time.
        """
        count = 0
        for index, tenant in enumerate(self._layout.tenants):
            if tenant.state == layout.ACTIVE:
                with self._locked(index, patient=False) as (_, locked):
                    count += self._reap(tenant) if locked else 0
        return count

    def read_use(self) -> tuple[TenantUse, ...]:
        """What every tenant uses now; takes no lock."""
        return tuple(_use(tenant) for tenant in self._layout.tenants if tenant.state == layout.ACTIVE)

    def writer_cell(self, name: str) -> layout.Writer:
        """A cell for this process to signal that requests of the tenant run; it keeps a lock on it for life."""
        index = self._index(name)
        pid, namespace = os.getpid(), processes.own_pid_namespace()
        ticks = procfs.read_start_ticks(pid) or 0
        with self._locked(index, patient=False) as (tenant, _):
            self._reap(tenant)
            cells = list(enumerate(tenant.writers))
            own = [at for at, cell in cells if (cell.pid, cell.start_ticks, cell.pid_namespace) == (pid, ticks, namespace)]
            at = next(iter(own), None)
            if at is None:
                at = next((at for at, cell in cells if cell.pid == 0), None)
            if at is None:
                raise _unusable(self.path, f"has no signal cell left for {name}")
            cell: layout.Writer = tenant.writers[at]
            cell.pid, cell.start_ticks, cell.pid_namespace = pid, ticks, namespace
            if self._try_lock(_sender_byte(index, at), fcntl.F_WRLCK):
                self._own_cells.add((index, at))
            return cell

    def tenant_of(self, name: str) -> layout.Tenant:
        """The live record of a tenant, for those who write into it."""
        tenant: layout.Tenant = self._layout.tenants[self._index(name)]
        return tenant

    def wake(self) -> None:
        """Let waiting launches check again now."""
        header = self.header
        header.wake = (header.wake + 1) % (1 << 32)
        if header.waiters and _FUTEX_SYSCALL is not None:
            address = ctypes.addressof(header) + layout.Header.wake.offset
            _LIBC.syscall(_FUTEX_SYSCALL, ctypes.c_void_p(address), _FUTEX_WAKE, 1 << 20, None, None, 0)

    def _find(self, name: str) -> int | None:
        wanted = name.encode()
        tenants = enumerate(self._layout.tenants)
        return next((index for index, tenant in tenants if tenant.state == layout.ACTIVE and tenant.name == wanted), None)

    def _index(self, name: str) -> int:
        index = self._find(name)
        if index is None:
            raise NotFound(f"{self.path} has no tenant {name}")
        return index

    def _free(self) -> int:
        tenants = enumerate(self._layout.tenants)
        index = next((index for index, tenant in tenants if tenant.state != layout.ACTIVE), None)
        if index is None:
            raise _unusable(self.path, f"is full ({layout.TENANTS} tenants)")
        return index

    def _reap(self, tenant: layout.Tenant) -> int:
        index = (ctypes.addressof(tenant) - ctypes.addressof(self._layout.tenants)) // ctypes.sizeof(layout.Tenant)
        count = 0
        for at, slot in enumerate(tenant.processes):
            byte = _life_byte(index, at)
            if not self._is_left(slot, byte) or not self._try_lock(byte, fcntl.F_WRLCK):
                continue
            if self._is_left(slot, byte):  # nobody can claim it now
                slot.state = layout.FREE
                count += 1
            self._try_lock(byte, fcntl.F_UNLCK)
        for at, writer in enumerate(tenant.writers):
            own = (index, at) in self._own_cells
            if writer.pid and not own and not self._is_alive(writer, _sender_byte(index, at)):
                writer.running = 0
                writer.pid = 0
                count += 1
        return count

    def _is_left(self, slot: layout.ProcessRecord, byte: int) -> bool:
        """Its process died, before or after it had its place."""
        if slot.state == layout.CLAIMED:
            return not self._is_locked(byte)
        return slot.state == layout.ACTIVE and not self._is_alive(slot, byte)

    def _is_alive(self, holder: layout.ProcessRecord | layout.Writer, byte: int) -> bool:
        if isinstance(holder, layout.ProcessRecord) and holder.life_locked:  # until it ends or becomes another program
            return self._is_locked(byte)
        return processes.is_alive(holder.pid, holder.start_ticks, holder.pid_namespace, locked=lambda: self._is_locked(byte))

    @contextlib.contextmanager
    def _locked(self, index: int, *, patient: bool = True) -> Iterator[tuple[layout.Tenant, bool]]:
        """The tenant's lock, the one that the library takes; the kernel releases it with its holder.

        Without patience a lock whose holder does not run is not waited for long, and the body runs without it.
        """
        with self._lock:
            deadline = time.monotonic() + (_LOCK_SECONDS if patient else _IMPATIENT_SECONDS)
            while not (locked := self._try_lock(index, fcntl.F_WRLCK)) and time.monotonic() < deadline:
                time.sleep(0.001)
            if patient and not locked:
                raise _unusable(self.path, f"tenant {index} is locked by a process that does not run")
            try:
                yield self._layout.tenants[index], locked
            finally:
                if locked:
                    self._try_lock(index, fcntl.F_UNLCK)

    def _try_lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(kind, byte))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_locked(self, byte: int) -> bool:
        """Whether another open file holds the lock."""
        try:
            found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        except OSError:
            return True  # cannot be tested: nothing is released
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _flock(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def _life_byte(tenant: int, slot: int) -> int:
    return layout.LIFE_OFFSET + tenant * layout.PROCESSES + slot


def _sender_byte(tenant: int, cell: int) -> int:
    return layout.SENDER_LIFE_OFFSET + tenant * layout.WRITERS + cell


_LIBC = ctypes.CDLL(None, use_errno=True)


def _initial(device_bytes: int, device: str, bounds: GateBounds) -> layout.RegionLayout:
    region = layout.RegionLayout()
    header = region.header
    header.magic = layout.MAGIC
    header.version = layout.VERSION
    header.header_bytes = ctypes.sizeof(layout.Header)
    header.region_bytes = layout.REGION_BYTES
    header.tenants = layout.TENANTS
    header.processes = layout.PROCESSES
    header.tenant_bytes = ctypes.sizeof(layout.Tenant)
    header.process_bytes = ctypes.sizeof(layout.ProcessRecord)
    header.boot = layout.boot_hash(procfs.read_boot_id())
    header.device_bytes = device_bytes
    header.device = device.encode()[: layout.NAME_BYTES - 1]
    for field in GateBounds.__dataclass_fields__:
        setattr(header, field, getattr(bounds, field))
    return region


def _sum(tenant: layout.Tenant) -> int:
    return sum(slot.used_bytes + slot.context_bytes for slot in tenant.processes if slot.state == layout.ACTIVE)


def _use(tenant: layout.Tenant) -> TenantUse:
    slots = tuple(
        ProcessUse(
            pid=slot.pid,
            start_ticks=slot.start_ticks,
            pid_namespace=slot.pid_namespace,
            used_bytes=slot.used_bytes + slot.context_bytes,
            context_bytes=slot.context_bytes,
            asks_driver=slot.measured_ns != 0,
            launched=slot.launched,
        )
        for slot in tenant.processes
        if slot.state == layout.ACTIVE
    )
    return TenantUse(
        name=tenant.name.decode(errors="replace"),
        cap_bytes=tenant.cap_bytes,
        used_bytes=sum(slot.used_bytes for slot in slots),
        peak_bytes=tenant.peak_bytes,
        denied=tenant.denied,
        priority=next((p for p in Priority if p.rank == tenant.rank), Priority.LOW),
        compute_ppm=tenant.compute_ppm,
        gpu_seconds=tenant.gpu_ns / 1e9,
        waited_seconds=tenant.waited_ns / 1e9,
        overruns=tenant.overruns,
        quiet_ns=tenant.quiet_ns,
        yield_ppm=tenant.yield_ppm,
        longest_launch_ns=tenant.longest_launch_ns,
        held=tenant.held,
        held_seconds=tenant.held_ns / 1e9,
        requests=sum(cell.begun for cell in tenant.writers) or max(slot.bursts for slot in tenant.processes),
        touched=tenant.touched,
        processes=slots,
    )


def _unusable(path: Path, why: str) -> RegionUnusable:
    return RegionUnusable(f"region {path} {why}", hint="Stop the tenants of this device, then remove the file.")
