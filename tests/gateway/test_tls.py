"""TLS towards callers: a real certificate, a real client, files that change under it."""

import asyncio
import contextlib
import datetime as dt
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.gateway.memory import echo

from aimgpu.errors import InvalidInput
from aimgpu.gateway.http.server import caller_config
from aimgpu.gateway.http.tls import CallerServer, ServerCertificate, TlsListener

REQUEST = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n"


def write_certificate(folder: Path, *, passphrase: bytes | None = None) -> tuple[Path, Path, int]:
    """A certificate of 127.0.0.1 that vouches for itself, its key, and its serial number."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    begun = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begun)
        .not_valid_after(begun + dt.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    key_file.write_bytes(key.private_bytes(pem, pkcs8, hidden))
    certificate_file.write_bytes(made.public_bytes(pem))
    return certificate_file, key_file, made.serial_number


class Client:
    """A caller that believes one certificate only."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self, trusted: Path) -> None:
        context = ssl.create_default_context(cafile=trusted)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)

    @property
    def serial(self) -> int:
        found = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(found).serial_number

    async def ask(self, path: bytes = b"") -> bytes:
        self._writer.write(REQUEST % path)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head + await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def served(certificate: ServerCertificate) -> AsyncIterator[tuple[int, int]]:
    """The plain port and that of TLS."""
    plain, tls = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    server = CallerServer(caller_config(echo), TlsListener(tls, certificate))
    ports = plain.getsockname()[1], tls.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[plain]))
    while not (server.started and server._following):  # noqa: ASYNC110 - uvicorn offers a flag and no event
        await asyncio.sleep(0.01)
    try:
        yield ports
    finally:
        server.should_exit = True
        await serving


def test_callers_are_served_over_tls_and_commands_of_this_machine_without(tmp_path: Path) -> None:
    certificate_file, key_file, serial = write_certificate(tmp_path)

    async def main() -> tuple[bytes, int, bytes, bytes]:
        async with served(ServerCertificate(certificate_file, key_file)) as (plain_port, port):
            client = Client(port)
            await client.open(certificate_file)
            answer = await client.ask(b"one") + await client.ask(b"two")
            client.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", plain_port)
            writer.write(REQUEST % b"plain")
            plain = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST % b"plain")
            refused = await reader.read()
            writer.close()
            return answer, client.serial, plain, refused

    answer, found, plain, refused = asyncio.run(main())
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"/two" in answer
    assert found == serial
    assert plain.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1" not in refused


def test_a_new_certificate_is_offered_to_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    certificate_file, key_file, first = write_certificate(tmp_path)
    certificate = ServerCertificate(certificate_file, key_file)

    async def main() -> tuple[int, int, bytes]:
        async with served(certificate) as (_, port):
            before, after = Client(port), Client(port)
            await before.open(certificate_file)
            await before.ask()
            serial = write_certificate(tmp_path)[2]
            certificate.refresh()
            await after.open(certificate_file)
            assert after.serial == serial != before.serial
            answer = await before.ask(b"still")
            before.close()
            after.close()
            return before.serial, after.serial, answer

    kept, new, answer = asyncio.run(main())
    assert kept == first != new
    assert answer.startswith(b"HTTP/1.1 200")


def test_files_that_became_bad_are_named_once_and_the_pair_before_them_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate_file, key_file, first = write_certificate(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(certificate_file.read_bytes())
    certificate = ServerCertificate(certificate_file, key_file)
    certificate_file.write_bytes(b"half of a certi")

    async def main() -> int:
        async with served(certificate) as (_, port):
            for _ in range(3):
                certificate.refresh()
            client = Client(port)
            await client.open(trusted)
            await client.ask()
            client.close()
            return client.serial

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(main()) == first
    assert [record.message for record in caplog.records] == ["tls.unusable"]


def _other_key(folder: Path) -> tuple[Path, Path]:
    other = folder / "other"
    other.mkdir()
    return write_certificate(folder)[0], write_certificate(other)[1]


BAD: dict[str, Any] = {
    "a file that is not there": lambda folder: (folder / "none.pem", write_certificate(folder)[1]),
    "no certificate": lambda folder: (write_certificate(folder)[1], folder / "key.pem"),
    "the key of another": _other_key,
    "a key with a passphrase": lambda folder: write_certificate(folder, passphrase=b"secret words")[:2],
    "a folder": lambda folder: (folder, folder),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_bad_files_are_refused_by_name(tmp_path: Path, make: Any) -> None:
    certificate_file, key_file = make(tmp_path)
    with pytest.raises(InvalidInput, match="cannot serve TLS with") as refused:
        ServerCertificate(certificate_file, key_file)
    assert str(certificate_file) in refused.value.message
    assert str(key_file) in refused.value.message
