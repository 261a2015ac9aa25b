"""Identifiers of requests: in the `x-request-id` of every answer, in error logs, and for the caller to quote."""

import re
import secrets
from itertools import count

_PROCESS = b"req-%b-" % secrets.token_hex(6).encode()
_NUMBERS = count(1)
_GIVEN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def make_request_id(given: bytes | None = None) -> bytes:
    """The caller's own identifier where it is harmless to log and to send back, else a new one."""
    if given is not None and _GIVEN.fullmatch(given):
        return given
    return b"%b%x" % (_PROCESS, next(_NUMBERS))
