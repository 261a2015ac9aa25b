"""Whether what answers at an engine's address is that engine: asked for each new connection, before anything is sent on it.

Engines bind a port that was free when it was chosen, seconds later; another user of the machine may bind it first. The kernel
tells who has the other end of a connection:

1. Once it was accepted, its socket has an inode, which is among the open files of the process that accepted it.
2. Before, it waits at a listener that has one. A listener that is closed drops what waits at it, so a connection that still
   waits belongs to a listener that is there now. The table is read listeners first.

The inode must belong to the instance: its process, its session or a descendant. A container's port is published by Docker,
as root, or as this user where Docker is rootless; whose processes cannot be looked into, so the user must be one of these.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from aimgpu import procfs
from aimgpu.domain import Instance, ProcessIdentity
from aimgpu.errors import StrangerListens

_TABLES = ("tcp", "tcp6")
_ESTABLISHED, _LISTEN = "01", "0A"
_UID, _INODE = 7, 9
_CONTAINERS = ("docker",)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOwner:
    """Whose an engine's address must be."""

    instance_id: str
    process: ProcessIdentity
    in_container: bool = False

    @classmethod
    def of(cls, instance: Instance) -> "EngineOwner | None":
        """None: nothing of it runs."""
        if instance.process is None:
            return None
        return cls(instance_id=instance.id, process=instance.process, in_container=instance.launcher in _CONTAINERS)


_expected: ContextVar[EngineOwner | None] = ContextVar("expected_engine", default=None)


@contextmanager
def expecting(owner: EngineOwner | None) -> Iterator[None]:
    """Within it, `health.ask` sends nothing to anybody else; an engine need not know."""
    token = _expected.set(owner)
    try:
        yield
    finally:
        _expected.reset(token)


def expected() -> EngineOwner | None:
    return _expected.get()


def check_peer(owner: EngineOwner, ours: Address, theirs: Address, net: Path = Path("/proc/net")) -> None:
    """Of a connection between these ports of loopback.

    Raises StrangerListens where its other end is not the instance's, ConnectionResetError where the instance ends meanwhile.
    """
    listeners, accepted = _read_rows(ours[1], theirs[1], net)
    found = accepted or listeners
    if found and all(_belongs(owner, user, inode) for user, inode in found):
        return
    if found and (
        _is_ending(owner) or set(found).isdisjoint(row for rows in _read_rows(ours[1], theirs[1], net) for row in rows)
    ):
        raise ConnectionResetError(f"{owner.instance_id} closed its socket while it was checked")
    users = ", ".join(str(user) for user in sorted({user for user, _ in found})) or "unknown"
    raise StrangerListens(
        f"another program (user {users}) listens at port {theirs[1]} in place of {owner.instance_id}; nothing was sent to it",
        hint="The engine is started again on another port. `ss -ltnp` shows who has this one.",
    )


def _read_rows(our_port: int, their_port: int, net: Path) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(user, inode) of the listeners on their port, and of their end of the connection once it was accepted."""
    listeners, accepted = [], []
    for table in _TABLES:
        try:
            text = (net / table).read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) != their_port:
                continue
            row = (int(fields[_UID]), int(fields[_INODE]))
            if fields[3] == _LISTEN:
                listeners.append(row)
            elif fields[3] == _ESTABLISHED and int(fields[2].rpartition(":")[2], 16) == our_port and row[1]:
                accepted.append(row)
    return listeners, accepted


def _belongs(owner: EngineOwner, user: int, inode: int) -> bool:
    if owner.in_container:
        return user in (0, os.geteuid())
    if not procfs.is_running(owner.process):
        return False
    main = owner.process.pid
    if _holds(main, inode):
        return True
    others = [one.pid for one in procfs.read_processes() if one.session == main and one.pid != main]
    return any(_holds(pid, inode) for pid in {*others, *procfs.read_tree(main)} - {main})


def _is_ending(owner: EngineOwner) -> bool:
    """A process that exits gives up all its files before its sockets are closed and before it is seen to be gone."""
    try:
        return procfs.is_running(owner.process) and not os.listdir(f"/proc/{owner.process.pid}/fd")  # noqa: PTH208
    except OSError:
        return False


def _holds(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        with os.scandir(f"/proc/{pid}/fd") as files:
            for file in files:
                try:
                    if os.readlink(file.path) == wanted:  # noqa: PTH115 - hundreds of them, often
                        return True
                except OSError:  # closed meanwhile
                    continue
    except OSError:  # it has ended, or is not ours to look into
        return False
    return False
