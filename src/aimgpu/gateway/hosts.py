"""Where a request comes from: names of this machine, its own addresses, and requests that another proxy forwarded."""

import functools
import ipaddress
import socket

from aimgpu.errors import NotAllowed
from aimgpu.gateway.http.asgi import Head, Scope

_FORWARDING = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")


def check_host(head: Head) -> None:
    """For requests that need no key. Raises NotAllowed where the Host header names another machine.

    That is how a web page open on this machine gets past the browser: its own name, resolved to 127.0.0.1.
    """
    if not names_this_machine(head.get(b"host", b"")):
        raise NotAllowed(
            "Without an API key the models answer to this machine's own names only.",
            hint="Call http://127.0.0.1, or make a key with `aimgpu keys add NAME` and send it.",
        )


def is_local(scope: Scope, head: Head) -> bool:
    """Whether the request was made on this machine: from loopback, and not passed on by a proxy that runs here."""
    client = scope.get("client") or ("", 0)
    return is_loopback(client[0]) and not any(name in head for name in _FORWARDING)


@functools.lru_cache(maxsize=64)
def names_this_machine(host: bytes) -> bool:
    """Whether a Host header may come from this machine: an address, localhost, its own name, or none at all."""
    name = host.decode("latin-1").strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address or name is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
