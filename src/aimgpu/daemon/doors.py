"""Every route of the daemon with its door, and what each door lets through: the table of docs/reference/doors.md.

The checks themselves are in `web.authority`, `daemon.router` and `gateway.application`. This is what they must come to; a test
asks every route under every circumstance and compares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from aimgpu.daemon import api
from aimgpu.daemon.router import METRICS, PROBES
from aimgpu.gateway.application import LISTING_PATHS, MODEL_PATHS
from aimgpu.gateway.dialects.table import OPERATIONS
from aimgpu.gateway.public_paths import PUBLIC
from aimgpu.web import routes as page
from aimgpu.web.assets import asset_names
from aimgpu.web.doors import Door


@dataclass(frozen=True, slots=True, order=True)
class DoorOf:
    path: str
    method: str
    door: Door


class Carried(StrEnum):
    """What a request carries."""

    NONE = "nothing"
    LOW = "a limited key"
    KEY = "a key"
    LINK = "the page's link"
    TOKEN = "the token"  # noqa: S105 - a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The circumstances of a request; the header of the page is there in all of them."""

    credential: Carried = Carried.NONE
    keys: bool = False  # there are API keys
    own_host: bool = True  # the Host header names this machine
    own_site: bool = True  # a browser names no other origin
    local: bool = True  # made on this machine, and no proxy passed it on


YES, WHO, NO = 200, 401, 403


def list_doors() -> list[DoorOf]:
    """Every path that the daemon's port answers, with who may call it."""
    return sorted(_list_doors())


def _list_doors() -> Iterator[DoorOf]:
    for path in {*PUBLIC, *PROBES}:
        yield DoorOf(path, "GET", Door.PROBE)
    for path in asset_names():
        yield DoorOf(path, "GET", Door.PAGE)
    yield DoorOf(METRICS, "GET", Door.METRICS)
    for method, path, _, door in page.ROUTES:
        yield DoorOf(path, method, door)
    for method, path, _ in api.ROUTES:
        yield DoorOf(path, method, Door.CHANGE)
    for path in LISTING_PATHS:
        yield DoorOf(path, "GET", Door.MODELS)
    for path in MODEL_PATHS:
        yield DoorOf(path, "POST", Door.MODELS)
    for operation in OPERATIONS:
        yield DoorOf(operation.path, operation.method, Door.MODELS)


def judge(door: Door, asked: Asked) -> int:  # noqa: PLR0911 - a table
    """YES: let through. WHO: a credential is missing. NO: refused, whatever is sent beside it."""
    if door is Door.PROBE:
        return YES
    if door is Door.MODELS:
        return _judge_models(asked)
    carried = asked.credential in (Carried.LOW, Carried.KEY, Carried.TOKEN)  # a link's cookie is sent unasked
    if not carried and not asked.own_host:
        return NO
    if not carried and not asked.own_site and door is not Door.PAGE:
        return NO
    if door in (Door.PAGE, Door.OPEN) or asked.credential in (Carried.LINK, Carried.TOKEN):
        return YES
    if door is Door.CHANGE:
        return NO if carried else WHO
    if asked.credential is Carried.LOW:
        return YES if door is Door.METRICS else NO
    if asked.credential is Carried.KEY:
        return YES
    return YES if asked.local and not asked.keys else WHO


def _judge_models(asked: Asked) -> int:
    if asked.keys:
        return YES if asked.credential in (Carried.LOW, Carried.KEY) else WHO
    if not asked.local:
        return WHO
    return YES if asked.own_host and asked.own_site else NO
