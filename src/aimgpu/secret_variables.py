"""Environment variables that hold secrets: every program of a user can read the environment of the user's processes.

The daemon is started without them and reads them from its standard input, so that engines still get a hub token.
"""

import contextlib
import json
import re
from collections.abc import Mapping, MutableMapping
from typing import IO

_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)($|_)"
    r"|^(AWS|AZURE|ARM|GOOGLE|GCP|GCLOUD|CLOUDSDK|DIGITALOCEAN|CLOUDFLARE|ALIBABA|OCI)_"
)
_MOST_BYTES = 1 << 20


def split_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What may be seen, and what may not. AIMGPU_API_KEY is for callers: the daemon has its hash, and gets neither."""
    plain = {name: value for name, value in environment.items() if not _SECRET.search(name)}
    secrets = {name: value for name, value in environment.items() if name not in plain and name != "AIMGPU_API_KEY"}
    return plain, secrets


def pass_secrets(stream: IO[bytes], secrets: Mapping[str, str]) -> None:
    """Into the standard input of a process that calls `take_secrets`."""
    with contextlib.suppress(BrokenPipeError), stream:
        stream.write(json.dumps(secrets).encode())


def take_secrets(stream: IO[bytes], environment: MutableMapping[str, str]) -> None:
    """Set what was passed, for this process alone; what it was started with (/proc/PID/environ) does not show it."""
    with contextlib.suppress(ValueError, OSError, RecursionError):
        given = json.loads(stream.read(_MOST_BYTES) or b"{}")
        if isinstance(given, dict):
            environment.update({str(name): str(value) for name, value in given.items()})
