"""Who calls: API keys, kept as hashes and compared in constant time."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import time

from aimgpu.domain import Priority
from aimgpu.errors import NotAuthenticated
from aimgpu.gateway.http.asgi import Head
from aimgpu.keyfile import StoredKey, bearer_token

_HOW = "Send it as 'Authorization: Bearer <key>'."


@dataclass(slots=True, kw_only=True)
class Caller:
    """The holder of a key, and its class; the name is safe to print."""

    name: str
    models: frozenset[str] | None = None  # None: all
    priority: Priority | None = None  # at most this; None: as each model has it
    requests_per_second: float | None = None
    concurrency: int | None = None
    answer_bytes: int | None = None  # of an answer in one piece; None: the usual bound
    cache_group: str | None = None  # keys of one group share what engines keep of prompts
    expires: float | None = None  # seconds since the epoch
    used: float = field(default=0.0, compare=False)  # when it was sent last, seconds since the epoch

    @property
    def cache(self) -> str:
        """Whose prompts engines may take its own for; no name of a key is one of a group."""
        return f"key {self.name}" if self.cache_group is None else f"group {self.cache_group}"

    @property
    def unrestricted(self) -> bool:
        """May do what affects every caller, such as unloading a model."""
        return (self.models, self.priority, self.requests_per_second, self.concurrency) == (None, None, None, None)

    def may_use(self, model: str) -> bool:
        """Whether the key covers this model."""
        return self.models is None or model in self.models


ANYONE = Caller(name="anyone")


def caller_of(key: StoredKey) -> Caller:
    """The holder of a stored key. Raises ValueError for a priority that is none."""
    return Caller(
        name=key.name,
        models=frozenset(key.models) if key.models is not None else None,
        priority=Priority(key.priority) if key.priority is not None else None,
        requests_per_second=key.requests_per_second,
        concurrency=key.concurrency,
        answer_bytes=key.answer_bytes,
        cache_group=key.cache_group,
        expires=key.expires,
    )


class KeyTable:
    """The API keys as requests see them, by SHA-256. Replaced as a whole, from any thread, when the key file changes.

    Response times do not reveal how much of a guess was right: a dictionary compares an entry only with something of the same
    hash, which for bytes depends on a secret of this process, and a hit is compared again in constant time.
    """

    def __init__(self, callers: Mapping[str, Caller] | None = None, *, required: bool = True) -> None:
        """`callers` by hexadecimal digest (`keyfile.hash_key`). `required` False: requests need no key."""
        self.required = required
        self.cache_groups = 0
        self._callers: dict[bytes, Caller] = {}
        self.replace(callers or {}, required=required)

    def __len__(self) -> int:
        return len(self._callers)

    def replace(self, callers: Mapping[str, Caller], *, required: bool) -> None:
        """From now on these. Raises ValueError for a digest that is not hexadecimal."""
        before = {caller.name: caller.used for caller in self._callers.values()}
        for caller in callers.values():
            caller.used = max(caller.used, before.get(caller.name, 0.0))
        self._callers = {bytes.fromhex(digest): caller for digest, caller in callers.items()}
        self.cache_groups = len({caller.cache for caller in callers.values()})
        self.required = required

    def last_used(self) -> Mapping[str, float]:
        """By name, of keys that were sent since this process started; seconds since the epoch."""
        return {caller.name: caller.used for caller in self._callers.values() if caller.used}

    def find(self, token: bytes) -> Caller | None:
        """The holder of this key, which is used now; None where it is not known, or has expired."""
        caller = self._callers.get(hashlib.sha256(token).digest())  # how long that takes reveals nothing of a key
        now = time()
        if caller is None or (caller.expires is not None and now >= caller.expires):
            return None
        caller.used = now
        return caller

    def knows(self, token: bytes) -> bool:
        """Expired keys too."""
        return hashlib.sha256(token).digest() in self._callers


def identify(keys: KeyTable | None, head: Head) -> Caller:
    """The caller of a request with this head. Raises NotAuthenticated.

    `x-api-key` is accepted beside the bearer token: Anthropic's clients send that.
    """
    if keys is None or not keys.required:
        return ANYONE
    token = bearer_token(head.get(b"authorization", b"")) or head.get(b"x-api-key", b"").strip()
    if token:
        caller = keys.find(token)
        if caller is not None:
            return caller
        if keys.knows(token):
            raise NotAuthenticated("This API key has expired.", hint="Ask for another: `aimgpu keys add`.")
        raise NotAuthenticated("This API key is not known.")
    if not len(keys):
        hint = "Make one with `aimgpu keys add NAME` on the machine that serves the models."
        raise NotAuthenticated("An API key is needed, and none exists yet.", hint=hint)
    raise NotAuthenticated("An API key is needed.", hint=_HOW)
