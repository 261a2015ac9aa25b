"""What the admission server is started with."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions:
    namespace: str
    service: str = "aim-gpu-sharing-admission"
    secret: str = "aim-gpu-sharing-admission"  # noqa: S105 - the name of a Secret
    certificates: Path | None = None  # files of cert-manager or of others; None: made here and kept in the Secret
    host: str = "0.0.0.0"  # noqa: S104 - the API server calls from another machine
    port: int = 9443
    catalogue: Path | None = None  # CSV rows of models that are not built in


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> AdmissionOptions:
    default = AdmissionOptions(namespace=environment.get("POD_NAMESPACE") or "aim-gpu-sharing")
    parser = argparse.ArgumentParser(prog="aimgpu-admission", description="Turns GPU annotations of pods into claims.")
    parser.add_argument("--namespace", default=default.namespace, help="of the Service and Secret (default: $POD_NAMESPACE)")
    parser.add_argument("--service", default=default.service, help=f"name of the Service (default: {default.service})")
    parser.add_argument("--secret", default=default.secret, help=f"name of the Secret (default: {default.secret})")
    parser.add_argument(
        "--certificates", type=Path, metavar="FOLDER", help="tls.crt and tls.key kept by another program, such as cert-manager"
    )
    parser.add_argument("--host", default=default.host, help="address to listen on")
    parser.add_argument("--port", type=int, default=default.port, help="port to listen on (default: 9443)")
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="CSV rows of your own models, as `aimgpu catalogue import`"
    )
    given = parser.parse_args(arguments)
    return AdmissionOptions(
        namespace=given.namespace,
        service=given.service,
        secret=given.secret,
        certificates=given.certificates,
        host=given.host,
        port=given.port,
        catalogue=given.catalogue,
    )
