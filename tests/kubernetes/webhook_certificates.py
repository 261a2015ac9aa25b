"""The webhook configurations as the chart installs them, and what they make the API server trust."""

import base64
import datetime as dt

from tests.kubernetes.api_server import ApiServer

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.cluster.admission.certificate_keeper import CertificateKeeper
from aimgpu.kubernetes.cluster.admission.options import AdmissionOptions
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.kubernetes.vocabulary.names import WEBHOOKS as NAME

OPTIONS = AdmissionOptions(namespace="system")
SECRET = f"/api/v1/namespaces/system/secrets/{OPTIONS.secret}"
REGISTRATION = "/apis/admissionregistration.k8s.io/v1"
BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
END = "-----END CERTIFICATE-----\n"


def install(api: ApiServer) -> None:
    """Without an authority."""
    api.put(f"{REGISTRATION}/mutatingwebhookconfigurations", mutating_configuration("system", OPTIONS.service))
    api.put(f"{REGISTRATION}/validatingwebhookconfigurations", validating_configuration("system", OPTIONS.service))


def trusted(api: ApiServer) -> set[str]:
    """Authorities that the API server is told to trust, of every webhook."""
    found = set()
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        configuration = api.find(f"{REGISTRATION}/{kind}/{NAME}")
        assert configuration is not None
        for webhook in configuration["webhooks"]:
            found.add(base64.b64decode(webhook["clientConfig"].get("caBundle") or "").decode())
    return found


def bundle(api: ApiServer) -> list[str]:
    """The authorities, newest first, which all webhooks have alike."""
    (found,) = trusted(api)
    return [part + END for part in found.split(END)[:-1]]


def keeper(
    client: Client, now: dt.datetime = BEGIN, options: AdmissionOptions = OPTIONS, trust_seconds: float = 0.0
) -> CertificateKeeper:
    return CertificateKeeper(client, options, lambda: now, trust_seconds)
