"""TLS for callers: a certificate and its key, read again when the files change."""

import asyncio
import gc
import logging
import socket
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from aimgpu.errors import InvalidInput

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_HANDSHAKE_SECONDS = 20.0
_HINT = "Both are PEM files; the first certificate is the server's own, its authorities follow. The key has no passphrase."


class ServerCertificate:
    """What new connections are offered. Those that are open keep what they began with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises InvalidInput for files that cannot be used."""
        self._certificate, self._key = certificate, key
        self._stamp = self._read_stamp()
        self._current = self._load()
        self.context = self._load()
        self.context.sni_callback = self._choose

    async def follow(self) -> None:
        """For ever: read the files again when they change. Bad ones are named in the log, and the pair before them stays."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the files again where they have changed."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._current = self._load()
        except InvalidInput as error:
            log.error("tls.unusable", extra={"data": {"error": error.message}})  # noqa: TRY400 - the reason is in it
        else:
            log.info("tls.reloaded", extra={"data": {"certificate": str(self._certificate)}})

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")  # never asked for on a terminal
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            text = f"cannot serve TLS with {self._certificate} and the key {self._key}: {why}"
            raise InvalidInput(text, hint=_HINT) from error
        return context

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._certificate, self._key):
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class TlsListener:
    """A socket whose callers speak TLS."""

    socket: socket.socket
    certificate: ServerCertificate


class CallerServer(uvicorn.Server):
    """Serves callers, on one listener more with TLS where it is given."""

    def __init__(self, config: uvicorn.Config, tls: TlsListener | None = None) -> None:
        super().__init__(config)
        self._tls = tls
        self._following: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's. What is imported by now is never garbage: looking at it took most of the time of a large body."""
        gc.freeze()
        await super().startup(sockets)
        if self._tls is None:
            return
        protocol = partial(
            cast("Any", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        server = await asyncio.get_running_loop().create_server(
            protocol, sock=self._tls.socket, ssl=self._tls.certificate.context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
        )
        self.servers.append(server)
        self._following = asyncio.create_task(self._tls.certificate.follow())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        if self._following is not None:
            self._following.cancel()
        await super().shutdown(sockets)
