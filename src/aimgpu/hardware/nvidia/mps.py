"""MPS for our tenants only: one control daemon per partition, in directories of its own, with limits per tenant.

Other users of the GPU never see these directories and run as before. NVIDIA's caveats:

- A tenant that starts while the daemon is down runs without MPS and without limits. So only a daemon that answers gives out an
  environment.
- The memory limit counts CUDA's own allocations too.
- The limits are read from the tenant's environment, so a tenant that changes it changes its limit.
- A fault of one tenant can end the others.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from aimgpu.domain import ProcessIdentity
from aimgpu.errors import HardwareFailed, HardwareUnavailable, InvalidInput, PartitionBusy
from aimgpu.files import locked, write_private
from aimgpu.hardware.nvidia.mps_processes import (
    PIPE_VARIABLE,
    end,
    find_mps_processes,
    find_tenants,
    identify,
    wait_until_gone,
)
from aimgpu.procfs import is_running
from aimgpu.units import MIB, PPM

PROGRAM = "nvidia-cuda-mps-control"
_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_LONGEST_SOCKET = 107  # bytes of a path that a Unix socket can have
_UNSAFE = re.compile(r"[^A-Za-z0-9-]")
_POLL_SECONDS = 0.05


class MpsDaemons:
    """The MPS daemons that this installation runs, each under `root`."""

    def __init__(self, root: Path, *, program: str = PROGRAM, wait_seconds: float = 30.0) -> None:
        self._root = root
        self._program = program
        self._wait_seconds = wait_seconds

    def unavailable_reason(self) -> str | None:
        """Why MPS is not available on this machine; None when its program is there."""
        return None if shutil.which(self._program) else f"{self._program} is not installed"

    def start(self, uuid: str) -> None:
        """A daemon for the partition with this UUID; one that runs already is kept. Raises HardwareUnavailable."""
        reason = self.unavailable_reason()
        if reason is not None:
            raise HardwareUnavailable(f"no MPS for {uuid}: {reason}", hint="It comes with the NVIDIA driver's compute package.")
        with self._locked(uuid) as home:
            if home.daemon() is None or self._ask(home, "get_server_list") is None:
                self._refuse_if_used(home)
                self._sweep(home)
                self._launch(home)

    def tenant_environment(
        self, uuid: str, *, memory_bytes: int | None = None, compute_ppm: int | None = None, yields: bool = False
    ) -> Mapping[str, str]:
        """Environment to start a tenant with; None: no limit. Raises HardwareUnavailable unless the daemon answers now."""
        home = self._home(uuid)
        if home.daemon() is None or self._ask(home, "get_server_list") is None:
            raise HardwareUnavailable(
                f"the MPS daemon of {uuid} does not answer",
                hint="A tenant started now would run without limits. Start it again.",
            )
        return {PIPE_VARIABLE: str(home.pipe), **limit_environment(memory_bytes, compute_ppm, yields=yields)}

    def tenants(self, uuid: str) -> tuple[int, ...]:
        """Pids that are connected now."""
        home = self._home(uuid)
        servers = _numbers(self._ask(home, "get_server_list") if home.daemon() else None)
        clients = [_numbers(self._ask(home, f"get_client_list {server}")) for server in servers]
        return tuple(sorted({pid for found in clients for pid in found}))

    def stop(self, uuid: str, *, force: bool = False) -> None:
        """End the daemon; safe to call twice. With tenants it raises PartitionBusy, or with `force` takes them along."""
        if not self._home(uuid).folder.exists():
            return
        with self._locked(uuid) as home:
            if not force:
                self._refuse_if_used(home)
            self._end(home)

    def end_unused(self, is_used: Callable[[str], bool]) -> tuple[str, ...]:
        """End the daemons of partitions that are not in use and have no tenants; returns their UUIDs.

        `is_used` is asked while none can be started: the starter of a daemon has made its partition used before.
        """
        ended = []
        for uuid in [home.uuid for home in self._homes()]:
            with self._locked(uuid) as home:
                if not is_used(uuid) and not find_tenants(home.pipe):
                    self._end(home)
                    ended.append(uuid)
        return tuple(ended)

    def pids(self) -> frozenset[int]:
        """Control daemons and servers of ours; the servers hold the device, and belong to no one tenant."""
        return frozenset(process.pid for home in self._homes() for process in find_mps_processes(home.pipe))

    def dismiss(self, uuids: Collection[str]) -> tuple[str, ...]:
        """Before a partition goes. Raises PartitionBusy where it still has tenants."""
        there = [home.uuid for home in self._homes() if home.uuid in uuids]
        for uuid in there:
            self.stop(uuid)
        return tuple(there)

    def left_over(self) -> bool:
        """Whether there is anything of a daemon, running or not. Cheap."""
        return next(self._homes(), None) is not None

    def running(self) -> tuple[str, ...]:
        """UUIDs of the partitions whose daemon is alive."""
        return tuple(home.uuid for home in self._homes() if home.daemon() is not None)

    def recover(self, wanted: Collection[str]) -> tuple[str, ...]:
        """After a crash: what is in `wanted` and lives stays, all else of ours is ended. Returns what was ended.

        A server whose control daemon died still serves its tenants; it is left to them.
        """
        ended = []
        for home in tuple(self._homes()):
            if home.uuid not in wanted or (home.daemon() is None and not find_tenants(home.pipe)):
                self.stop(home.uuid, force=True)
                ended.append(home.uuid)
        return tuple(ended)

    def _end(self, home: "_Home") -> None:
        daemon = home.daemon()
        if daemon is not None and not self.tenants(home.uuid) and self._ask(home, "quit") is not None:
            wait_until_gone(daemon, seconds=self._wait_seconds)
        self._sweep(home)
        shutil.rmtree(home.folder, ignore_errors=True)

    def _refuse_if_used(self, home: "_Home") -> None:
        tenants = find_tenants(home.pipe)
        if tenants:
            who = ", ".join(f"pid {process.pid}" for process in tenants)
            raise PartitionBusy(f"MPS of {home.uuid} still has tenants: {who}", hint="Stop them first.")

    def _launch(self, home: "_Home") -> None:
        home.pipe.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.log.mkdir(mode=0o700, exist_ok=True)
        output = home.log / "start.log"  # a file: the daemon keeps what it was given open, and a pipe would never end
        with output.open("wb") as stream:
            try:
                done = subprocess.run(  # noqa: S603 - the program is set by the administrator
                    [self._program, "-d"],
                    env={**os.environ, **home.environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    timeout=self._wait_seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                self._sweep(home)
                raise HardwareFailed(f"{self._program} -d did not come back", hint=f"Look into {home.log}.") from error
        said = output.read_text(encoding="utf-8", errors="replace").strip()
        if done.returncode or not self._await_answer(home):
            self._sweep(home)
            raise HardwareUnavailable(
                f"the MPS daemon of {home.uuid} does not start (status {done.returncode}): {said or 'it says nothing'}",
                hint=f"Look into {home.log}; a GPU in prohibited compute mode or held exclusively cannot have one.",
            )

    def _await_answer(self, home: "_Home") -> bool:
        deadline = time.monotonic() + self._wait_seconds
        while time.monotonic() < deadline:
            daemon = home.adopt()
            if daemon is not None and self._ask(home, "get_server_list") is not None:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _ask(self, home: "_Home", command: str) -> str | None:
        """The daemon's answer; None when it does not answer."""
        try:
            done = subprocess.run(  # noqa: S603 - the program is set by the administrator
                [self._program],
                input=f"{command}\n",
                env={**os.environ, **home.environment()},
                capture_output=True,
                text=True,
                timeout=self._wait_seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout

    def _sweep(self, home: "_Home") -> None:
        """Ends what is left of this daemon: processes and sockets."""
        grace = self._wait_seconds / 4
        stuck = [process.pid for process in find_mps_processes(home.pipe) if not end(process, grace_seconds=grace)]
        if stuck:
            raise HardwareFailed(f"MPS processes {stuck} of {home.uuid} cannot be ended", hint="Look at dmesg.")
        home.identity.unlink(missing_ok=True)
        shutil.rmtree(home.pipe, ignore_errors=True)

    def _home(self, uuid: str) -> "_Home":
        home = _Home(uuid=uuid, folder=self._folder(uuid))
        if len(os.fsencode(home.pipe / "control_privileged")) > _LONGEST_SOCKET:
            raise InvalidInput(f"{home.pipe} is too long for MPS's sockets", hint="Choose a shorter runtime directory.")
        return home

    def _folder(self, uuid: str) -> Path:
        return self._root / _UNSAFE.sub("_", uuid)

    def _homes(self) -> Iterator["_Home"]:
        for mark in sorted(self._root.glob("*/uuid")):
            try:
                uuid = mark.read_text(encoding="utf-8", errors="replace")
            except OSError:  # ended since
                continue
            if self._folder(uuid) == mark.parent:  # else it was cut off by a crash, before anything was started
                yield self._home(uuid)

    @contextmanager
    def _locked(self, uuid: str) -> Iterator["_Home"]:
        """One change at a time, also between processes; the folder names its partition from the first moment."""
        home = self._home(uuid)
        with locked(home.folder):
            home.folder.mkdir(mode=0o700, exist_ok=True)
            (home.folder / "uuid").write_text(uuid, encoding="utf-8")
            yield home


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """Where one daemon lives."""

    uuid: str
    folder: Path

    @property
    def pipe(self) -> Path:
        return self.folder / "pipe"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def identity(self) -> Path:
        return self.folder / "daemon.json"

    def environment(self) -> dict[str, str]:
        return {PIPE_VARIABLE: str(self.pipe), _LOG_VARIABLE: str(self.log), "CUDA_VISIBLE_DEVICES": self.uuid}

    def daemon(self) -> ProcessIdentity | None:
        """The recorded daemon process, or None if it ended."""
        try:
            noted = ProcessIdentity(**json.loads(self.identity.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return noted if is_running(noted) else None

    def adopt(self) -> ProcessIdentity | None:
        """Note the daemon that the pid file names, if it is really one of this directory."""
        try:
            pid = int((self.pipe / f"{PROGRAM}.pid").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        found = identify(pid)
        if found is None or found not in find_mps_processes(self.pipe):
            return None
        write_private(self.identity, json.dumps(asdict(found)))
        return found


def limit_environment(memory_bytes: int | None, compute_ppm: int | None, *, yields: bool = False) -> dict[str, str]:
    """Limits rounded down, so that a tenant never has more than it was granted. Raises InvalidInput below 1 MiB or 1 %."""
    environment = {}
    if memory_bytes is not None:
        mebibytes = memory_bytes // MIB
        if mebibytes < 1:
            raise InvalidInput(f"MPS cannot limit memory to {memory_bytes} bytes", hint="The least is 1MiB.")
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={mebibytes}M"  # ordinal 0: a tenant sees this one device
    if compute_ppm is not None:
        percent = compute_ppm * 100 // PPM
        if percent < 1:
            raise InvalidInput(f"MPS cannot limit compute to {compute_ppm} millionths", hint="The least is 1%.")
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(min(percent, 100))
    if yields:
        environment["CUDA_MPS_CLIENT_PRIORITY"] = "1"  # below normal
    return environment


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(word) for word in (text or "").split() if word.isdecimal())
