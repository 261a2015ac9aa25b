"""What the gateway of a cluster is started with."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGatewayOptions:
    namespace: str  # of its Service and Secret
    pod: str  # its own name, which has a place among the replicas
    namespaces: tuple[str, ...] = ()  # whose models it serves; empty: all
    short_names: tuple[str, ...] = ("*",)  # namespaces whose models callers find without naming theirs
    service: str = "aim-gpu-sharing-gateway"
    secret: str = "aim-gpu-sharing-keys"  # noqa: S105 - the name of a Secret
    keys_required: bool = True
    host: str = "0.0.0.0"  # noqa: S104 - callers are on other machines
    port: int = 8080
    tls_port: int = 8443
    tls_cert: Path | None = None  # without it no TLS
    tls_key: Path | None = None  # in the file of the certificate where None
    internal_port: int = 9401  # metrics and scores, for the cluster alone
    probe_port: int = 9402  # answered by a thread of its own
    drain_seconds: float = 5.0  # between losing readiness and refusing connections: until every node knows


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ClusterGatewayOptions:
    default = ClusterGatewayOptions(
        namespace=environment.get("POD_NAMESPACE") or "aim-gpu-sharing", pod=environment.get("POD_NAME") or socket.gethostname()
    )
    parser = argparse.ArgumentParser(prog="aimgpu-gateway", description="Serves the models of a cluster behind one endpoint.")
    parser.add_argument("--namespace", default=default.namespace, help="its own (default: $POD_NAMESPACE)")
    parser.add_argument("--pod", default=default.pod, help="its own name (default: $POD_NAME)")
    parser.add_argument("--watch-namespaces", default="", help="whose models it serves, by comma (default: all)")
    parser.add_argument(
        "--short-names",
        default="",
        help="namespaces whose models callers may name without it, by comma, the first wins; "
        "*: all others too, where only one has the name (default: its own namespace)",
    )
    parser.add_argument("--service", default=default.service, help=f"its own Service (default: {default.service})")
    parser.add_argument("--secret", default=default.secret, help=f"Secret with the callers' keys (default: {default.secret})")
    parser.add_argument("--without-keys", action="store_true", help="let every caller in: something else guards the door")
    parser.add_argument("--host", default=default.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=default.port, help="for callers (default: 8080)")
    parser.add_argument("--tls-cert", type=Path, help="serve TLS too, with this certificate; read again when it changes")
    parser.add_argument("--tls-key", type=Path, help="its key (default: in the same file)")
    parser.add_argument("--tls-port", type=int, default=default.tls_port, help="for callers with TLS (default: 8443)")
    parser.add_argument("--internal-port", type=int, default=default.internal_port, help="metrics and scores (default: 9401)")
    parser.add_argument("--probe-port", type=int, default=default.probe_port, help="liveness and readiness (default: 9402)")
    parser.add_argument("--drain-seconds", type=float, default=default.drain_seconds, help="to serve on after SIGTERM")
    given = parser.parse_args(arguments)
    return ClusterGatewayOptions(
        namespace=given.namespace,
        pod=given.pod,
        namespaces=_split(given.watch_namespaces),
        short_names=_split(given.short_names) or (given.namespace,),
        service=given.service,
        secret=given.secret,
        keys_required=not given.without_keys,
        host=given.host,
        port=given.port,
        tls_port=given.tls_port,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        internal_port=given.internal_port,
        probe_port=given.probe_port,
        drain_seconds=given.drain_seconds,
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
