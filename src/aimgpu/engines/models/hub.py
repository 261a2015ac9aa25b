"""Models of the Hugging Face hub: which files of a repository are needed, fetched whole and checked by their hashes."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aimgpu.engines.models.download import DownloadFailed, explain, open_url, transfer
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.errors import ModelUnavailable

GGUF, SAFETENSORS = "gguf", "safetensors"
DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"(?:hf\.co/|huggingface\.co/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q8_0")  # where no quantisation is named
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")
_LARGEST_LISTING = 32 << 20
_LISTING = "files.json"
_NOT_ALLOWED = (401, 403)
_NOT_FOUND = 404
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    repository: str  # "org/name"
    tag: str | None  # a quantisation, where a repository has several


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    name: str
    size_bytes: int
    sha256: str | None  # of large files
    blob: str | None  # git's own hash, of the others


def parse_hub_name(model: str) -> HubName | None:
    """`org/name`, with a quantisation after a colon; None for anything else, such as a path."""
    match = _NAME.fullmatch(model)
    if match is None or model.lower().endswith(".gguf"):
        return None
    return HubName(repository=match[1], tag=match[2])


class HubCache:
    """The part of a user's cache that holds models of the hub."""

    def __init__(self, folder: Path, certificates: Path | None, environment: Mapping[str, str] = os.environ) -> None:
        self._folder = folder
        self._certificates = certificates
        self._environment = environment

    def find(self, name: HubName) -> LocalModel | None:
        """Only a whole model has its listing; a file that was changed or lost since makes it unknown again."""
        folder = self._path(name)
        try:
            listed = json.loads((folder / _LISTING).read_text(encoding="utf-8"))
            if any((folder / one["name"]).stat().st_size != one["size_bytes"] for one in listed["files"]):
                return None
            path = folder / listed["first"] if listed["format"] == GGUF else folder
            return LocalModel(name=name.repository, path=path, format=listed["format"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def fetch(self, name: HubName, formats: frozenset[str], progress: Progress) -> LocalModel:
        """Raises ModelUnavailable, with what to do."""
        if self._environment.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise ModelUnavailable(f"{name.repository} is not on this machine, and HF_HUB_OFFLINE is set", hint="Unset it.")
        try:
            revision, files = self._list(name.repository)
            chosen, kind = choose_files(files, name, formats)
            folder = self._path(name)
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                if found := self.find(name):
                    return found
                self._check_room(folder, chosen)
                for file in chosen:
                    self._bring(name.repository, revision, file, folder, progress)
                return self._finish(name, chosen, kind)
        except DownloadFailed as failure:
            raise ModelUnavailable(f"cannot fetch {name.repository}: {failure}", hint=NO_NETWORK) from failure

    def _path(self, name: HubName) -> Path:
        return self._folder / name.repository.replace("/", "--") / (name.tag or "default")

    def _list(self, repository: str) -> tuple[str, list[HubFile]]:
        url = f"{self._endpoint}/api/models/{quote(repository)}/revision/main?blobs=true"
        try:
            with open_url(url, self._certificates, headers=self._headers()) as response:
                answer: Any = json.loads(response.read(_LARGEST_LISTING))
            return str(answer["sha"]), [_file(one) for one in answer["siblings"]]
        except urllib.error.HTTPError as error:
            if error.code in (_NOT_FOUND, *_NOT_ALLOWED):
                raise ModelUnavailable(
                    f"there is no model {repository} at {self._endpoint}, or it is not open to everybody",
                    hint="Check its name. For a gated model accept its licence there and set HF_TOKEN.",
                ) from error
            raise DownloadFailed(f"{self._endpoint}: {explain(error)}") from error
        except OSError as error:
            raise DownloadFailed(f"{self._endpoint}: {explain(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DownloadFailed(f"{self._endpoint} did not answer as a hub does") from error

    def _bring(self, repository: str, revision: str, file: HubFile, folder: Path, progress: Progress) -> None:
        target = folder / file.name
        if target.exists() and target.stat().st_size == file.size_bytes and _matches(target, file):
            return
        part = target.with_name(target.name + ".part")
        url = f"{self._endpoint}/{quote(repository)}/resolve/{revision}/{quote(file.name)}"
        last: Exception | None = None
        for _ in range(_TRIES):
            try:
                transfer(url, part, self._certificates, progress, file.name, headers=self._headers())
            except OSError as error:
                last = error
                continue
            if _matches(part, file):
                part.replace(target)
                return
            part.unlink()
            last = DownloadFailed(f"{file.name} has another content than listed")
        raise DownloadFailed(f"{file.name}: {explain(last)}")

    def _finish(self, name: HubName, files: list[HubFile], kind: str) -> LocalModel:
        listing = {
            "format": kind,
            "first": files[0].name,
            "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in files],
        }
        path = self._path(name) / _LISTING
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(listing), encoding="utf-8")
        scratch.replace(path)
        found = self.find(name)
        if found is None:
            raise DownloadFailed(f"{path.parent} changed while it was written")
        return found

    def _check_room(self, folder: Path, files: list[HubFile]) -> None:
        needed = sum(file.size_bytes for file in files if not (folder / file.name).exists())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ModelUnavailable(
                f"{needed / 1e9:.1f} GB are needed in {folder}, and {free / 1e9:.1f} GB are free",
                hint="Free some, or set AIMGPU_CACHE to another disk.",
            )

    @property
    def _endpoint(self) -> str:
        return (self._environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")

    def _headers(self) -> dict[str, str]:
        """A token goes to the hub itself only; `open_url` drops it where a redirect leads to another host."""
        token = self._environment.get("HF_TOKEN") or _read_token(self._environment)
        return {"Authorization": f"Bearer {token}"} if token else {}


NO_NETWORK = "Check the network, or HF_ENDPOINT. Without a network give the path of a .gguf file or of a model's folder."


def choose_files(files: list[HubFile], name: HubName, formats: frozenset[str]) -> tuple[list[HubFile], str]:
    """What a model's engine needs, first file first, and their format. Raises ModelUnavailable where nothing fits."""
    for file in files:
        _check_name(file.name, name)
    ggufs = [file for file in files if file.name.lower().endswith(".gguf") and "mmproj" not in file.name.lower()]
    if ggufs and GGUF in formats:
        return _choose_gguf(ggufs, name), GGUF
    weights = [file for file in files if file.name.endswith(".safetensors") and "/" not in file.name]
    if weights and name.tag is None and SAFETENSORS in formats and any(file.name == "config.json" for file in files):
        beside = [file for file in files if file.name.endswith(_BESIDE_WEIGHTS) and "/" not in file.name]
        return [*weights, *beside], SAFETENSORS
    has = "GGUF files" if ggufs else "safetensors" if weights else "no weights that are known here"
    raise ModelUnavailable(
        f"{name.repository} has {has}, and {' or '.join(sorted(formats))} is needed",
        hint="Name a repository with GGUF files (their names often end with -GGUF), or use the engine vllm.",
    )


def _choose_gguf(files: list[HubFile], name: HubName) -> list[HubFile]:
    """One quantisation; all parts of one that is split."""
    groups: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda one: one.name):
        groups.setdefault(_SHARD.sub(".gguf", file.name), []).append(file)
    wanted = [name.tag] if name.tag else list(_PREFERRED)
    for tag in wanted:
        found = [group for stem, group in groups.items() if _has_tag(stem, tag)]
        if found:
            return found[0]
    if name.tag is None and len(groups) == 1:
        return next(iter(groups.values()))
    known = ", ".join(sorted(groups))
    what = f"nothing called {name.tag}" if name.tag else "several files"
    raise ModelUnavailable(f"{name.repository} has {what}", hint=f"Name one as {name.repository}:TAG. It has: {known[:500]}.")


def _has_tag(stem: str, tag: str) -> bool:
    """As a word of its own: Q4_K is not Q4_K_M."""
    return re.search(rf"(?:^|[^A-Za-z0-9_]){re.escape(tag)}(?:[^A-Za-z0-9_]|$)", stem, re.IGNORECASE) is not None


def _file(listed: Any) -> HubFile:  # noqa: ANN401  # JSON
    large = listed.get("lfs") or {}
    size = large.get("size", listed.get("size"))
    return HubFile(
        name=str(listed["rfilename"]),
        size_bytes=int(size),
        sha256=large.get("sha256") or large.get("oid"),
        blob=listed.get("blobId"),
    )


def _check_name(name: str, model: HubName) -> None:
    """A hub's listing must not lead out of the folder of its model."""
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or not name.isprintable() or not parts:
        raise ModelUnavailable(f"{model.repository} lists a file {name[:80]!r}", hint="Do not use this repository.")


def _matches(path: Path, file: HubFile) -> bool:
    """By SHA-256, or by git's hash of the content with its length before it."""
    if path.stat().st_size != file.size_bytes:
        return False
    if file.sha256 is None and file.blob is None:
        return True
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.blob)


def _read_token(environment: Mapping[str, str]) -> str | None:
    base = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or Path('~/.cache').expanduser()}/huggingface"
    try:
        return (Path(base) / "token").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process fetches, the others wait and find it there."""
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
