"""The keys that engines of one namespace ask for: one per model, in a Secret whose name is the same in every namespace.

By that name alone the gateway may read it, and no other Secret there. A pod elsewhere that reaches an engine has no key, and
what a namespace lists as its own engine gets that namespace's key, whatever its address is.
"""

import base64
import binascii
import re
import secrets
from collections.abc import Iterable

from aimgpu.errors import ClusterConflict
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import SECRETS
from aimgpu.kubernetes.vocabulary.model_labels import MANAGED

ENGINE_KEYS = "aim-gpu-engine-keys"
_KEY = re.compile(r"[!-~]{1,512}", re.ASCII)  # it goes into a header as it is


async def ensure_engine_keys(client: Client, namespace: str, models: Iterable[str]) -> None:
    """Make what is missing. `models`: values of their label. A key that exists stays, so that pods need no restart."""
    wanted = set(models)
    found = await client.find(SECRETS, ENGINE_KEYS, namespace)
    missing = wanted - read_engine_keys(found or {}).keys()
    if not missing:
        return
    data = {model: base64.b64encode(secrets.token_hex(32).encode()).decode() for model in sorted(missing)}
    if found is None:
        metadata = {"name": ENGINE_KEYS, "labels": MANAGED}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        try:
            await client.create(SECRETS, body, namespace)
        except ClusterConflict:  # another has made it meanwhile
            await ensure_engine_keys(client, namespace, wanted)
        return
    await client.patch(SECRETS, ENGINE_KEYS, {"data": data}, namespace)


def read_engine_keys(secret: Object) -> dict[str, str]:
    """By model. The namespace may write what it likes: what is not a key is left out."""
    found = {}
    for model, value in (secret.get("data") or {}).items():
        try:
            key = base64.b64decode(str(value), validate=True).decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            continue
        if _KEY.fullmatch(key):
            found[str(model)] = key
    return found
