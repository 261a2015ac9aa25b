"""Objects that others write: one that cannot be read is logged and left out; the program and all other objects go on.

Whoever may create a pod or a Deployment in any namespace chooses its annotations, labels and limits. Numbers in them are
bounded before they are parsed (`read_count`, `quantities.parse_quantity`), and every reader of a list reads each object within
`leaving_out`.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

MOST = 1_000_000
_MOST_REMEMBERED = 1000
_reported: OrderedDict[tuple[str, ...], None] = OrderedDict()  # versions that were logged: most are read again each second


@contextlib.contextmanager
def leaving_out(item: Mapping[str, Any]) -> Iterator[None]:
    """Leave this object out if reading it fails."""
    try:
        yield
    except Exception as error:  # the last edge: whatever is wrong with one object, the others are served
        place = _place(item)
        if place not in _reported:
            _reported[place] = None
            if len(_reported) > _MOST_REMEMBERED:
                _reported.popitem(last=False)
            log.exception("object.unreadable", extra={"data": {"object": "/".join(place[:3]), "error": type(error).__name__}})


def read_count(text: object, *, most: int = MOST) -> int | None:
    """A whole number from 1 to `most`; None for anything else, however long."""
    if not isinstance(text, str) or len(text) > len(str(most)) or not (text.isascii() and text.isdecimal()):
        return None
    return count if 0 < (count := int(text)) <= most else None


def _place(item: Mapping[str, Any]) -> tuple[str, ...]:
    metadata = item.get("metadata") if isinstance(item, Mapping) else None
    if not isinstance(metadata, Mapping):
        return ("?",)
    return (str(item.get("kind") or "object"), *(str(metadata.get(key)) for key in ("namespace", "name", "resourceVersion")))
