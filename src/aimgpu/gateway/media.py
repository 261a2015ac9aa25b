"""URLs in requests: an engine that fetches one reaches what its machine reaches, so only named domains pass."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from aimgpu.errors import InvalidInput, InvalidRequest

_OTHERS = frozenset({"tools", "functions", "response_format", "metadata"})  # schemas and notes, which no engine fetches
_SUFFIX = "url"  # image_url, video_url, audio_url, file_url, and the url within each
_MEDIA = ("image", "images", "audio", "video")  # what else servers take a URL in, beside the content itself
_SCHEME = re.compile(r"\s*[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?", re.ASCII)
_REFUSED = frozenset("\\@ \t\r\n")  # what two readers of a URL may take differently
_HINT = "Send the content as a data: URL. Operators: AIMGPU_MEDIA_DOMAINS names the domains that engines may fetch from."


def parse_media_domains(text: str) -> frozenset[str]:
    """Domains separated by commas, such as "images.example.org, cdn.example.org". Raises InvalidInput."""
    domains = [domain.strip().lower() for domain in text.split(",") if domain.strip()]
    for domain in domains:
        if not _DOMAIN.fullmatch(domain):
            raise InvalidInput(
                f"{domain!r} is not a domain", hint="Write names alone, separated by commas: images.example.org."
            )
    return frozenset(domains)


def may_name_media(body: bytes) -> bool:
    """Whether a body is worth looking through: most hold no such field, by the ends of their names, nor escapes in a name."""
    find = body.rfind  # from the end: quotes are frequent, and slow to search by
    return (
        find(b'url"') >= 0
        or b"\\u" in body
        or find(b'image"') >= 0
        or find(b'images"') >= 0
        or find(b'dio"') >= 0
        or find(b'deo"') >= 0
        or find(b'lity"') >= 0
    )


def check_media(fields: Mapping[str, Any], domains: Collection[str]) -> None:
    """Raises InvalidRequest for a URL that an engine would fetch from another domain."""
    pairs = [(name, value) for name, value in fields.items() if name not in _OTHERS]
    if fields.get("modality") not in (None, "text"):  # Infinity: `input` holds texts, or pictures and sounds
        pairs.append(("input_image", fields.get("input")))
    for name, url in _urls(pairs):
        if not _allows(url, domains):
            raise InvalidRequest(f"'{name[:50]}' is a URL that this server does not fetch.", hint=_HINT, param=name[:50])


def _urls(pairs: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Without recursion: bodies are nested as deep as their callers like."""
    while pairs:
        name, value = pairs.pop()
        if isinstance(value, str):
            if name.endswith(_SUFFIX) or (name.endswith(_MEDIA) and _SCHEME.match(value)):
                yield name, value
        elif isinstance(value, dict):
            pairs.extend(value.items())
        elif isinstance(value, list):
            pairs.extend((name, each) for each in value if not isinstance(each, int | float))


def _allows(url: str, domains: Collection[str]) -> bool:
    if url[:5].lower() == "data:":
        return True
    if _REFUSED & set(url[:4096]) or len(url) > 4096:  # noqa: PLR2004 -- longer than any server takes
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host in domains
