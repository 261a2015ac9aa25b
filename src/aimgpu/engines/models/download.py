"""One file of a package index, resumed after an interruption and checked by hash."""

import base64
import hashlib
import html.parser
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from aimgpu.engines.protocols import Progress
from aimgpu.errors import ModelUnavailable

_CHUNK_BYTES = 256 * 1024
_TIMEOUT_SECONDS = 30.0
_TRIES = 3
_LARGEST_PAGE_BYTES = 16 * 1024 * 1024
_PARTIAL = 206
_RANGE_REFUSED = 416


class DownloadFailed(Exception):
    """This source did not give the file; another may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    project: str
    file_name: str
    sha256: str


def find_on_index(index: str, wanted: Wanted, certificates: Path | None) -> str:
    """The file's address by the simple repository API (PEP 503)."""
    page = f"{index}/{wanted.project}/"
    try:
        with open_url(
            page, certificates, headers={"Accept": "application/vnd.pypi.simple.v1+html, text/html;q=0.5"}
        ) as response:
            links = _Links(response.url)
            links.feed(response.read(_LARGEST_PAGE_BYTES).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadFailed(f"{_shown(index)}: {explain(error)}") from error
    for link in links.found:
        if unquote(urlsplit(link).path).rsplit("/", 1)[-1] == wanted.file_name:
            return _with_credentials(urlunsplit(urlsplit(link)._replace(fragment="")), index)
    raise DownloadFailed(f"{_shown(index)} has no {wanted.file_name}")


def download(url: str, target: Path, wanted: Wanted, certificates: Path | None, progress: Progress) -> None:
    """Into `target`, by way of a `.part` file that a later try goes on with."""
    part = target.with_name(target.name + ".part")
    last: Exception | None = None
    for _ in range(_TRIES):
        try:
            transfer(url, part, certificates, progress, wanted.file_name)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            last = error
            continue
        if hash_file(part) == wanted.sha256:
            part.replace(target)
            return
        part.unlink()
        last = ModelUnavailable(f"{wanted.file_name} from {_shown(url)} has another content than expected (sha256 differs)")
    raise DownloadFailed(f"{_shown(url)}: {explain(last)}")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def transfer(  # noqa: PLR0913 - the file, its source and its progress
    url: str, part: Path, certificates: Path | None, progress: Progress, what: str, *, headers: Mapping[str, str] | None = None
) -> None:
    """Into `part`, from where it ends."""
    done = part.stat().st_size if part.exists() else 0
    asked = {**(headers or {}), **({"Range": f"bytes={done}-"} if done else {})}
    try:
        response = open_url(url, certificates, headers=asked)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_REFUSED:  # complete already, or of another file: the hash decides
            return
        raise
    with response, part.open("ab" if response.status == _PARTIAL else "wb") as file:
        done = done if response.status == _PARTIAL else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdecimal() else None
        progress(what, done, total)
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            progress(what, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def open_url(url: str, certificates: Path | None, *, headers: dict[str, str]) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{parts.scheme}: is not a web address")
    if parts.username:
        token = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        headers = {**headers, "Authorization": f"Basic {token}"}
        url = urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
    context = ssl.create_default_context(cafile=str(certificates) if certificates and certificates.exists() else None)
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme was checked
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _Redirects())
    try:
        return cast("http.client.HTTPResponse", opener.open(request, timeout=_TIMEOUT_SECONDS))
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection; its status is all that is read of it
        raise


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Credentials stay with the host that they are for."""

    def redirect_request(  # noqa: PLR0913, PLR0917 - as urllib calls it
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


class _Links(html.parser.HTMLParser):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.found.append(urljoin(self._address, target))


def _with_credentials(url: str, index: str) -> str:
    """Files on the index's own host need its user and password too; other hosts must not see them."""
    ours, theirs = urlsplit(url), urlsplit(index)
    if theirs.username and ours.hostname == theirs.hostname and not ours.username:
        return urlunsplit(ours._replace(netloc=f"{theirs.netloc.rsplit('@', 1)[0]}@{ours.netloc}"))
    return url


def _shown(url: str) -> str:
    """Without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1], query=""))


def explain(error: Exception | None) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
