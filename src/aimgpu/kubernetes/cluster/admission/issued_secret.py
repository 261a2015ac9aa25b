"""The Secret that cert-manager fills: without an owner it would outlive the chart, since cert-manager leaves it by default."""

import logging
from http import HTTPStatus

from aimgpu.errors import ClusterFailed
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import CERTIFICATES, SECRETS

log = logging.getLogger(__name__)

_CERTIFICATE_NAME = "cert-manager.io/certificate-name"  # an annotation that cert-manager writes


async def give_owner(client: Client, secret_name: str, namespace: str) -> bool:
    """Make the Certificate the Secret's owner, so that it goes with it; False: to be tried again."""
    try:
        secret = await client.find(SECRETS, secret_name, namespace)
        metadata = (secret or {}).get("metadata") or {}
        name = (metadata.get("annotations") or {}).get(_CERTIFICATE_NAME)
        certificate = await client.find(CERTIFICATES, name, namespace) if name else None
        if secret is None or certificate is None:
            return True
        owners = metadata.get("ownerReferences") or []
        uid = certificate["metadata"]["uid"]
        if all(owner["uid"] != uid for owner in owners):
            reference = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate", "name": name, "uid": uid}
            owned = {**secret, "metadata": {**metadata, "ownerReferences": [*owners, reference]}}
            await client.replace(SECRETS, owned, namespace)
    except ClusterFailed as error:  # served it is all the same
        log.warning("certificate.secret_not_owned", extra={"data": error.to_json()})
        return error.status == HTTPStatus.FORBIDDEN
    return True
