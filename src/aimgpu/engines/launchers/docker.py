"""Engines as containers of this machine's Docker.

Docker itself remembers every container with its labels, so what a daemon started is found again even if it was killed between
two calls: a container that was only created never runs, and is removed by the next `find_started`.
"""

import contextlib
import hashlib
import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import ProcessIdentity
from aimgpu.engines.launchers import groups
from aimgpu.engines.launchers.container import HOME_LABEL, INSTANCE_LABEL, OWN_FOLDER, container_body, uses_cdi
from aimgpu.engines.launchers.docker_api import DEFAULT_SOCKET, DockerApi
from aimgpu.engines.launchers.image_pulls import ImagePulls
from aimgpu.engines.launchers.log import LOG_NAME, open_log, read_last_lines
from aimgpu.engines.launchers.registry import Registry, StartedProcess, identify
from aimgpu.engines.protocols import Command
from aimgpu.errors import Conflict, EngineFailed, EngineUnavailable, InvalidInput, NotAllowed


class DockerLauncher:
    """Starts, finds and stops the containers of one home."""

    name = "docker"
    brings_engines = True

    def __init__(self, home: Path, socket: Path = DEFAULT_SOCKET) -> None:
        self._home = str(home.resolve())
        self._api = DockerApi(socket)
        self._pulls = ImagePulls(self._api)
        self._begun: set[Path] = set()  # run directories whose log was begun by a fetch
        self._registry = Registry(home / "containers")
        self._lock = threading.Lock()
        self._joins: bool | None = None

    @property
    def joins_groups(self) -> bool:
        """Docker creates a container's group below a given parent where it manages cgroup v2 groups itself.

        Where systemd manages them, only slices can be given, and their files belong to systemd.
        """
        if self._joins is None:
            try:
                info = self._api.read_info()
            except (EngineUnavailable, NotAllowed):
                return False
            self._joins = info.get("CgroupDriver") == "cgroupfs" and info.get("CgroupVersion") == "2"
        return self._joins

    def check(self) -> None:
        """Raises EngineUnavailable where the Docker daemon does not answer."""
        self._api.read_info()

    def start(self, instance_id: str, command: Command, run_directory: Path) -> ProcessIdentity:
        """Start a container; `fetch` must have pulled the image before."""
        run_directory = run_directory.resolve()
        run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_free(instance_id)
        self._begin_log(run_directory)
        self._begun.discard(run_directory)
        (run_directory / OWN_FOLDER).mkdir(mode=0o700, exist_ok=True)
        for mount in command.mounts:
            if mount.writable:
                Path(mount.path).mkdir(parents=True, exist_ok=True)
        body = container_body(instance_id, command, run_directory, self._home, with_cdi=uses_cdi(self._api.read_info()))
        with self._lock:
            self._check_free(instance_id)
            container = self._api.create(self._container_name(instance_id), body)
            self._api.start(container)
            process = self._process_of(container)
            if process is None:
                raise EngineFailed(f"the container of {instance_id} ended at once", hint="Its log says why.")
            if command.control_group is not None and not groups.holds(command.control_group, process.pid):
                self._api.remove(container)
                raise EngineFailed(
                    f"Docker did not put the container of {instance_id} into {command.control_group}",
                    hint="Its limit would not hold. Use launcher process, or a Docker on this very machine.",
                )
            self._registry.write(StartedProcess(instance_id=instance_id, process=process, run_directory=run_directory))
        return process

    def fetch(
        self, command: Command, run_directory: Path, report: Callable[[int | None], None], give_up: Callable[[], None]
    ) -> None:
        """The pull is reported in its log, which the engine then appends to."""
        if command.image is None:
            raise InvalidInput(
                f"{command.argv[0]} has no image to run in",
                hint="Use --launcher process for this engine.",
                page_hint="Set `launcher: process`.",
            )
        run_directory = run_directory.resolve()
        run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin_log(run_directory)
        written = 0

        def note(percent: int | None, words: list[str]) -> None:
            nonlocal written
            with (run_directory / LOG_NAME).open("a", encoding="utf-8") as file:
                file.writelines(f"pull {command.image}: {word}\n" for word in words[written:])
            written = len(words)
            report(percent)

        self._pulls.fetch(command.image, note, give_up)

    def is_running(self, process: ProcessIdentity) -> bool:
        """By the state of the container."""
        return procfs.is_running(process)

    def how_it_ended(self, process: ProcessIdentity) -> str | None:
        """The exit status of the container, or that the kernel ended it for want of memory."""
        container = self._container_of(process)
        info = self._api.inspect(container) if container else None
        state = info["State"] if info else {}
        if not state or state.get("Running"):
            return None
        if state.get("OOMKilled"):
            return "the kernel killed it: its container was out of memory"
        return f"its container ended with status {state.get('ExitCode')}"

    def stop(self, process: ProcessIdentity, *, grace_seconds: float) -> None:
        """Stop and remove the container."""
        container = self._container_of(process)
        if container is None:
            return
        self._api.kill(container, "SIGTERM")
        _wait_for_end(process, grace_seconds)
        self._api.remove(container)
        for started in self._registry.read_all():
            if started.process == process:
                self._registry.remove(started.instance_id)

    def find_started(self) -> Mapping[str, ProcessIdentity]:
        """Also removes containers that never ran or have ended: their logs are in the run directories.

        Without Docker, what was noted and still lives: Docker may be restarted under running containers.
        """
        found = {}
        with self._lock:
            try:
                containers = self._api.list_ids(f"{HOME_LABEL}={self._home}")
            except (EngineUnavailable, NotAllowed):
                noted = self._registry.read_all()
                return {started.instance_id: started.process for started in noted if procfs.is_running(started.process)}
            for container in containers:
                info = self._api.inspect(container)
                if info is None:
                    continue
                process = self._process_of(container)
                if process is None:
                    self._api.remove(container)
                else:
                    found[str(info["Config"]["Labels"][INSTANCE_LABEL])] = process
        return found

    def last_lines(self, run_directory: Path, count: int = 20) -> tuple[str, ...]:
        """From Docker's log of the container."""
        return read_last_lines(run_directory / LOG_NAME, count)

    def _begin_log(self, run_directory: Path) -> None:
        if run_directory not in self._begun:
            os.close(open_log(run_directory / LOG_NAME))
            self._begun.add(run_directory)

    def _check_free(self, instance_id: str) -> None:
        name = self._container_name(instance_id)
        if self._api.inspect(name) is None:
            return
        if (process := self._process_of(name)) is not None:
            raise Conflict(f"{instance_id} still runs (pid {process.pid})", hint="Stop it before it is started again.")
        self._api.remove(name)

    def _process_of(self, container: str) -> ProcessIdentity | None:
        """Its first process as this machine sees it; None where it does not run."""
        info = self._api.inspect(container)
        state = info["State"] if info else {}
        process = procfs.read_process(int(state["Pid"])) if state.get("Running") and state.get("Pid") else None
        return identify(process) if process and not process.ended else None

    def _container_of(self, process: ProcessIdentity) -> str | None:
        for started in self._registry.read_all():
            if started.process == process:
                return self._container_name(started.instance_id)
        try:
            containers = self._api.list_ids(f"{HOME_LABEL}={self._home}")
        except (EngineUnavailable, NotAllowed):
            return None  # not recorded, and Docker does not answer: not a container of ours
        return next((container for container in containers if self._process_of(container) == process), None)

    def _container_name(self, instance_id: str) -> str:
        """Two homes may have an instance of one name."""
        return f"aimgpu-{hashlib.sha256(self._home.encode()).hexdigest()[:8]}-{instance_id}"


def _wait_for_end(process: ProcessIdentity, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if procfs.is_running(process):
                watched = select.poll()
                watched.register(handle, select.POLLIN)
                watched.poll(seconds * 1000)
        finally:
            os.close(handle)
