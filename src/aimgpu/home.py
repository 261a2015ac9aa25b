"""The folder where the daemon keeps its state, and the record by which commands find it."""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

from aimgpu.errors import NotAllowed
from aimgpu.files import write_private
from aimgpu.procfs import is_running


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRecord:
    """What <home>/daemon.json holds, written by the daemon once it listens."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str
    port: int
    url: str


def failed_log(home: Path, model: str) -> Path:
    """Where the log of a model's last failed start is kept in a home."""
    return home / "failed-logs" / f"{model}.log"


def last_run(home: Path, program: str) -> Path:
    """Where it is kept how the last run of a program ended."""
    return home / "program-runs" / f"{program}.json"


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def daemon_file(self) -> Path:
        return self.path / "daemon.json"

    @property
    def keys_file(self) -> Path:
        return self.path / "keys.json"

    def learn_from(self, other: "Home") -> None:
        """Copy catalogue, measurements and layouts of simulated GPUs of another home, for a home that only serves planning."""
        self.create()
        for known, copy in (
            (other.catalogue_file, self.catalogue_file),
            (other.measurements_file, self.measurements_file),
            (other.simulated_file, self.simulated_file),
        ):
            if known.is_file():
                shutil.copyfile(known, copy)

    @property
    def catalogue_file(self) -> Path:
        return self.path / "catalogue.csv"

    @property
    def measurements_file(self) -> Path:
        return self.path / "measurements.json"

    @property
    def simulated_file(self) -> Path:
        """The layouts of simulated GPUs, which outlive a daemon as those of real ones do."""
        return self.path / "simulated-gpus.json"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite3"

    @property
    def log_file(self) -> Path:
        return self.path / "daemon.log"

    def failed_log(self, model: str) -> Path:
        """The log of the model's last failed start."""
        return failed_log(self.path, model)

    def create(self) -> None:
        """Make the folder, readable by its owner alone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise NotAllowed(
                f"cannot make the folder {self.path}: {error.strerror}", hint="Set AIMGPU_HOME to a folder you can write."
            ) from error
        found = self.path.stat()
        if found.st_mode & stat.S_IWOTH or found.st_uid not in {os.geteuid(), 0}:
            who = "every user" if found.st_mode & stat.S_IWOTH else "another user"
            raise NotAllowed(
                f"{who} can write to {self.path}, and so could take over the daemon",
                hint=f"`chmod 700 {self.path}` after a look at what is in it, or set AIMGPU_HOME to a folder of your own.",
            )

    def read_token(self) -> str | None:
        try:
            return self.token_file.read_text().strip()
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise NotAllowed(
                f"cannot read {self.token_file}: it belongs to another user",
                hint="Run the command as the user who started the daemon.",
            ) from error

    def read_daemon(self) -> DaemonRecord | None:
        """The daemon that runs from this home; None when there is none, or its record outlived it."""
        record = self._read_record()
        return record if record is not None and is_running(record) else None

    def _read_record(self) -> DaemonRecord | None:
        try:
            record = DaemonRecord(**loads(self.daemon_file.read_text()))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):  # ValueError: no UTF-8, no JSON
            return None
        numbers, texts = (record.pid, record.start_ticks, record.port), (record.boot_id, record.host, record.url)
        is_ours = all(type(one) is int for one in numbers) and all(isinstance(one, str) for one in texts)
        return record if is_ours else None

    def write_daemon(self, record: DaemonRecord) -> None:
        """Whole or not at all: readers never see half a record."""
        write_private(self.daemon_file, dumps(asdict(record)))

    def remove_daemon(self, pid: int) -> None:
        """The record of the daemon that ends; that of another stays."""
        record = self._read_record()
        if record is not None and record.pid == pid:
            self.daemon_file.unlink(missing_ok=True)


def find_home(environment: Mapping[str, str] = os.environ) -> Home:
    """AIMGPU_HOME, else $XDG_STATE_HOME/aimgpu, else ~/.local/state/aimgpu.

    A relative XDG_STATE_HOME is ignored, as the XDG rules say: every folder would have a daemon of its own.
    """
    if chosen := environment.get("AIMGPU_HOME"):
        return Home(Path(chosen).expanduser().absolute())
    state = Path(environment.get("XDG_STATE_HOME", ""))
    return Home((state if state.is_absolute() else Path.home() / ".local" / "state") / "aimgpu")
