"""Who calls: API keys, kept as hashes and compared without telling by time how much of a guess was right."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.errors import NotAuthenticated
from aimgpu.gateway.asgi import Header

_PREFIX = "aimgpu-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom a key stands for, and its class; the name is safe to print."""

    name: str
    models: frozenset[str] | None = None  # None: all
    priority: Priority | None = None  # at most this; None: as each model has it
    requests_per_second: float | None = None
    concurrency: int | None = None


ANYONE = Caller(name="anyone")


class Keys(Protocol):
    def find(self, token: bytes) -> Caller | None: ...


class HashedKeys:
    """Keys by their SHA-256.

    A look-up by the digest itself could leak by time how many of its first bytes are right, so the table is keyed by the
    digest under a secret that lives as long as this process, and the hit is compared in constant time once more.
    """

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        """`callers`: hexadecimal digests from `hash_key`."""
        self._secret = secrets.token_bytes(32)
        self._table = {
            self._blind(bytes.fromhex(digest)): (bytes.fromhex(digest), caller) for digest, caller in callers.items()
        }
        self._nobody = (bytes(32), None)

    def find(self, token: bytes) -> Caller | None:
        digest = hashlib.sha256(token).digest()
        known, caller = self._table.get(self._blind(digest), self._nobody)
        return caller if hmac.compare_digest(known, digest) else None

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def generate_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What may be kept on disk. No salt or stretching: keys are 256 random bits, not passwords."""
    return hashlib.sha256(key.encode()).hexdigest()


def identify(keys: Keys | None, headers: list[Header]) -> Caller:
    if keys is None:
        return ANYONE
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                caller = keys.find(token.strip())
                if caller is not None:
                    return caller
                raise NotAuthenticated("This API key is not known.")
    raise NotAuthenticated("An API key is needed.", hint="Send it as 'Authorization: Bearer <key>'.")
