"""The certificate of the webhooks: one for all replicas, renewed in time, trusted by the API server, or kept by others."""

import asyncio
import base64
import datetime as dt
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.kubernetes.api_server import ApiServer, serving
from tests.kubernetes.webhook_certificates import BEGIN, OPTIONS, REGISTRATION, SECRET, bundle, install, keeper, trusted

from aimgpu.errors import ClusterConflict, ClusterFailed
from aimgpu.kubernetes.cluster.admission.certificates import LIFETIME, RENEW_BEFORE, make_certificate
from aimgpu.kubernetes.cluster.admission.options import parse_options
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS as NAME


def stored(api: ApiServer) -> dict[str, str]:
    secret = api.find(SECRET)
    assert secret is not None
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


def test_a_certificate_is_verified_strictly_among_authorities_of_the_same_name(tmp_path: Path) -> None:
    """Those of before stay in the bundle; clients find the one that signed, and hold it to RFC 5280."""
    made = [make_certificate(OPTIONS.service, "system", dt.datetime.now(dt.UTC)) for _ in range(4)]
    client = ssl.create_default_context(cadata="".join(each.authority for each in made))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    for each in made:
        for name, text in each.to_secret().items():
            (tmp_path / name).write_text(text)
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
        shake_hands(client, server)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """In memory; raises what the client finds wrong."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=f"{OPTIONS.service}.system.svc"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_replicas_that_start_at_once_agree_on_one_certificate() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            await asyncio.gather(*(keeper(client).refresh() for _ in range(4)))
            assert trusted(api) == {stored(api)["ca.crt"]}
            assert api.find(SECRET)["metadata"]["ownerReferences"][0]["kind"] == "MutatingWebhookConfiguration"  # type: ignore[index]

    asyncio.run(main())


def test_a_certificate_is_renewed_before_it_ends_and_the_old_authority_is_trusted_beside_the_new() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            await keeper(client).refresh()
            first = stored(api)
            still_good = BEGIN + LIFETIME - RENEW_BEFORE - dt.timedelta(hours=1)
            await keeper(client, still_good).refresh()
            assert stored(api) == first
            await keeper(client, still_good + dt.timedelta(hours=2)).refresh()
            second = stored(api)
            assert second["tls.crt"] != first["tls.crt"]
            assert trusted(api) == {second["ca.crt"]}
            assert first["ca.crt"] in second["ca.crt"]
            await keeper(client, still_good + LIFETIME).refresh()
            third = stored(api)["ca.crt"]
            assert third.count("BEGIN CERTIFICATE") == 2  # of the last two: the list does not grow for ever
            assert first["ca.crt"] not in third

    asyncio.run(main())


@pytest.mark.parametrize(
    "damage",
    [
        {"tls.crt": "bm8gY2VydGlmaWNhdGU="},
        {"tls.crt": "!!!"},
        {"tls.key": None},
        {"ca.crt": None},
    ],
)
def test_a_damaged_secret_is_made_again(damage: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            await keeper(client).refresh()
            api.patch(SECRET, {"data": damage})
            await keeper(client).refresh()
            found = stored(api)
            assert x509.load_pem_x509_certificate(found["tls.crt"].encode())
            assert bundle(api)[0] in found["ca.crt"]

    asyncio.run(main())


def test_a_certificate_for_another_service_is_made_again() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            other = make_certificate("other", "system", BEGIN)
            data = {name: base64.b64encode(text.encode()).decode() for name, text in other.to_secret().items()}
            api.put(SECRET.rpartition("/")[0], {"metadata": {"name": OPTIONS.secret}, "data": data})
            await keeper(client).refresh()
            names = x509.load_pem_x509_certificate(stored(api)["tls.crt"].encode()).extensions
            hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
            assert f"{OPTIONS.service}.system.svc" in hosts

    asyncio.run(main())


def test_a_configuration_that_lost_its_authority_gets_it_back_and_one_that_is_missing_is_left_out() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            await keeper(client).refresh()
            install(api)  # applied again, as by `kubectl apply` of the chart's own manifest
            api.patch(
                f"{REGISTRATION}/mutatingwebhookconfigurations/{NAME}",
                {"webhooks": mutating_configuration("system", OPTIONS.service)["webhooks"]},
            )
            assert "" in trusted(api)
            await keeper(client).refresh()
            assert trusted(api) == {stored(api)["ca.crt"]}
            for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
                api.remove(f"{REGISTRATION}/{kind}/{NAME}")
            api.remove(SECRET)
            await keeper(client).refresh()
            assert not api.find(SECRET)["metadata"].get("ownerReferences")  # type: ignore[index]

    asyncio.run(main())


def test_a_secret_that_another_writes_all_the_time_is_reported() -> None:
    async def main() -> None:
        async with serving() as (api, client):
            install(api)
            api.fault = lambda method, path: 409 if method in ("POST", "PUT") and "secrets" in path else None
            with pytest.raises(ClusterConflict, match="changes all the time"):
                await keeper(client).refresh()
            api.fault = lambda method, path: 403 if method == "POST" and "secrets" in path else None
            with pytest.raises(ClusterFailed):
                await keeper(client).refresh()

    asyncio.run(main())


def test_the_options_of_the_server_are_read_from_its_pod(tmp_path: Path) -> None:
    given = parse_options(["--certificates", str(tmp_path), "--port", "1", "--catalogue", "x.csv"], {"POD_NAMESPACE": "mine"})
    assert (given.namespace, given.certificates, given.port, given.catalogue) == ("mine", tmp_path, 1, Path("x.csv"))
    assert parse_options([], {}).namespace == "aim-gpu-sharing"
