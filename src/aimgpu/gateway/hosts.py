"""Where a request comes from: names of this machine, its own addresses, and requests that another proxy forwarded."""

import functools
import ipaddress
import re
import socket
from collections.abc import Collection

from aimgpu.errors import InvalidInput, NotAllowed, NotAuthenticated
from aimgpu.gateway.http.asgi import Head, Scope

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_FORWARDING = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")


def check_host(head: Head, hosts: Collection[str] = ()) -> None:
    """For requests without a credential. Raises NotAllowed where the Host header names another machine; `hosts` are its too.

    That is how a web page open on this machine gets past the browser: its own name, resolved to 127.0.0.1.
    """
    host = head.get(b"host", b"")
    if not names_this_machine(host) and _name_in(host) not in hosts:
        raise NotAllowed(
            "Without an API key this machine's own names are answered only.",
            hint="Call http://127.0.0.1, make a key with `aimgpu keys add NAME` and send it, or name the host in AIMGPU_HOSTS.",
        )


def check_forwarded(head: Head) -> None:
    """For requests without a credential. Raises NotAuthenticated for one that a proxy passed on: it is not of this machine."""
    if any(name in head for name in _FORWARDING):
        raise NotAuthenticated("What a proxy passes on needs an API key.", hint="`aimgpu keys add NAME` makes one.")


def check_origin(head: Head, origins: Collection[bytes]) -> None:
    """For requests without a credential. Raises NotAllowed where a browser names a page of another origin."""
    origin = head.get(b"origin")
    if origin is None or origin.partition(b"://")[2] == head.get(b"host") or origin.lower() in origins:
        return
    raise NotAllowed(
        "Without an API key pages of other origins may not call the models.",
        hint="Name the page's origin in AIMGPU_CORS_ORIGINS, or make a key with `aimgpu keys add NAME` and send it.",
    )


def parse_hosts(text: str) -> frozenset[str]:
    """Names separated by commas, such as "gpu.example.org, gpu.lan". Raises InvalidInput."""
    hosts = [host.strip().lower() for host in text.split(",") if host.strip()]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise InvalidInput(f"{host[:80]!r} is not a host's name", hint="Write names without scheme and port.")
    return frozenset(hosts)


def is_local(scope: Scope, head: Head) -> bool:
    """Whether the request was made on this machine: from loopback, and not passed on by a proxy that runs here."""
    client = scope.get("client") or ("", 0)
    return is_loopback(client[0]) and not any(name in head for name in _FORWARDING)


@functools.lru_cache(maxsize=64)
def names_this_machine(host: bytes) -> bool:
    """Whether a Host header may come from this machine: an address, localhost, its own name, or none at all."""
    name = _name_in(host)
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_in(host: bytes) -> str:
    """Of a Host header, without the port."""
    name = host.decode("latin-1").strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether an address or name is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
