"""Who calls: API keys, kept as hashes and compared without telling by time how much of a guess was right."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aimgpu.domain import Priority
from aimgpu.errors import NotAuthenticated
from aimgpu.gateway.http.asgi import Head

_PREFIX = "aimgpu-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom a key stands for, and its class; the name is safe to print."""

    name: str
    models: frozenset[str] | None = None  # None: all
    priority: Priority | None = None  # at most this; None: as each model has it
    requests_per_second: float | None = None
    concurrency: int | None = None

    @property
    def unrestricted(self) -> bool:
        """May do what affects every caller, such as unloading a model."""
        return (self.models, self.priority, self.requests_per_second, self.concurrency) == (None, None, None, None)


ANYONE = Caller(name="anyone")


class Keys(Protocol):
    @property
    def required(self) -> bool:
        """False while there is no key at all: then whoever reaches the gateway may call."""

    def find(self, token: bytes) -> Caller | None: ...


class HashedKeys:
    """Keys by their SHA-256.

    Time does not tell how much of a guess was right: a dictionary compares what is in it only with something of the same hash,
    which for bytes depends on a secret that lives as long as this process, and a hit is compared in constant time once more.
    """

    required = True

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        """`callers`: hexadecimal digests from `hash_key`."""
        self._table = {bytes.fromhex(digest): (bytes.fromhex(digest), caller) for digest, caller in callers.items()}
        self._nobody = (bytes(32), None)

    def find(self, token: bytes) -> Caller | None:
        digest = hashlib.sha256(token).digest()
        known, caller = self._table.get(digest, self._nobody)
        return caller if hmac.compare_digest(known, digest) else None


def generate_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What may be kept on disk. No salt or stretching: keys are 256 random bits, not passwords."""
    return hashlib.sha256(key.encode()).hexdigest()


def identify(keys: Keys | None, head: Head) -> Caller:
    if keys is None or not keys.required:
        return ANYONE
    scheme, _, token = head.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        caller = keys.find(token.strip())
        if caller is not None:
            return caller
        raise NotAuthenticated("This API key is not known.")
    raise NotAuthenticated("An API key is needed.", hint="Send it as 'Authorization: Bearer <key>'.")
