"""Certificates that another program keeps in a mounted Secret, as cert-manager does: served, followed, trusted in time."""

import asyncio
import datetime as dt
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from tests.kubernetes.api_server import ApiServer, serving
from tests.kubernetes.webhook_certificates import BEGIN, OPTIONS, SECRET, bundle, install, keeper, trusted

from aimgpu.kubernetes.cluster.admission.authority_bundle import extend_bundle
from aimgpu.kubernetes.cluster.admission.certificate_keeper import CertificateKeeper
from aimgpu.kubernetes.cluster.admission.certificates import LIFETIME, ServingCertificate, make_certificate
from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions

HOST = f"{OPTIONS.service}.system.svc"
CERTIFICATES = "/apis/cert-manager.io/v1/namespaces/system/certificates"


def with_rsa_key() -> ServingCertificate:
    """As a SelfSigned issuer of cert-manager makes it: its own authority, an RSA key."""
    key, now, serial = rsa.generate_private_key(65537, 2048), dt.datetime.now(dt.UTC), x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{serial:x}")])  # OpenSSL tells equal names apart by luck only
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), serial, now, now + dt.timedelta(days=90))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = made.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return ServingCertificate(authority=text, certificate=text, key=private)


def with_ec_key() -> ServingCertificate:
    return make_certificate(OPTIONS.service, "system", dt.datetime.now(dt.UTC))


def write(folder: Path, certificate: ServingCertificate, *, authority: bool = True) -> None:
    for name, text in certificate.to_secret().items():
        if name != "ca.crt" or authority:
            (folder / name).write_text(text)


def mount(folder: Path, certificate: ServingCertificate) -> None:
    """As the kubelet does: a folder of each version, files that link into `..data`, and one rename that replaces all."""
    before = folder / "..data"
    old = before.resolve() if before.exists() else None
    version = folder / f"..version_{len(list(folder.glob('..version_*')))}"
    version.mkdir()
    write(version, certificate)
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").rename(before)
    for name in certificate.to_secret():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    if old is not None:
        for path in old.iterdir():
            path.unlink()


@asynccontextmanager
async def listening(mine: CertificateKeeper) -> AsyncIterator[Callable[[str], Any]]:
    """A function that calls as the API server does, trusting a bundle, and returns the certificate that it met."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=mine.context)
    port = server.sockets[0].getsockname()[1]

    async def call(authorities: str) -> str:
        context = ssl.create_default_context(cadata=authorities)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # on by default from Python 3.13; a SelfSigned issuer does not pass
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(found)

    async with server:
        yield call


def test_replaced_files_are_served_by_the_running_server_whatever_their_key(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            mine = keeper(client, dt.datetime.now(dt.UTC), options)
            async with listening(mine) as call:
                for made in (with_ec_key(), with_rsa_key(), with_rsa_key(), with_ec_key()):
                    mount(tmp_path, made)
                    await mine.refresh()
                    assert await call("".join(bundle(api))) == made.certificate

    asyncio.run(main())


def test_a_certificate_is_served_only_once_its_authority_is_trusted(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            first, second = with_ec_key(), with_ec_key()
            mine = keeper(client, dt.datetime.now(dt.UTC), options, trust_seconds=3600)
            async with listening(mine) as call:
                mount(tmp_path, first)
                await mine.refresh()
                mount(tmp_path, second)
                refreshing = asyncio.ensure_future(mine.refresh())
                while trusted(api) != {second.authority + first.authority}:
                    await api.changed.wait()
                assert await call(first.authority) == first.certificate
                refreshing.cancel()

    asyncio.run(main())


def test_a_replica_that_still_serves_the_former_certificate_stays_trusted(tmp_path: Path) -> None:
    """Files of a Secret reach nodes up to two minutes apart; a new authority must not lock the later replica out."""
    folders = [tmp_path / "early", tmp_path / "late"]

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            early, late = (keeper(client, options=AdmissionOptions(namespace="system", certificates=one)) for one in folders)
            made = [make_certificate(OPTIONS.service, "system", BEGIN) for _ in range(2)]
            for folder, mine in zip(folders, (early, late), strict=True):
                folder.mkdir()
                write(folder, made[0])
                await mine.refresh()
            write(folders[0], made[1])
            await early.refresh()
            await late.refresh()
            await early.refresh()
            assert bundle(api) == [made[1].authority, made[0].authority]

    asyncio.run(main())


def test_a_bundle_keeps_three_former_authorities_that_are_valid() -> None:
    made = [make_certificate(OPTIONS.service, "system", BEGIN + dt.timedelta(days=day)).authority for day in range(6)]
    present = ""
    for each in made[:5]:
        present = extend_bundle(present, each, BEGIN)
    assert present == "".join(made[4:0:-1])
    assert extend_bundle(present.replace("\n-----BEGIN", "\n\n-----BEGIN"), made[2], BEGIN).count("BEGIN") == 4
    after = BEGIN + LIFETIME + dt.timedelta(days=3)  # the one of day 4 is the last that is valid
    assert extend_bundle(present, made[5], after) == made[5] + made[4]
    damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    assert extend_bundle(damaged, made[0], BEGIN) == made[0]
    assert extend_bundle(present, "no certificate", BEGIN) == present


def test_an_issuer_that_gives_no_authority_leaves_the_configurations_alone(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            mine = keeper(client, options=options)
            write(tmp_path, with_ec_key(), authority=False)
            await mine.refresh()
            assert trusted(api) == {""}
            assert api.find(SECRET) is None  # nothing of ours beside it

    asyncio.run(main())


def test_files_that_are_not_there_or_do_not_fit_are_an_error_and_what_is_served_stays(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (_, client):
            mine = keeper(client, options=options)
            with pytest.raises(FileNotFoundError):
                await mine.refresh()
            first, second = with_ec_key(), with_ec_key()
            write(tmp_path, first)
            await mine.refresh()
            (tmp_path / "tls.crt").write_text(second.certificate)
            with pytest.raises(ssl.SSLError):
                await mine.refresh()
            async with listening(mine) as call:
                assert await call(first.authority) == first.certificate

    asyncio.run(main())


def test_the_server_waits_for_files_that_are_about_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimgpu.kubernetes.cluster.admission.certificate_keeper._FIRST_RETRY_SECONDS", 0.0)
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            obtaining = asyncio.ensure_future(keeper(client, options=options).obtain())
            await asyncio.wait([obtaining], timeout=0.1)
            assert not obtaining.done()
            made = with_ec_key()
            write(tmp_path, made)
            await obtaining
            assert bundle(api) == [made.authority]

    asyncio.run(main())


def put_secret(api: ApiServer) -> None:
    annotations = {"cert-manager.io/certificate-name": "admission"}
    api.put(
        SECRET.rpartition("/")[0], {"metadata": {"name": OPTIONS.secret, "annotations": annotations}, "data": {"k": "dg=="}}
    )


def owners(api: ApiServer) -> list[tuple[str, str]]:
    metadata = (api.find(SECRET) or {})["metadata"]
    return [(each["kind"], each["uid"]) for each in metadata.get("ownerReferences") or ()]


def test_the_secret_of_cert_manager_goes_with_its_certificate(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            put_secret(api)
            owner = ("Certificate", api.put(CERTIFICATES, {"metadata": {"name": "admission"}})["metadata"]["uid"])
            write(tmp_path, with_ec_key())
            mine = keeper(client, options=options)
            api.fault = lambda method, path: 409 if method == "PUT" and "secrets" in path else None
            await mine.refresh()  # another wrote it in that moment: tried again
            assert owners(api) == []
            api.fault = lambda _method, _path: None
            await mine.refresh()
            assert owners(api) == [owner]
            assert (api.find(SECRET) or {})["data"] == {"k": "dg=="}
            api.remove(SECRET)
            put_secret(api)  # deleted by hand and issued again
            write(tmp_path, with_ec_key())
            await mine.refresh()
            assert owners(api) == [owner]
            writes = len(api.writes)
            await mine.refresh()
            assert len(api.writes) == writes

    asyncio.run(main())


def test_a_role_without_rights_to_the_secret_does_not_keep_it_from_being_served(tmp_path: Path) -> None:
    options = AdmissionOptions(namespace="system", certificates=tmp_path)

    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            put_secret(api)
            api.fault = lambda _method, path: 403 if "secrets" in path else None
            made = with_ec_key()
            write(tmp_path, made)
            mine = keeper(client, options=options)
            await mine.refresh()
            async with listening(mine) as call:
                assert await call(made.authority) == made.certificate

    asyncio.run(main())
