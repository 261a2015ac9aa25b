"""API keys: how they are made, hashed, sent and kept on disk. Only hashes are stored."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps, loads
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from aimgpu.errors import Conflict, InvalidInput, NotFound
from aimgpu.files import locked, write_private

_PREFIX = "aimgpu-"
_SHORTEST = 32  # characters of a key that the user chose: it is hashed without salt, so it must not be guessable
_DAMAGED = "Move it away and add the keys again with `aimgpu keys add`."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PRIORITIES = (None, "high", "medium", "low")


def generate_key() -> str:
    """A new key: 256 random bits behind a prefix that secret scanners can recognise."""
    return _PREFIX + token_urlsafe(32)


def hash_key(key: str) -> str:
    """What may be kept on disk. No salt or stretching: keys are 256 random bits, not passwords."""
    return sha256(key.encode()).hexdigest()


def bearer_token(authorization: bytes) -> bytes | None:
    """The token of an `Authorization: Bearer` header; None for an empty header or another scheme."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """One row of the key file."""

    name: str
    sha256: str  # hexadecimal
    created: int  # seconds since the epoch
    models: tuple[str, ...] | None = None  # None: all
    priority: str | None = None  # at most this; None: as each model has it
    requests_per_second: float | None = None
    concurrency: int | None = None
    expires: int | None = None  # seconds since the epoch; None: never
    answer_bytes: int | None = None  # of an answer in one piece; None: 16 MiB
    cache_group: str | None = None  # keys of one group share what engines keep of prompts; None: no other key


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyClass:
    """What the holder of a key may do; None: no limit."""

    models: tuple[str, ...] | None = None
    priority: str | None = None
    requests_per_second: float | None = None
    concurrency: int | None = None
    expires: int | None = None
    answer_bytes: int | None = None
    cache_group: str | None = None


class KeyStore:
    """The key file. Changes are serialised between processes by a lock file, so parallel `keys add` lose nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[StoredKey, ...]:
        """All keys; an absent file holds none. Raises InvalidInput where the file is damaged."""
        try:
            return parse_keys(self._path.read_text(), str(self._path))
        except FileNotFoundError:
            return ()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self._path} is damaged", hint=_DAMAGED) from error

    def add(self, name: str, key_class: KeyClass | None = None) -> str:
        """Make a key and return it; only its hash is kept."""
        if not _NAME.fullmatch(name):
            near = re.sub(r"[^A-Za-z0-9._@-]+", "-", name).strip("-")
            meant = f"Did you mean {near!r}? " if _NAME.fullmatch(near) else ""
            raise InvalidInput(f"{name!r} cannot be a key's name", hint=f"{meant}Use letters, digits, '.', '_', '@' and '-'.")
        key = generate_key()
        with locked(self._path):
            if any(stored.name == name for stored in self.read()):
                raise Conflict(
                    f"there is a key named {name!r} already", hint=f"`aimgpu keys remove {name}` first, or another name."
                )
            self._store(name, key, key_class or KeyClass())
        return key

    def put(self, name: str, key: str) -> None:
        """Keep a key that the user chose, in place of the one with this name."""
        if len(key) < _SHORTEST:
            raise InvalidInput(
                f"an API key needs at least {_SHORTEST} characters", hint="`aimgpu keys add NAME` makes a good one."
            )
        with locked(self._path):
            self._store(name, key, KeyClass())

    def remove(self, name: str) -> None:
        """Raises NotFound where there is no key of this name."""
        with locked(self._path):
            keys = self.read()
            if not any(key.name == name for key in keys):
                names = ", ".join(key.name for key in keys) or "none"
                raise NotFound(f"there is no key named {name!r}", hint=f"Keys: {names}.")
            self._write([key for key in keys if key.name != name])

    def _store(self, name: str, key: str, key_class: KeyClass) -> None:
        stored = StoredKey(name=name, sha256=hash_key(key), created=int(time.time()), **asdict(key_class))
        try:
            _read_row(loads(dumps(asdict(stored))))  # what is written must be read again: else no key of the file would hold
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"a key cannot have these limits: {key_class}", hint="Rates and counts are above 0.") from error
        self._write([*(other for other in self.read() if other.name != name), stored])

    def _write(self, keys: list[StoredKey]) -> None:
        write_private(self._path, dumps({"keys": [asdict(key) for key in keys]}, indent=1))


def read_last_used(keys_file: Path) -> dict[str, int]:
    """When each key was last sent, by name, in seconds since the epoch; written beside the key file by the daemon."""
    try:
        found = loads(_last_used_file(keys_file).read_text())
        return {str(name): int(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):  # not there, or damaged: it is written again
        return {}


def write_last_used(keys_file: Path, used: Mapping[str, float]) -> None:
    """Keys that were not sent since this process started keep what was written before."""
    write_private(
        _last_used_file(keys_file), dumps({**read_last_used(keys_file), **{name: int(when) for name, when in used.items()}})
    )


def _last_used_file(keys_file: Path) -> Path:
    return keys_file.with_name("keys-used.json")


def parse_keys(text: str, source: str) -> tuple[StoredKey, ...]:
    """The content of a key file, wherever it is kept. Raises InvalidInput where it is damaged."""
    try:
        return tuple(_read_row(row) for row in loads(text)["keys"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{source} is damaged", hint=_DAMAGED) from error


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 1)


def _read_row(row: dict[str, Any]) -> StoredKey:
    """Raises TypeError or ValueError for what `add` would not have written: a limit that cannot be applied limits nothing."""
    models = row.get("models")
    key = StoredKey(**{**row, "models": None if models is None else tuple(models)})
    rate = key.requests_per_second
    fits = (
        isinstance(key.name, str),
        isinstance(key.sha256, str) and _DIGEST.fullmatch(key.sha256),
        type(key.created) is int,
        models is None or (isinstance(models, list) and all(isinstance(model, str) for model in models)),
        key.priority in _PRIORITIES,
        rate is None or (type(rate) in {int, float} and 0 < rate < math.inf),
        all(_is_count(count) for count in (key.concurrency, key.expires, key.answer_bytes)),
        key.cache_group is None or (isinstance(key.cache_group, str) and _NAME.fullmatch(key.cache_group)),
    )
    if not all(fits):
        raise ValueError(key.name)
    return key
