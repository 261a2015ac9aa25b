"""Forms (multipart/form-data): the short fields are read, the name of the model is written, files are left alone."""

import re
from collections.abc import Iterator

from aimgpu.errors import InvalidRequest

_LONGEST_FIELD = 4096
_MOST_PARTS = 64
_LONGEST_HEAD = 8 * 1024
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb';\s*([\w*-]{1,20})=("[^"]*"|[^\s;]*)')
_FILE_NAMES = frozenset({b"filename", b"filename*"})


def name_model(content_type: bytes, body: bytes, name: str) -> bytes:
    """The form with this model in place of the one that it names, or of none."""
    for head, begin, end in _parts(content_type, body):
        if _text_field(head) == "model":
            return body[:begin] + name.encode() + body[end:]
    delimiter = _delimiter(content_type)
    begin = 0 if body.startswith(delimiter[2:]) else body.index(delimiter) + 2
    part = b'%b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n' % (delimiter[2:], name.encode())
    return body[:begin] + part + body[begin:]


def read_form(content_type: bytes, body: bytes) -> dict[str, str]:
    """The short text fields of a form. Only the heads of its parts are parsed, short and few; files are left alone."""
    found: dict[str, str] = {}
    for head, begin, end in _parts(content_type, body):
        name = _text_field(head)
        if name is not None and end - begin <= _LONGEST_FIELD:
            if name == "model" and name in found:
                raise InvalidRequest("'model' is in the form twice.", param="model")
            found[name] = body[begin:end].decode("utf-8", "replace").rstrip("\r\n")
    return found


def _text_field(head: bytes) -> str | None:
    """Its name; None: a file, or no field."""
    line = _DISPOSITION.search(head)
    given = {key.lower(): value.strip(b'"') for key, value in _PARAMETER.findall(line[1])} if line is not None else {}
    return None if b"name" not in given or _FILE_NAMES & given.keys() else given[b"name"].decode("utf-8", "replace")


def _delimiter(content_type: bytes) -> bytes:
    boundary = _BOUNDARY.search(content_type)
    return b"\r\n--" + (boundary[1] or boundary[2]) if boundary is not None else b""


def _parts(content_type: bytes, body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Head of each part, and where its payload begins and ends; each byte is looked at once."""
    delimiter = _delimiter(content_type)
    at = -2 if delimiter and body.startswith(delimiter[2:]) else body.find(delimiter) if delimiter else -1
    parts = 0
    while at != -1:
        begin = at + len(delimiter)
        if body.startswith(b"--", begin):
            return
        end_of_head = body.find(b"\r\n\r\n", begin, begin + _LONGEST_HEAD)
        at = body.find(delimiter, end_of_head + 2) if end_of_head != -1 else -1
        parts += 1
        if at == -1 or parts > _MOST_PARTS:
            break
        yield body[begin:end_of_head], end_of_head + 4, at
    hint = f"At most {_MOST_PARTS} parts, each with a head of at most {_LONGEST_HEAD} bytes."
    raise InvalidRequest("The form cannot be read.", hint=hint, param="file")
