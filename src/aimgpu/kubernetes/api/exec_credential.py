"""Credentials that a kubeconfig gets from a program (client.authentication.k8s.io), as cloud providers' logins do."""

import base64
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aimgpu.errors import ClusterFailed

_GROUP = "client.authentication.k8s.io"
_VERSIONS = (f"{_GROUP}/v1", f"{_GROUP}/v1beta1")
_LOGIN_SECONDS = 600.0  # a person may have to log in
_EARLY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """What the program printed; `expires`: as its clock has it, None: never."""

    token: str | None = field(default=None, repr=False)
    certificate: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    expires: dt.datetime | None = None

    def valid(self, now: dt.datetime) -> bool:
        return self.expires is None or now + dt.timedelta(seconds=_EARLY_SECONDS) < self.expires


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPlugin:
    """The `exec` entry of a kubeconfig's user."""

    command: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    version: str
    interactive_mode: str
    hint: str | None
    cluster: Mapping[str, Any] | None  # handed to the program where it wants to know

    def run(self) -> Credential:
        """Raises ClusterFailed with what the program said."""
        program = shutil.which(self.command)
        if program is None:
            raise ClusterFailed(
                f"the kubeconfig gets its credentials from {self.command}, which is not installed", hint=self.hint
            )
        interactive = self.interactive_mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if self.interactive_mode == "Always" and not interactive:
            raise ClusterFailed(f"{self.command} has to ask a person for credentials, and there is no terminal")
        request = json.dumps(self._request(interactive=interactive))
        try:
            done = subprocess.run(  # noqa: S603 - the user's kubeconfig names it, as for kubectl
                [program, *self.arguments],
                env={**os.environ, **self.variables, "KUBERNETES_EXEC_INFO": request},
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if interactive else subprocess.PIPE,
                text=True,
                check=False,
                timeout=_LOGIN_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterFailed(f"cannot run {self.command} for credentials: {error}", hint=self.hint) from error
        if done.returncode != 0:
            said = (done.stderr or "").strip()[-500:]
            raise ClusterFailed(
                f"{self.command} gave no credentials (status {done.returncode})" + (f": {said}" if said else "")
            )
        return self._read(done.stdout)

    def _request(self, *, interactive: bool) -> dict[str, Any]:
        spec: dict[str, Any] = {"interactive": interactive} | ({"cluster": self.cluster} if self.cluster else {})
        return {"apiVersion": self.version, "kind": "ExecCredential", "spec": spec}

    def _read(self, printed: str) -> Credential:
        try:
            found = json.loads(printed)
            status = found["status"]
            expires = status.get("expirationTimestamp")
            credential = Credential(
                token=status.get("token"),
                certificate=status.get("clientCertificateData"),
                key=status.get("clientKeyData"),
                expires=dt.datetime.fromisoformat(expires) if expires else None,
            )
            same_version = found["apiVersion"] == self.version
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterFailed(f"{self.command} printed no ExecCredential with a status") from error
        if not same_version:
            raise ClusterFailed(f"{self.command} printed an ExecCredential of another version than {self.version}")
        if credential.token is None and not (credential.certificate and credential.key):
            raise ClusterFailed(f"{self.command} printed neither a token nor a certificate with its key")
        return credential


def read_plugin(entry: Mapping[str, Any], cluster: Mapping[str, Any], folder: Path) -> ExecPlugin:
    """From a kubeconfig in `folder`. Raises KeyError or TypeError where it has no such shape."""
    version, command = str(entry["apiVersion"]), str(entry["command"])
    if version not in _VERSIONS:
        raise ClusterFailed(f"{command} speaks {version}; known are {' and '.join(_VERSIONS)}", hint=entry.get("installHint"))
    if "/" in command and not command.startswith("/"):
        command = str(folder / command)
    return ExecPlugin(
        command=command,
        arguments=tuple(map(str, entry.get("args") or ())),
        variables={str(one["name"]): str(one["value"]) for one in entry.get("env") or ()},
        version=version,
        interactive_mode=str(entry.get("interactiveMode") or "IfAvailable"),
        hint=entry.get("installHint"),
        cluster=_cluster_info(cluster, folder) if entry.get("provideClusterInfo") else None,
    )


def _cluster_info(cluster: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As the program is to get it: the authority as data, and the configuration that is meant for it."""
    names = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    found = {name: cluster[name] for name in names if cluster.get(name)}
    if cluster.get("certificate-authority"):
        content = (folder / cluster["certificate-authority"]).read_bytes()
        found["certificate-authority-data"] = base64.b64encode(content).decode()
    for one in cluster.get("extensions") or ():
        if one.get("name") == f"{_GROUP}/exec":
            found["config"] = one.get("extension")
    return found
