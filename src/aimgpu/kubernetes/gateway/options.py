"""What the gateway of a cluster is started with."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGatewayOptions:
    namespace: str  # of its Service and Secret
    pod: str  # its own name, which has a place among the replicas
    namespaces: tuple[str, ...] = ()  # whose models it serves; empty: all
    service: str = "aim-gpu-sharing-gateway"
    secret: str = "aim-gpu-sharing-keys"  # noqa: S105 - the name of a Secret
    keys_required: bool = True
    host: str = "0.0.0.0"  # noqa: S104 - callers are on other machines
    port: int = 8080
    internal_port: int = 9401  # probes, metrics and scores, for the cluster alone
    drain_seconds: float = 5.0  # between losing readiness and refusing connections: until every node knows


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ClusterGatewayOptions:
    default = ClusterGatewayOptions(
        namespace=environment.get("POD_NAMESPACE") or "aim-gpu-sharing", pod=environment.get("POD_NAME") or socket.gethostname()
    )
    parser = argparse.ArgumentParser(prog="aimgpu-gateway", description="Serves the models of a cluster behind one endpoint.")
    parser.add_argument("--namespace", default=default.namespace, help="its own (default: $POD_NAMESPACE)")
    parser.add_argument("--pod", default=default.pod, help="its own name (default: $POD_NAME)")
    parser.add_argument("--watch-namespaces", default="", help="whose models it serves, by comma (default: all)")
    parser.add_argument("--service", default=default.service, help=f"its own Service (default: {default.service})")
    parser.add_argument("--secret", default=default.secret, help=f"Secret with the callers' keys (default: {default.secret})")
    parser.add_argument("--without-keys", action="store_true", help="let every caller in: something else guards the door")
    parser.add_argument("--host", default=default.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=default.port, help="for callers (default: 8080)")
    parser.add_argument("--internal-port", type=int, default=default.internal_port, help="probes and metrics (default: 9401)")
    parser.add_argument("--drain-seconds", type=float, default=default.drain_seconds, help="to serve on after SIGTERM")
    given = parser.parse_args(arguments)
    return ClusterGatewayOptions(
        namespace=given.namespace,
        pod=given.pod,
        namespaces=tuple(name.strip() for name in given.watch_namespaces.split(",") if name.strip()),
        service=given.service,
        secret=given.secret,
        keys_required=not given.without_keys,
        host=given.host,
        port=given.port,
        internal_port=given.internal_port,
        drain_seconds=given.drain_seconds,
    )
