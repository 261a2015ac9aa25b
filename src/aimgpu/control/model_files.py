"""Opens model files and hands bounded streams to the pure readers of the sizing room."""

from dataclasses import replace
from pathlib import Path

from aimgpu.errors import InvalidModelFile, UnknownModel
from aimgpu.sizing import Catalogue, ModelFacts, built_in, read_gguf


def find_model_facts(
    model: str, path: Path | None = None, *, parameters: int | None = None, catalogue: Catalogue | None = None
) -> ModelFacts:
    """Facts from the best source at hand: the files, the catalogue, the given parameter count. Never a guess from the name."""
    local = path or _local_path(model)
    if local is not None:
        return replace(read_local_model(local), name=model)
    known = (catalogue or built_in()).find(model)
    if known is not None:
        return known
    if parameters is not None:
        return ModelFacts(name=model, source="parameter count given by the user", parameters=parameters, precision="fp16")
    raise UnknownModel(
        f"nothing is known of the model {model!r}",
        hint="Give the path of its folder or .gguf, a name from `aimgpu catalogue list`, or its size (--parameters 7B).",
    )


def read_local_model(path: Path) -> ModelFacts:
    """Facts of a .gguf file, from its header."""
    if not path.is_file() or path.suffix.lower() != ".gguf":
        raise InvalidModelFile(f"{path} is no .gguf file", hint="Give the .gguf file itself.")
    try:
        with path.open("rb") as stream:
            return read_gguf(stream, path.stat().st_size)
    except OSError as error:
        raise InvalidModelFile(f"cannot read {path}: {error.strerror}", hint="Check the path and its permissions.") from error


def _local_path(model: str) -> Path | None:
    """A path only where it is written as one: "org/name" is a model id, not a folder that happens to exist."""
    if model.lower().endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
        return Path(model).expanduser()
    return None
