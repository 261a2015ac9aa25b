"""Which model a pod serves and how, read from what KServe, vLLM and plain Deployments write into a pod; and its size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aimgpu.domain import Footprint, Vendor
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.kubernetes.api.foreign_objects import read_count
from aimgpu.kubernetes.vocabulary.annotations import CONCURRENCY, MODEL, SHARING, containers_of
from aimgpu.sizing import Catalogue, SizingRequest, estimate_need

_STORAGE_ANNOTATION = "internal.serving.kserve.io/storage-initializer-sourceuri"
_STORAGE_CONTAINER = "storage-initializer"
_HUB = "hf://"
_MORE_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"  # of the templates of LLMInferenceServices
_MODEL_FLAGS = ("--model", "--model_id", "--model-id", "--model_path")
_MODEL_VARIABLES = ("MODEL_ID", "HF_MODEL_ID", "MODEL")
_FLAGS = {
    "context_tokens": ("--max-model-len", "--max_model_len", "--max-length"),
    "sequences": ("--max-num-seqs", "--max_num_seqs"),
    "tensor_parallel": ("--tensor-parallel-size", "--tensor_parallel_size", "-tp"),
}
_VLLM_WORDS = (
    "vllm",
    "huggingfaceserver",
    "--max-model-len",
    "--max_model_len",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
)
_BACKEND_FLAGS = ("--backend",)  # of KServe's server for Hugging Face models, which runs vLLM by default


@dataclass(frozen=True, slots=True, kw_only=True)
class PodModel:
    """A model id and the settings that its memory follows from."""

    name: str
    context_tokens: int | None = None
    sequences: int | None = None
    concurrency: int = 1
    tensor_parallel: int = 1
    is_vllm: bool = False


def find_model(annotations: Mapping[str, str], spec: Mapping[str, Any], container: str) -> PodModel | None:
    """None where the pod does not say which model it serves."""
    chosen = next((each for each in containers_of(spec) if each.get("name") == container), {})
    words = engine_words(chosen)
    name = next(_names(annotations, spec, chosen, words), None)
    if name is None:
        return None
    numbers = {field: _number(words, flags) for field, flags in _FLAGS.items()}
    return PodModel(
        name=name,
        context_tokens=numbers["context_tokens"],
        sequences=numbers["sequences"],
        concurrency=read_count(annotations.get(CONCURRENCY)) or numbers["sequences"] or 1,  # what takes N is sized for N
        tensor_parallel=numbers["tensor_parallel"] or 1,
        is_vllm=_text(words, _BACKEND_FLAGS) != "huggingface"
        and any(mark in word for word in (*words, str(chosen.get("image") or "")) for mark in _VLLM_WORDS),
    )


def engine_words(container: Mapping[str, Any]) -> list[str]:
    """Its command line word by word: scripts of a shell, and what KServe's templates take from a variable, included."""
    variables = {str(each.get("name")): str(each.get("value") or "") for each in container.get("env") or ()}
    parts = (*(container.get("command") or ()), *(container.get("args") or ()), variables.get(_MORE_ARGUMENTS, ""))
    return [word for part in parts for word in str(part).split()]


def takes_arguments(container: Mapping[str, Any]) -> bool:
    """Whether arguments that are appended reach the engine: a script of a shell has to pass them on."""
    command = [str(word) for word in container.get("command") or ()]
    return "-c" not in command[:-1] or "$@" in command[command.index("-c") + 1]


def size_model(model: PodModel, catalogue: Catalogue, vendor: Vendor = Vendor.NVIDIA) -> Footprint:
    """What one GPU must hold of it. Raises InvalidInput for a model that is not in the catalogue."""
    facts = catalogue.find(model.name)
    if facts is None:
        near = catalogue.near(model.name)
        raise InvalidInput(
            f"{SHARING}: nothing is known about the model {model.name!r}, so its share cannot be sized",
            hint=f"Did you mean {' or '.join(map(repr, near))}? " if near else "Give gpu-memory (MiB) or gpu-fraction instead.",
        )
    try:
        return estimate_need(
            SizingRequest(
                model=facts,
                engine="vllm",
                context_tokens=model.context_tokens,
                sequences=model.sequences,
                concurrency=model.concurrency,
                tensor_parallel=model.tensor_parallel,
                vendor=vendor,
            )
        )
    except InvalidInput:
        raise
    except AimGpuError as error:
        raise InvalidInput(f"{model.name} cannot be sized: {error.message}", hint=error.hint) from error


def _names(
    annotations: Mapping[str, str], spec: Mapping[str, Any], container: Mapping[str, Any], words: Sequence[str]
) -> Iterator[str]:
    if annotations.get(MODEL):
        yield annotations[MODEL]
    if (given := _text(words, _MODEL_FLAGS)) is not None and not given.startswith("/"):
        yield given.removeprefix(_HUB)
    if "serve" in words[:-1] and not words[words.index("serve") + 1].startswith(("-", "/")):
        yield words[words.index("serve") + 1]
    for variable in container.get("env") or ():
        if variable.get("name") in _MODEL_VARIABLES and variable.get("value"):
            yield str(variable["value"]).removeprefix(_HUB)
    yield from (uri.removeprefix(_HUB) for uri in _storage_uris(annotations, spec) if uri.startswith(_HUB))


def _storage_uris(annotations: Mapping[str, str], spec: Mapping[str, Any]) -> Iterator[str]:
    if _STORAGE_ANNOTATION in annotations:
        yield annotations[_STORAGE_ANNOTATION]
    for container in spec.get("initContainers") or ():
        if container.get("name") == _STORAGE_CONTAINER:
            yield from (str(word) for word in container.get("args") or ())


def _text(words: Sequence[str], flags: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags:
            if equals:
                return value
            return words[index + 1] if index + 1 < len(words) else None
    return None


def _number(words: Sequence[str], flags: Sequence[str]) -> int | None:
    return read_count(_text(words, flags), most=10**9)
