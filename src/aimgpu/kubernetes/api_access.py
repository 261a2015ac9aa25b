"""Where the API server is, and who we are to it: a kubeconfig file, or a pod's service account."""

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aimgpu.errors import ClusterFailed

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    server: str
    context: ssl.SSLContext = field(repr=False)
    namespace: str | None = None  # of the kubeconfig's context
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None  # read for each request: the kubelet renews it

    def headers(self) -> Mapping[str, str]:
        token = self.token_file.read_text(encoding="ascii").strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}


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
    """A context of a kubeconfig file, the current one unless it is named. Commands that print credentials are not run."""
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
    if "exec" in user or "auth-provider" in user:
        raise ClusterFailed(
            f"{path} runs a program for its credentials, which is not supported",
            hint="Use a client certificate or a token, such as one of `kubectl create token`.",
        )
    token_file = user.get("tokenFile")
    return Access(
        server=cluster["server"].rstrip("/"),
        context=_context(cluster, user, path.parent),
        namespace=chosen.get("namespace"),
        token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
    )


def _named(config: Mapping[str, Any], kind: str, name: str) -> Any:  # noqa: ANN401 - YAML
    return next(entry for entry in config[kind] if entry["name"] == name)


def _context(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", folder)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate", folder), _content(user, "client-key", folder)
    if certificate and key:
        # The ssl module reads certificates from files only.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _content(entry: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    if entry.get(f"{name}-data"):
        return base64.b64decode(entry[f"{name}-data"])
    return (folder / entry[name]).read_bytes() if entry.get(name) else None
