"""Opens model files and hands bounded streams to the pure readers of the sizing room."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import orjson

from aimgpu.control.sizing_inputs.model_names import unknown_model
from aimgpu.engines.models.store import begins_as_gguf
from aimgpu.errors import InvalidModelFile
from aimgpu.sizing import Catalogue, ModelFacts, built_in, facts_from_folder, read_gguf_shards, read_safetensors
from aimgpu.sizing.formats.config import LARGEST_CONFIG
from aimgpu.sizing.formats.safetensors import SafeTensor, read_header_length

_MOST_SHARDS = 2000
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE | re.ASCII)
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors", re.IGNORECASE | re.ASCII)
_LARGEST_HEADERS = 32 << 20  # of all files together; 200,000 tensors have some 25 MiB, and no published model that many
_LARGEST_INDEX = 32 << 20


def find_model_facts(
    model: str, path: Path | None = None, *, parameters: int | None = None, catalogue: Catalogue | None = None
) -> ModelFacts:
    """Facts from the best source at hand: the files, the catalogue, the given parameter count. Never a guess from the name."""
    local = path or _local_path(model)
    if local is not None:
        return replace(read_local_model(local), name=model)
    known_models = catalogue or built_in()
    known = known_models.find(model)
    if known is not None:
        unused = parameters is not None and parameters != known.parameters
        doubt = f"the {parameters} parameters given are not used: the catalogue knows this model, with {known.parameters}"
        return replace(known, remarks=(*known.remarks, doubt)) if unused else known
    if parameters is not None:
        return ModelFacts(name=model, source="parameter count given by the user", parameters=parameters, precision="fp16")
    raise unknown_model(model, known_models)


def read_local_model(path: Path) -> ModelFacts:
    """Facts of a .gguf file or of a folder with config.json and safetensors, from their headers."""
    try:
        if path.is_dir():
            return _read_folder(path)
        if path.is_file() and (path.suffix.lower() == ".gguf" or begins_as_gguf(path)):
            return _read_gguf_file(path)
    except OSError as error:
        where = error.filename or path
        raise InvalidModelFile(f"cannot read {where}: {error.strerror}", hint="Check the path and its permissions.") from error
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    page_hint = "Give the .gguf file, or the folder with config.json and safetensors."
    raise InvalidModelFile(f"{path} {what}", hint=f"{page_hint} `aimgpu run smollm2` needs neither.", page_hint=page_hint)


def _local_path(model: str) -> Path | None:
    """A path only where it is written as one: "org/name" is a model id, not a folder that happens to exist."""
    if not (model.lower().endswith(".gguf") or model.startswith(("/", "./", "../", "~")) or model in (".", "..")):
        return None
    try:
        return Path(model).expanduser()
    except RuntimeError as error:  # "~someone" who has no account here
        raise InvalidModelFile(f"{model} names a home folder that does not exist", hint="Write the path out.") from error


def _read_gguf_file(path: Path) -> ModelFacts:
    with ExitStack() as stack:
        shards = [(shard, stack.enter_context(_open(shard))) for shard in _gguf_shards(path)]
        try:
            return read_gguf_shards([(stream, shard.stat().st_size) for shard, stream in shards])
        except InvalidModelFile as error:
            last = next((shard for shard, stream in reversed(shards) if stream.tell()), path)  # that anything was read of
            raise InvalidModelFile(f"{last}: {error.message}", hint=error.hint) from error


def _gguf_shards(path: Path) -> list[Path]:
    """All files of a model that was split, whichever of them was given."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[2])
    if not 0 < count <= _MOST_SHARDS:
        raise InvalidModelFile(f"{path} is one of {count} files", hint="Give the first of a model's files.")
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _read_folder(path: Path) -> ModelFacts:
    config = path / "config.json"
    gguf_files = sorted(path.glob("*.gguf"))
    if not config.is_file():
        if len(gguf_files) == 1 or (gguf_files and _SHARD.fullmatch(gguf_files[0].name)):
            return _read_gguf_file(gguf_files[0])
        raise InvalidModelFile(f"{path} holds no config.json", hint="Give a model's folder, or one .gguf file.")
    text = _read_text(config, LARGEST_CONFIG)
    return facts_from_folder(path.name, text, _read_shards(_weight_files(path)))


def _weight_files(path: Path) -> list[Path]:
    """The files of one checkpoint: what the index lists, else the model's shards; some folders hold the weights twice."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = set(orjson.loads(_read_text(index, _LARGEST_INDEX))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidModelFile(f"{index} is not an index", hint="Download it again.") from error
        return [path / name for name in sorted(_beside(index, listed))]
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    _check_count(path, len(files))
    return _all_parts(files)


def _beside(index: Path, listed: set[object]) -> set[str]:
    """The names, if all are files beside the index."""
    _check_count(index, len(listed))
    names = {str(name) for name in listed}
    outside = next((name for name in names if Path(name).name != name or name in ("", "..") or not name.isprintable()), None)
    if outside is not None:
        raise InvalidModelFile(f"{index} names {outside[:80]!r}, which does not lie beside it", hint="Download it again.")
    return names


def _check_count(path: Path, files: int) -> None:
    if files > _MOST_SHARDS:
        raise InvalidModelFile(f"{path} lists {files} weight files", hint="Give the folder of one model.")


def _all_parts(files: list[Path]) -> list[Path]:
    """Refuses a folder in which one of "name-00001-of-00004.safetensors" is missing."""
    names = {file.name for file in files}
    for stem, count in {(match[1], match[2]) for name in names if (match := _PART.fullmatch(name))}:
        for number in range(1, min(int(count), _MOST_SHARDS) + 1):
            if (part := f"{stem}-{number:05d}-of-{count}.safetensors") not in names:
                raise InvalidModelFile(f"{part} is missing beside {files[0]}", hint="Download the model again.")
    return files


def _read_shards(files: Sequence[Path]) -> list[SafeTensor]:
    """The tensors of all files. What their headers have together is counted before the first is read."""
    header_bytes = 0
    for path in files:
        with _open(path) as stream:
            header_bytes += read_header_length(stream, path.stat().st_size)
        if header_bytes > _LARGEST_HEADERS:
            raise InvalidModelFile(
                f"the headers of the weight files up to {path} have {header_bytes} bytes, more than any model's",
                hint="Give the folder of one model.",
            )
    tensors: list[SafeTensor] = []
    for path in files:
        with _open(path) as stream:
            tensors += read_safetensors(stream, path.stat().st_size)
    return tensors


def _open(path: Path) -> BinaryIO:
    """Only a file: a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise InvalidModelFile(f"{path} is not a file", hint="Download the model again.")
    return path.open("rb")


def _read_text(path: Path, limit: int) -> str:
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise InvalidModelFile(f"{path} is larger than {limit} bytes", hint="Give a model's folder.")
    return data.decode("utf-8", "replace")
