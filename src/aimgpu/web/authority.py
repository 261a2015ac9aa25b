"""Who may look and who may change things from a browser.

Looking: a browser on this machine, or a caller with the daemon's token. Changing: a caller with the token; and, as long as the
daemon requires no key, a browser that runs on this machine as the daemon's own user. That last case is ambient, so such a
request must prove that the page itself made it: same origin, with a header that no other site can send without being asked.
"""

import hmac
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aimgpu.errors import NotAllowed, NotAuthenticated

PAGE_HEADER = b"x-aimgpu-page"
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_SAME_ORIGIN = (b"same-origin", b"none")
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
_UID_FIELD = 7

Scope = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    read: bool
    write: bool
    reason: str | None = None  # why it may not write


class Authority:
    def __init__(
        self,
        token: str,
        keys_required: Callable[[], bool],
        owner_of: Callable[[tuple[str, int], tuple[str, int]], int | None] | None = None,
    ) -> None:
        self._token = token.encode()
        self._keys_required = keys_required
        self._owner_of = owner_of or find_socket_owner

    @property
    def token(self) -> str:
        return self._token.decode()

    @property
    def keys_required(self) -> bool:
        return self._keys_required()

    def check_read(self, scope: Scope) -> None:
        """Raises NotAuthenticated."""
        if not self._has_token(scope) and not is_local(scope):
            raise NotAuthenticated("From another machine the page needs the daemon's token.", hint=_HOW)

    def check_write(self, scope: Scope) -> None:
        """Raises NotAuthenticated or NotAllowed."""
        if self._has_token(scope):
            return
        reason = self._why_not(scope)
        if reason is not None:
            raise NotAuthenticated(reason, hint=_HOW)
        check_same_origin(scope)

    def access(self, scope: Scope) -> PageAccess:
        if self._has_token(scope):
            return PageAccess(read=True, write=True)
        reason = self._why_not(scope)
        return PageAccess(read=is_local(scope), write=reason is None, reason=reason)

    def _has_token(self, scope: Scope) -> bool:
        given = _header(scope, b"authorization")
        return given is not None and hmac.compare_digest(given, b"Bearer " + self._token)

    def _why_not(self, scope: Scope) -> str | None:
        if not is_local(scope):
            return "From another machine changes need the daemon's token."
        if self._keys_required():
            return "This daemon asks for keys, so changes need its token."
        client, server = scope.get("client"), scope.get("server")
        owner = self._owner_of(tuple(client), tuple(server)) if client and server else None
        if owner not in (0, os.geteuid()):
            return "The browser runs as another user than the daemon, so changes need the daemon's token."
        return None


_HOW = "It is in the file `token` in the daemon's home, which its user can read. Enter it on the page under Keys."


def check_same_origin(scope: Scope) -> None:
    """Raises NotAllowed for a request that another site could have made a browser send."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    site = _header(scope, b"sec-fetch-site")
    foreign = origin is not None and (host is None or origin.partition(b"://")[2] != host)
    if foreign or (site is not None and site not in _SAME_ORIGIN) or _header(scope, PAGE_HEADER) != b"1":
        raise NotAllowed("this request did not come from the daemon's own page", hint="Open the page and try again there.")


def is_local(scope: Scope) -> bool:
    """From this machine, and not passed on by a proxy on it."""
    client = scope.get("client")
    if not client or any(_header(scope, name) is not None for name in _FORWARDED):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def find_socket_owner(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user whose process holds the other end of a connection on this machine; None: not found."""
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (
                fields[3] == _ESTABLISHED
                and int(fields[1].rpartition(":")[2], 16) == client[1]
                and int(fields[2].rpartition(":")[2], 16) == server[1]
                and _is_loopback_hex(fields[1].rpartition(":")[0])
            ):
                return int(fields[_UID_FIELD])
    return None


def _is_loopback_hex(address: str) -> bool:
    """As the kernel prints it: each 32-bit word in the machine's byte order."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((bytes(value) for key, value in scope["headers"] if key == name), None)
