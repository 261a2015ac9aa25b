"""LoRA adapters as they lie on disk: what they take, and whether they fit the model and its engine."""

import re
from pathlib import Path
from typing import NoReturn

import orjson

from aimgpu.domain import Adapter, Deployment
from aimgpu.errors import InvalidInput, InvalidModelFile
from aimgpu.files import read_bounded
from aimgpu.sizing import ModelFacts
from aimgpu.sizing.adapters import AdapterFacts
from aimgpu.sizing.formats.gguf import GgufHeader, read_header
from aimgpu.sizing.formats.safetensors import read_safetensors

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PART = "-of-"
_TRAINED_ON = "Use the model that it was trained on."
_LARGEST_CONFIG = 1 << 20
_LARGEST_RANK = 512
_FROM_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.", re.ASCII)
_FORMATS = {"llamacpp": "a GGUF file", "vllm": f"a folder with {_CONFIG} and {_WEIGHTS}"}


def read_adapters(deployment: Deployment, engine: str, model: ModelFacts, path: Path | None) -> tuple[AdapterFacts, ...]:
    """Raises InvalidInput for one that is missing or fits neither. `path`: of the model, if it is here."""
    adapters = deployment.overrides.adapters
    if adapters and engine not in _FORMATS:
        raise InvalidInput(f"{deployment.name}: {engine} takes no adapters here", hint=f"Use {' or '.join(_FORMATS)}.")
    return tuple(_read_one(each, engine, model, path) for each in adapters)


def _read_one(adapter: Adapter, engine: str, model: ModelFacts, path: Path | None) -> AdapterFacts:
    place = Path(adapter.path)
    if not place.exists():
        _refuse(adapter, "does not exist", "Correct its path; a relative one counts from the stack file's folder.")
    if place.is_dir() != (engine == "vllm"):
        _refuse(adapter, f"is no adapter for {engine}", f"{engine} takes {_FORMATS[engine]}.")
    try:
        return _read_folder(adapter, place, model) if place.is_dir() else _read_gguf(adapter, place, path)
    except (OSError, InvalidModelFile, orjson.JSONDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _refuse(adapter, f"cannot be read: {reason}", "Export it again.")


def _read_gguf(adapter: Adapter, place: Path, model: Path | None) -> AdapterFacts:
    """Compared with the model's own tensors, as llama.cpp does when it loads both."""
    header = _header_of(place)
    if header.metadata.get("adapter.type") != "lora":
        hint = "llama.cpp's convert_lora_to_gguf.py makes one of a PEFT folder."
        _refuse(adapter, "is a GGUF file, and no LoRA adapter", hint)
    whole = model is not None and model.is_file() and _PART not in model.name  # else its tensors are in several files
    base = _header_of(model) if model is not None and whole else None
    if base is not None and base.metadata.get("general.architecture") != header.metadata.get("general.architecture"):
        ours, theirs = (one.metadata.get("general.architecture") for one in (header, base))
        _refuse(adapter, f"is for {ours}, and the model is {theirs}", _TRAINED_ON)
    shapes = {one.name: one.shape for one in base.tensors} if base is not None else None
    downs = {one.name.removesuffix(".lora_a"): one.shape for one in header.tensors if one.name.endswith(".lora_a")}
    ups = {one.name.removesuffix(".lora_b"): one.shape for one in header.tensors if one.name.endswith(".lora_b")}
    if not downs or downs.keys() != ups.keys():
        _refuse(adapter, "has not both halves of each of its tensors", "Export it again.")
    for name, down in downs.items():
        own = shapes.get(name) if shapes is not None else (down[0], ups[name][-1])
        if own is None or down[-1] != ups[name][0] or (down[0], ups[name][-1]) != tuple(own[:2]):
            shown = "which the model does not have" if own is None else f"of another size than the model's ({own})"
            _refuse(adapter, f"changes {name}, {shown}", _TRAINED_ON)
    return AdapterFacts(
        name=adapter.name,
        rank=max(shape[-1] for shape in downs.values()),
        targets=tuple(sorted({name.removesuffix(".weight").rpartition(".")[2] for name in downs})),
        tensor_bytes=sum(one.size_bytes for one in header.tensors),
    )


def _read_folder(adapter: Adapter, place: Path, model: ModelFacts) -> AdapterFacts:
    config = orjson.loads(read_bounded(place / _CONFIG, _LARGEST_CONFIG))
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or not 0 < rank <= _LARGEST_RANK or config.get("peft_type") != "LORA":
        _refuse(adapter, f"is no LoRA adapter of a rank up to {_LARGEST_RANK}", f"Its {_CONFIG} says so: peft_type, r.")
    with (place / _WEIGHTS).open("rb") as stream:
        tensors = read_safetensors(stream, (place / _WEIGHTS).stat().st_size)
    shape = model.architecture
    for one in tensors if shape is not None else ():
        layer = _LAYER.search(one.name)
        if layer is not None and shape is not None and int(layer[1]) >= shape.layers:
            _refuse(adapter, f"changes layer {layer[1]} of a model with {shape.layers}", _TRAINED_ON)
        parts = one.name.split(".")
        reads_hidden = "lora_A" in parts and any(target in parts for target in _FROM_HIDDEN)
        if reads_hidden and shape is not None and one.elements != rank * shape.hidden_size:
            reason = f"changes {one.name}, made for a width of {one.elements // rank}, and the model's is {shape.hidden_size}"
            _refuse(adapter, reason, _TRAINED_ON)
    targets = config.get("target_modules")
    return AdapterFacts(
        name=adapter.name,
        rank=rank,
        targets=tuple(sorted(map(str, targets))) if isinstance(targets, list) else (str(targets),),
        tensor_bytes=sum(one.size_bytes for one in tensors),
    )


def _header_of(path: Path) -> GgufHeader:
    with path.open("rb") as stream:
        return read_header(stream, path.stat().st_size)


def _refuse(adapter: Adapter, why: str, hint: str) -> NoReturn:
    raise InvalidInput(f"{adapter.name}: the adapter {adapter.path} {why}", hint=hint)
