"""Where the API server is, and who we are to it: a kubeconfig file, or a pod's service account."""

import asyncio
import base64
import datetime as dt
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.exec_credential import Credential, ExecPlugin, read_plugin
from aimgpu.kubernetes.api.kubeconfig import Kubeconfig, KubeconfigEntry, read_merged

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    server: str
    context: ssl.SSLContext = field(repr=False)
    namespace: str | None = None  # of the kubeconfig's context
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None  # read for each request: the kubelet renews it
    login: "Login | None" = None

    def headers(self) -> Mapping[str, str]:
        if self.login is not None:
            token = self.login.token
        else:
            token = self.token_file.read_text(encoding="ascii").strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}


class Login:
    """Credentials of a program that the kubeconfig names: it runs before the first request, and again when they expire."""

    def __init__(self, plugin: ExecPlugin, context: ssl.SSLContext) -> None:
        self._plugin = plugin
        self._context = context
        self._credential: Credential | None = None
        self._running = asyncio.Lock()

    @property
    def token(self) -> str | None:
        return self._credential.token if self._credential else None

    async def refresh(self, *, refused: str | None = None) -> None:
        """`refused`: a token that the API server did not take, whatever its expiry says."""
        async with self._running:
            known = self._credential
            if known is not None and known.valid(dt.datetime.now(dt.UTC)) and (refused is None or known.token != refused):
                return
            self._credential = found = await asyncio.to_thread(self._plugin.run)
            if found.certificate and found.key:
                _load_certificate(self._context, found.certificate.encode(), found.key.encode())


def read_access(
    environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT, *, kubeconfig: Path | None = None, context: str = ""
) -> Access:
    """`kubeconfig`, else the files of `$KUBECONFIG` merged, else the pod's service account, else `~/.kube/config`."""
    if kubeconfig is not None:
        return read_kubeconfig(kubeconfig, context)
    if files := [Path(name) for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]:
        return _access(read_merged(files), context)
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if host and (account / "token").exists():
        port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS") or environment.get("KUBERNETES_SERVICE_PORT") or "443"
        address = f"[{host}]" if ":" in host else host
        trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        return Access(server=f"https://{address}:{port}", context=trusted, token_file=account / "token")
    default = Path.home() / ".kube" / "config"
    if default.exists():
        return read_kubeconfig(default, context)
    raise ClusterFailed(
        "no Kubernetes cluster is configured",
        hint="Set KUBECONFIG to a kubeconfig file, or run in a pod with a service account.",
    )


def read_kubeconfig(path: Path, context: str = "") -> Access:
    """A context of a kubeconfig file, the current one unless it is named."""
    return _access(read_merged([path]), context)


def _access(config: Kubeconfig, context: str) -> Access:
    chosen = config.select(context)
    cluster, user, path = chosen.cluster.value, chosen.user.value, chosen.user.file
    if "auth-provider" in user:
        raise ClusterFailed(
            f"{path} names an auth-provider, which Kubernetes has removed",
            hint="Use the provider's exec plugin, a client certificate, or a token such as one of `kubectl create token`.",
        )
    if not cluster.get("server"):
        raise ClusterFailed(f"{chosen.cluster.file} has a cluster without a server")
    token_file = user.get("tokenFile")
    trusted = _context(chosen.cluster, chosen.user)
    return Access(
        server=str(cluster["server"]).rstrip("/"),
        context=trusted,
        login=_login(user["exec"], cluster, path, trusted) if user.get("exec") else None,
        namespace=chosen.namespace,
        token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
    )


def _login(entry: Mapping[str, Any], cluster: Mapping[str, Any], path: Path, context: ssl.SSLContext) -> Login:
    try:
        return Login(read_plugin(entry, cluster, path.parent), context)
    except (KeyError, TypeError, AttributeError) as error:
        raise ClusterFailed(f"{path} has an `exec` entry without apiVersion or command") from error


def _context(cluster: KubeconfigEntry, user: KubeconfigEntry) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.value.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate"), _content(user, "client-key")
    if certificate and key:
        _load_certificate(context, certificate, key)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The ssl module reads certificates from files only."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)


def _content(entry: KubeconfigEntry, name: str) -> bytes | None:
    if data := entry.value.get(f"{name}-data"):
        return base64.b64decode(data)
    path = entry.value.get(name)
    if not path:
        return None
    try:
        return Path(entry.file.parent, str(path)).read_bytes()
    except OSError as error:
        raise ClusterFailed(f"cannot read {path}, which {entry.file} names as {name}: {error.strerror}") from error
