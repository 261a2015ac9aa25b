"""Models of the Hugging Face hub, in the cache that every program of this user shares with its own library."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aimgpu.engines.launch_environment import hub_folder
from aimgpu.engines.protocols import LocalModel, Progress
from aimgpu.errors import ModelUnavailable

GGUF, SAFETENSORS = "gguf", "safetensors"
DEFAULT_ENDPOINT = "https://huggingface.co"
NO_NETWORK = "Check the network, or HF_ENDPOINT. Without a network give the path of a .gguf file or of a model's folder."
_NAME = re.compile(r"(?:hf\.co/|huggingface\.co/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.(?:gguf|safetensors)", re.IGNORECASE | re.ASCII)
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q8_0")  # where no quantisation is named
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_POOLING = "_Pooling/config.json"  # of models that embed
_REVISION = "main"
_NOT_OPEN = (401, 403, 404)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    repository: str  # "org/name"
    tag: str | None  # a quantisation, where a repository has several


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    name: str
    size_bytes: int
    sha256: str | None  # of large files


def parse_hub_name(model: str) -> HubName | None:
    """`org/name`, with a quantisation after a colon; None for anything else, such as a path."""
    match = _NAME.fullmatch(model)
    if match is None or model.lower().endswith(".gguf"):
        return None
    return HubName(repository=match[1], tag=match[2])


class HubCache:
    """The hub's cache of this user: what vLLM or another program downloaded is found, and what is fetched here they find."""

    def __init__(self, folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self._folder = folder or Path(environment.get("HF_HUB_CACHE") or hub_folder() / "hub").expanduser()
        self._environment = environment

    def find(self, name: HubName) -> LocalModel | None:
        """Only a whole model; GGUF files before others."""
        snapshot = self._snapshot(name)
        if snapshot is None:
            return None
        try:
            files = [_on_disk(path, snapshot) for path in sorted(snapshot.rglob("*")) if path.is_file()]
            chosen, kind = choose_files(files, name, frozenset({GGUF, SAFETENSORS}))
        except (OSError, ModelUnavailable):
            return None
        if not _is_whole({file.name for file in chosen}):
            return None
        return LocalModel(name=name.repository, path=snapshot / chosen[0].name if kind == GGUF else snapshot, format=kind)

    def find_config(self, name: HubName) -> Path | None:
        """The folder with the model's config.json, with or without its weights."""
        snapshot = self._snapshot(name)
        return snapshot if snapshot is not None and (snapshot / "config.json").is_file() else None

    def fetch(self, name: HubName, formats: frozenset[str], progress: Progress) -> LocalModel:
        """Raises ModelUnavailable, with what to do. The listing comes first: without a network it fails at once."""
        self._check_online(name)
        chosen, _ = choose_files(self._list(name), name, formats)
        self._check_room(name, chosen)
        for file in reversed(chosen):  # weights last: with them the model is whole
            self._bring(name, file, progress)
        found = self.find(name)
        if found is None:
            raise ModelUnavailable(f"{name.repository} changed in {self._folder} while it was fetched", hint="Try again.")
        return found

    def fetch_config(self, name: HubName) -> Path | None:
        """Just config.json, for an estimate; None where it is not available."""
        try:
            self._check_online(name)
            config = next((file for file in self._list(name) if file.name == "config.json"), None)
            if config is not None:
                self._bring(name, config, lambda *_: None)
        except ModelUnavailable:
            return None
        return self.find_config(name)

    def _snapshot(self, name: HubName) -> Path | None:
        repository = self._repository(name)
        try:
            revision = (repository / "refs" / _REVISION).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        folder = repository / "snapshots" / revision
        return folder if revision.isalnum() and folder.is_dir() else None

    def _repository(self, name: HubName) -> Path:
        return self._folder / f"models--{name.repository.replace('/', '--')}"

    def _check_online(self, name: HubName) -> None:
        if self._environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ModelUnavailable(f"{name.repository} is not on this machine, and HF_HUB_OFFLINE is set", hint="Unset it.")

    def _list(self, name: HubName) -> list[HubFile]:
        from huggingface_hub import HfApi  # noqa: PLC0415 - a third of a second, which only a download takes
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

        try:
            info = HfApi(endpoint=self._endpoint, token=self._token).model_info(
                name.repository, revision=_REVISION, files_metadata=True, timeout=30
            )
            return [_listed(one) for one in info.siblings or ()]
        except (HTTPError, OSError) as error:
            raise self._translated(name, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelUnavailable(
                f"cannot fetch {name.repository}: {self._endpoint} did not answer as a hub does", hint=NO_NETWORK
            ) from error

    def _bring(self, name: HubName, file: HubFile, progress: Progress) -> None:
        from huggingface_hub import hf_hub_download, logging  # noqa: PLC0415
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it tries again itself; what fails in the end is raised
        try:
            path = Path(
                hf_hub_download(
                    name.repository,
                    file.name,
                    revision=_REVISION,
                    cache_dir=self._folder,
                    endpoint=self._endpoint,
                    token=self._token,
                    tqdm_class=_bar(file, progress),
                )
            )
        except (HTTPError, OSError, ValueError) as error:
            raise self._translated(name, error) from error
        if file.sha256 is not None and _hash(path) != file.sha256:  # the library compares sizes only
            path.resolve().unlink()
            path.unlink()
            raise ModelUnavailable(
                f"cannot fetch {name.repository}: {file.name} has another content than listed (sha256 differs)",
                hint="Try again; if it stays so, do not use this source.",
            )

    def _translated(self, name: HubName, error: Exception) -> ModelUnavailable:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) in _NOT_OPEN:
            return ModelUnavailable(
                f"there is no model {name.repository} at {self._endpoint}, or it is not open to everybody",
                hint="Check its name. For a gated model accept its licence there and set HF_TOKEN.",
            )
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ModelUnavailable(f"cannot fetch {name.repository}: {self._endpoint}: {lines[0][:300]}", hint=NO_NETWORK)

    def _check_room(self, name: HubName, files: list[HubFile]) -> None:
        snapshot = self._snapshot(name)
        needed = sum(file.size_bytes for file in files if snapshot is None or not (snapshot / file.name).exists())
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise ModelUnavailable(
                f"{needed / 1e9:.1f} GB are needed in {self._folder}, and {free / 1e9:.1f} GB are free",
                hint="Free some, or set HF_HOME to another disk.",
            )

    @property
    def _endpoint(self) -> str:
        return (self._environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")

    @property
    def _token(self) -> str | None:
        """None: the library looks where `hf auth login` puts it."""
        return self._environment.get("HF_TOKEN") or None


def choose_files(files: list[HubFile], name: HubName, formats: frozenset[str]) -> tuple[list[HubFile], str]:
    """What a model's engine needs, first file first, and their format. Raises ModelUnavailable where nothing fits."""
    for file in files:
        _check_name(file.name, name)
    ggufs = [file for file in files if file.name.lower().endswith(".gguf") and "mmproj" not in file.name.lower()]
    if ggufs and GGUF in formats:
        return _choose_gguf(ggufs, name), GGUF
    weights = [file for file in files if file.name.endswith(".safetensors") and "/" not in file.name]
    if weights and name.tag is None and SAFETENSORS in formats and any(file.name == "config.json" for file in files):
        beside = [
            file
            for file in files
            if (file.name.endswith(_BESIDE_WEIGHTS) and "/" not in file.name) or file.name.endswith(_POOLING)
        ]
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


def _listed(one: Any) -> HubFile:  # noqa: ANN401 - the library's record
    return HubFile(name=str(one.rfilename), size_bytes=int(one.size), sha256=one.lfs.sha256 if one.lfs else None)


def _on_disk(path: Path, snapshot: Path) -> HubFile:
    return HubFile(name=str(path.relative_to(snapshot)), size_bytes=path.stat().st_size, sha256=None)


def _is_whole(names: set[str]) -> bool:
    """No part of a split model is missing."""
    counts = {(match[1], int(match[2])) for name in names if (match := _PART.fullmatch(name))}
    return all(
        sum(name.startswith(f"{stem}-") and f"-of-{count:05d}." in name for name in names) == count for stem, count in counts
    )


def _check_name(name: str, model: HubName) -> None:
    """A hub's listing must not lead out of the folder of its model."""
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or not name.isprintable() or not parts:
        raise ModelUnavailable(f"{model.repository} lists a file {name[:80]!r}", hint="Do not use this repository.")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bar(file: HubFile, progress: Progress) -> Any:  # noqa: ANN401 - a class of tqdm's kind
    """What the library calls with the bytes that arrived, as our own progress."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # noqa: PLC0415

    class Bar(tqdm):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **(options | {"disable": True}))  # type: ignore[no-untyped-call]
            self._done = 0

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            progress(file.name, self._done, file.size_bytes or None)

    return Bar
