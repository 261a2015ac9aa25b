"""Keeps the serving certificate valid: in a Secret that replicas share, and in the webhook configurations."""

import asyncio
import base64
import datetime as dt
import logging
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aimgpu.errors import AimGpuError, ClusterConflict, ClusterFailed, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Resource
from aimgpu.kubernetes.api.resources import SECRETS
from aimgpu.kubernetes.cluster.admission.authority_bundle import END, extend_bundle
from aimgpu.kubernetes.cluster.admission.certificates import AUTHORITY, CERTIFICATE, KEY, ServingCertificate, make_certificate
from aimgpu.kubernetes.cluster.admission.issued_secret import give_owner
from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS

log = logging.getLogger(__name__)

_REGISTRATION = "admissionregistration.k8s.io"
CONFIGURATIONS = (
    Resource(group=_REGISTRATION, version="v1", plural="mutatingwebhookconfigurations"),
    Resource(group=_REGISTRATION, version="v1", plural="validatingwebhookconfigurations"),
)
_TRIES = 5
CHECK_SECONDS = 60.0  # a configuration that was applied again by hand has lost the authority that the API server trusts
_RETRY_SECONDS = 15.0
_FIRST_RETRY_SECONDS = 1.0


class CertificateKeeper:
    """`context` serves the newest certificate; connections that are open keep theirs."""

    def __init__(
        self,
        client: Client,
        options: AdmissionOptions,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        trust_seconds: float = 3.0,
    ) -> None:
        self._client = client
        self._options = options
        self._now = now
        self._trust_seconds = trust_seconds  # until every API server has seen a change of the configurations
        self._loaded: ServingCertificate | None = None
        self._serving: ssl.SSLContext | None = None
        self._owner_pending = False
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.sni_callback = self._choose

    async def refresh(self) -> None:
        """Load what is to be served; make or renew it where that is ours to do."""
        folder = self._options.certificates
        certificate = await self._agree() if folder is None else await asyncio.to_thread(_read_folder, folder)
        fresh = None if certificate == self._loaded else _make_context(certificate)
        published = [await self._publish(resource, certificate.authority) for resource in CONFIGURATIONS]
        if fresh is not None:
            if any(published) and self._serving is not None:  # the old certificate is still trusted, the new one not yet
                await asyncio.sleep(self._trust_seconds)
            self._serving, self._loaded = fresh, certificate
            self._owner_pending = folder is not None
            log.info("certificate.loaded", extra={"data": {"service": self._options.service}})
        if self._owner_pending:
            self._owner_pending = not await give_owner(self._client, self._options.secret, self._options.namespace)

    async def obtain(self) -> None:
        """The first one, however long it takes: an API server that has just started refuses every account for seconds."""
        while True:
            try:
                return await self.refresh()
            except ClusterFailed as error:
                log.warning("certificate.not_obtained", extra={"data": error.to_json()})
            except OSError as error:  # as in `keep`; files of our own are an error for good
                if self._options.certificates is None:
                    raise
                log.warning("certificate.not_obtained", extra={"data": {"reason": str(error)}})
            await asyncio.sleep(_FIRST_RETRY_SECONDS)

    async def keep(self) -> None:
        """Refresh for ever; a failure is logged and tried again soon, since the old certificate is still good for long."""
        while True:
            try:
                await asyncio.sleep(CHECK_SECONDS if self._options.certificates is None else _RETRY_SECONDS)
                await self.refresh()
            except AimGpuError as error:
                log.warning("certificate.not_refreshed", extra={"data": error.to_json()})
                await asyncio.sleep(_RETRY_SECONDS)
            except OSError as error:  # files that another program was about to replace: a key that does not fit, or none
                log.warning("certificate.not_refreshed", extra={"data": {"reason": str(error)}})
                await asyncio.sleep(_RETRY_SECONDS)

    async def _agree(self) -> ServingCertificate:
        """The certificate of the Secret; of replicas that renew at once, the first one's counts for all."""
        options = self._options
        for _ in range(_TRIES):
            secret = await self._client.find(SECRETS, options.secret, options.namespace)
            found = _read_secret(secret)
            if found is not None and found.is_fresh(options.service, options.namespace, self._now()):
                return found
            fresh = make_certificate(options.service, options.namespace, self._now())
            if found is not None:  # replicas that still serve the old one are trusted meanwhile
                fresh = replace(fresh, authority=fresh.authority + found.authority.split(END, 1)[0] + END)
            try:
                await self._store(secret, fresh)
            except (ClusterConflict, NotFoundInCluster):
                continue
            log.info("certificate.made", extra={"data": {"service": options.service, "secret": options.secret}})
            return fresh
        raise ClusterConflict(f"the Secret {options.secret} changes all the time", hint="Does another controller write it?")

    async def _store(self, secret: dict[str, Any] | None, certificate: ServingCertificate) -> None:
        options = self._options
        data = {name: base64.b64encode(text.encode()).decode() for name, text in certificate.to_secret().items()}
        if secret is None:
            metadata: dict[str, Any] = {"name": options.secret, "labels": {"app.kubernetes.io/part-of": WEBHOOKS}}
            metadata["ownerReferences"] = await self._owners()
            body = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
            await self._client.create(SECRETS, body, options.namespace)
        else:  # with its resourceVersion, so that a second writer is refused
            await self._client.replace(SECRETS, {**secret, "data": data}, options.namespace)

    async def _owners(self) -> list[dict[str, Any]]:
        """The configuration that needs the certificate: the Secret goes with it when the chart is uninstalled."""
        found = await self._client.find(CONFIGURATIONS[0], WEBHOOKS)
        if found is None:
            return []
        reference = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "name": WEBHOOKS}
        return [{**reference, "uid": found["metadata"]["uid"]}]

    async def _publish(self, resource: Resource, authority: str) -> bool:
        """Into every webhook of our configuration, beside what other replicas may still serve; whether that changed it."""
        found = await self._client.find(resource, WEBHOOKS)
        if found is None or not authority:  # not installed; or an issuer that gives none: whoever installed it wrote it
            return False
        patch = []
        for index, webhook in enumerate(found.get("webhooks") or []):
            present = base64.b64decode(webhook["clientConfig"].get("caBundle") or "").decode(errors="replace")
            wanted = extend_bundle(present, authority, self._now())
            if wanted != present:
                value = base64.b64encode(wanted.encode()).decode()
                patch.append({"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": value})
        if patch:
            await self._client.patch(resource, WEBHOOKS, patch, kind="json")
        return bool(patch)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        """For each handshake: one context that loads every certificate goes on serving an ECDSA one beside a new RSA one."""
        if self._serving is not None:
            connection.context = self._serving


def _make_context(certificate: ServingCertificate) -> ssl.SSLContext:
    """Raises ssl.SSLError where the key does not fit."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:  # the ssl module reads files only
        paths = Path(folder) / CERTIFICATE, Path(folder) / KEY
        for path, text in zip(paths, (certificate.certificate, certificate.key), strict=True):
            path.touch(mode=0o600)
            path.write_text(text)
        context.load_cert_chain(*paths)
    return context


def _read_folder(folder: Path) -> ServingCertificate:
    """All files of one version: the kubelet replaces those of a Secret by turning the link `..data` to another folder."""
    version = (folder / "..data").resolve() if (folder / "..data").exists() else folder
    authority = version / AUTHORITY
    return ServingCertificate(
        authority=authority.read_text(errors="replace") if authority.exists() else "",
        certificate=(version / CERTIFICATE).read_text(errors="replace"),
        key=(version / KEY).read_text(errors="replace"),
    )


def _read_secret(secret: dict[str, Any] | None) -> ServingCertificate | None:
    data = (secret or {}).get("data") or {}
    try:
        texts = [base64.b64decode(data[name]).decode() for name in (AUTHORITY, CERTIFICATE, KEY)]
    except (KeyError, ValueError):
        return None
    return ServingCertificate(authority=texts[0], certificate=texts[1], key=texts[2])
