"""Who may look and who may change things.

Changing: a caller with the daemon's token, or the page in a browser that opened a one-time link of `aimgpu web`. Where a
connection comes from gives no right to change anything. Looking: those two; a caller with an API key without limits; and, as
long as the daemon requires no key, callers on this machine, who may call the models as well.

A browser that opened a link has a cookie (SameSite=Strict, HttpOnly) that counts for the user, or from afar the address, that
opened it. A browser sends a cookie unasked, so a request with it must also prove that the page itself made it: same origin,
with a header that no other site can send.
"""

import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Protocol

from aimgpu.errors import NotAllowed, NotAuthenticated
from aimgpu.keyfile import bearer_token

PAGE_HEADER = b"x-aimgpu-page"
LINK_SECONDS = 3600.0
_MOST_LINKS, _MOST_SESSIONS = 64, 64  # the oldest go first
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")
_SAME_ORIGIN = (b"same-origin", b"none")
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
_UID_FIELD = 7

Scope = Mapping[str, Any]
Peer = tuple[str, str | int]


class KeyHolder(Protocol):
    @property
    def unrestricted(self) -> bool: ...


class Keys(Protocol):
    """The API keys."""

    @property
    def required(self) -> bool: ...

    def find(self, token: bytes) -> KeyHolder | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    read: bool
    write: bool
    reason: str | None = None  # why it may not write


class PageLinks:
    """One-time links, and the browsers that opened one. Only digests are kept, in memory: a restart ends all of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: dict[bytes, float] = {}  # until when
        self._sessions: dict[bytes, Peer] = {}

    def make(self) -> str:
        """The code of a link that works once, for an hour."""
        code = secrets.token_urlsafe(24)
        _add(self._links, _digest(code), self._clock() + LINK_SECONDS, _MOST_LINKS)
        return code

    def open(self, code: str, peer: Peer) -> str | None:
        """The value of the cookie; None for a link that was used, has expired or never was."""
        until = self._links.pop(_digest(code), None)
        if until is None or until < self._clock():
            return None
        value = secrets.token_urlsafe(32)
        _add(self._sessions, _digest(value), peer, _MOST_SESSIONS)
        return value

    def peer_of(self, value: str) -> Peer | None:
        """Who opened the link that this cookie is from."""
        return self._sessions.get(_digest(value))


class Authority:
    def __init__(
        self,
        token: str,
        keys: Keys,
        owner_of: Callable[[tuple[str, int], tuple[str, int]], int | None] | None = None,
    ) -> None:
        self._token = token.encode()
        self._keys = keys
        self._owner_of = owner_of or find_socket_owner
        self._links = PageLinks()

    @property
    def token(self) -> str:
        return self._token.decode()

    @property
    def keys_required(self) -> bool:
        return self._keys.required

    def has_credential(self, scope: Scope) -> bool:
        """Whether the request has the token or a key, which a browser sends only if its page was given it."""
        return self.has_token(scope) or self._key_holder(scope) is not None

    def has_token(self, scope: Scope) -> bool:
        given = bearer_token(header_of(scope, b"authorization") or b"")
        return given is not None and hmac.compare_digest(given, self._token)

    def check_read(self, scope: Scope) -> None:
        """Raises NotAuthenticated or NotAllowed."""
        if self.may_change(scope):
            return
        if self._keys.required:
            holder = self._key_holder(scope)
            if holder is None:
                raise NotAuthenticated("This daemon asks for keys: the page needs its token or an API key.", hint=_HOW)
            if not holder.unrestricted:
                raise NotAllowed("This API key is limited, and the page shows everything.", hint=_HOW)
        elif not is_local(scope):
            raise NotAuthenticated("From another machine the page needs the daemon's token.", hint=_HOW)

    def check_judge(self, scope: Scope) -> None:
        """To have something worked out: as `check_read`, and not by a page of another site."""
        self.check_read(scope)
        if not self.has_credential(scope):
            check_same_origin(scope)

    def check_write(self, scope: Scope) -> None:
        """Raises NotAuthenticated or NotAllowed."""
        if self.has_token(scope):
            return
        if not self.is_open_page(scope):
            if header_of(scope, b"authorization") is not None:
                raise NotAllowed("Changes need the daemon's token, and this is another.", hint=_HOW)
            raise NotAuthenticated(_LINK_NEEDED, hint=_HOW)
        check_same_origin(scope)

    def may_change(self, scope: Scope) -> bool:
        """Whether it has what changes need."""
        return self.has_token(scope) or self.is_open_page(scope)

    def access(self, scope: Scope) -> PageAccess:
        write = self.may_change(scope)
        try:
            self.check_read(scope)
        except (NotAuthenticated, NotAllowed) as error:
            return PageAccess(read=False, write=False, reason=error.message)
        return PageAccess(read=True, write=write, reason=None if write else _LINK_NEEDED)

    def make_link(self) -> str:
        """The path of a one-time link."""
        return f"/link/{self._links.make()}"

    def open_link(self, scope: Scope, code: str) -> str | None:
        """The Set-Cookie header of a link that is opened; None: this browser has one already. Raises NotAllowed."""
        if self.is_open_page(scope):
            return None
        value = self._links.open(code, self._peer(scope))
        if value is None:
            raise NotAllowed("This link was used already, or has expired.", hint="`aimgpu web` prints a new one.")
        return f"{_cookie_name(scope)}={value}; Path=/; HttpOnly; SameSite=Strict"

    def is_open_page(self, scope: Scope) -> bool:
        """Whether its browser opened a link, as the same user."""
        given = header_of(scope, b"cookie")
        if given is None:
            return False
        try:
            morsel = SimpleCookie(given.decode("latin-1")).get(_cookie_name(scope))
        except CookieError:
            return False
        peer = self._links.peer_of(morsel.value) if morsel is not None else None
        return peer is not None and peer == self._peer(scope)

    def _key_holder(self, scope: Scope) -> KeyHolder | None:
        given = bearer_token(header_of(scope, b"authorization") or b"") or (header_of(scope, b"x-api-key") or b"").strip()
        return self._keys.find(given) if given else None

    def _peer(self, scope: Scope) -> Peer:
        """Cookies of one host go to all its ports: another user's server there must gain nothing by one."""
        client, server = scope.get("client") or ("", 0), scope.get("server") or ("", 0)
        if is_loopback(client[0]):
            owner = self._owner_of(tuple(client), tuple(server))
            return ("user", -1 if owner is None else owner)
        return ("address", client[0])


_LINK_NEEDED = "Changes need the link that `aimgpu web` prints, or the daemon's token."
_HOW = (
    "Open the link that `aimgpu web` prints, or enter the token on the page under Keys: it is in the file `token` in the "
    "daemon's home, which its user can read."
)


def check_same_origin(scope: Scope) -> None:
    """Raises NotAllowed for a request that another site could have made a browser send."""
    check_site(scope)
    if header_of(scope, PAGE_HEADER) != b"1":
        raise NotAllowed("this request did not come from the daemon's own page", hint="Open the page and try again there.")


def check_site(scope: Scope) -> None:
    """Raises NotAllowed where a browser says that a page of another site makes this request."""
    host, origin = header_of(scope, b"host"), header_of(scope, b"origin")
    site = header_of(scope, b"sec-fetch-site")
    foreign = origin is not None and (host is None or origin.partition(b"://")[2] != host)
    if foreign or (site is not None and site not in _SAME_ORIGIN):
        raise NotAllowed("this request was made by a page of another site", hint="Open the daemon's own page.")


def is_local(scope: Scope) -> bool:
    """From this machine, and not passed on by a proxy on it."""
    client = scope.get("client")
    if not client or any(header_of(scope, name) is not None for name in _FORWARDED):
        return False
    return is_loopback(client[0])


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
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


def header_of(scope: Scope, name: bytes) -> bytes | None:
    return next((bytes(value) for key, value in scope["headers"] if key == name), None)


def _is_loopback_hex(address: str) -> bool:
    """As the kernel prints it: each 32-bit word in the machine's byte order."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _cookie_name(scope: Scope) -> str:
    """Browsers do not tell the ports of a host apart: two daemons on one machine must not overwrite each other's."""
    return f"aimgpu-{(scope.get('server') or ('', 0))[1]}"


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _add(table: dict[bytes, Any], key: bytes, value: object, most: int) -> None:
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]
