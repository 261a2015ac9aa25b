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

import yaml

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.exec_credential import Credential, ExecPlugin, read_plugin

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
    """`kubeconfig`, else `$KUBECONFIG` if it is set, else the pod's service account, else `~/.kube/config`."""
    given = str(kubeconfig or environment.get("KUBECONFIG") or "")
    if given:
        return read_kubeconfig(Path(given.split(os.pathsep, maxsplit=1)[0]), context)
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
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = [str(entry["name"]) for entry in config["contexts"]]
        if context and context not in known:
            raise ClusterFailed(f"{path} has no context {context!r}", hint=f"Contexts: {', '.join(known) or 'none'}.")
        chosen = _named(config, "contexts", context or config["current-context"])["context"]
        cluster = _named(config, "clusters", chosen["cluster"])["cluster"]
        user = _named(config, "users", chosen["user"])["user"]
    except OSError as error:
        raise ClusterFailed(f"cannot read {path}: {error.strerror}", hint="Set KUBECONFIG to a kubeconfig file.") from error
    except (KeyError, TypeError, StopIteration, yaml.YAMLError) as error:
        raise ClusterFailed(f"{path} is not a kubeconfig file with a current context") from error
    if "auth-provider" in user:
        raise ClusterFailed(
            f"{path} names an auth-provider, which Kubernetes has removed",
            hint="Use the provider's exec plugin, a client certificate, or a token such as one of `kubectl create token`.",
        )
    token_file = user.get("tokenFile")
    trusted = _context(cluster, user, path.parent)
    return Access(
        server=cluster["server"].rstrip("/"),
        context=trusted,
        login=_login(user["exec"], cluster, path, trusted) if user.get("exec") else None,
        namespace=chosen.get("namespace"),
        token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
    )


def _named(config: Mapping[str, Any], kind: str, name: str) -> Any:  # noqa: ANN401 - YAML
    return next(entry for entry in config[kind] if entry["name"] == name)


def _login(entry: Mapping[str, Any], cluster: Mapping[str, Any], path: Path, context: ssl.SSLContext) -> Login:
    try:
        return Login(read_plugin(entry, cluster, path.parent), context)
    except (KeyError, TypeError, AttributeError) as error:
        raise ClusterFailed(f"{path} has an `exec` entry without apiVersion or command") from error


def _context(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", folder)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate", folder), _content(user, "client-key", folder)
    if certificate and key:
        _load_certificate(context, certificate, key)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """The ssl module reads certificates from files only."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)


def _content(entry: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    if entry.get(f"{name}-data"):
        return base64.b64decode(entry[f"{name}-data"])
    return (folder / entry[name]).read_bytes() if entry.get(name) else None
