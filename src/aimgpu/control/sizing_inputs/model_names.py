"""What a model's name means while no file of it is here: which model, published as which files, read by which engine."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aimgpu.engines.models.hub import GGUF, SAFETENSORS, parse_hub_name
from aimgpu.engines.models.packaged import PACKAGED_MODELS, find_packaged
from aimgpu.errors import ModelUnavailable, UnknownModel
from aimgpu.sizing import Catalogue, Row, built_in
from aimgpu.sizing.catalogue import search
from aimgpu.sizing.weights import weight_bytes

Readers = Mapping[str, frozenset[str]]  # formats of each engine that runs here, the best engine first


_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)")
_OLLAMA = re.compile(r"^(?:ollama(?:://|/)|(?:registry\.ollama\.ai/)?library/)")
_MOST_ASKED = 3
_NO_CHAT = ("Embedding", "Reranker", "Guard")  # words of names


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCandidate:
    """A model of the catalogue, in the form that an engine here reads."""

    name: str  # of the catalogue
    model: str  # what to deploy: its id, or the repository of its GGUF files
    engine: str | None  # None: nothing here reads it
    download_bytes: int  # estimated, but for models that come with a package


def published_formats(model: str) -> frozenset[str]:
    """Of a model's files, as far as its name says it without asking anybody; empty: unknown."""
    packaged = find_packaged(model)
    if packaged is not None:
        return frozenset({GGUF, SAFETENSORS} if model.casefold() == packaged.name.casefold() else {GGUF})
    name = parse_hub_name(model)
    if name is None:
        return frozenset()
    if name.tag or name.repository.casefold().endswith("-gguf"):
        return frozenset({GGUF})
    return frozenset({SAFETENSORS}) if built_in().row(model) else frozenset()


def plain_name(typed: str) -> str:
    """Of a hub's address, as a browser shows it, the repository; Ollama's names as Ollama's own command takes them."""
    found = _ADDRESS.match(typed)
    return found[1] if found else _OLLAMA.sub("", typed)


def is_short_name(model: str) -> bool:
    """Neither a path, nor a repository, nor a model that comes with a package: somebody has to say what is meant."""
    return not is_path(model) and parse_hub_name(model) is None and find_packaged(model) is None


def is_path(model: str) -> bool:
    """Written as one, whether or not it is there."""
    return model.casefold().endswith(".gguf") or model.startswith((".", "/", "~"))


def as_gguf(model: str) -> str | None:
    """The repository that has the same model as GGUF files, where one is known."""
    row = built_in().row(model)
    return row.gguf if row else None


def choose_form(row: Row, readers: Readers) -> ModelCandidate:
    """The id, or the GGUF files, for the best engine that reads either."""
    forms = [form for form in (row.facts.name, row.gguf) if form]
    for engine, formats in readers.items():
        for form in forms:
            if formats & (published_formats(form) or formats):
                return _candidate(row, form, engine)
    return _candidate(row, forms[0], None)


def list_candidates(catalogue: Catalogue, text: str, readers: Readers, most: int) -> Iterator[ModelCandidate]:
    """Models whose name has this in it, best first."""
    for row in search(catalogue.rows, text)[:most]:
        yield choose_form(row, readers)


def unreadable(model: str, formats: Iterable[str], why: str) -> ModelUnavailable:
    """A model that is published as files which nothing here reads; `why` ends the sentence."""
    other = _nearest_with_gguf(model)
    hint = f"Use the engine vllm, or a model that has GGUF files, such as `aimgpu run {other}`."
    page_hint: str | None = f"Use the engine vllm, or a model that has GGUF files, such as {other}."
    if (twin := as_gguf(model)) is not None:
        hint = f"`aimgpu run {twin}` serves the same model from GGUF files. Or use the engine vllm."
        page_hint = f"The same model as GGUF files is {twin}. Or use the engine vllm."
    elif GGUF in formats:
        hint, page_hint = "Use the engine llamacpp.", None
    return ModelUnavailable(f"{model} is published as {' and '.join(sorted(formats))}, {why}", hint=hint, page_hint=page_hint)


def _nearest_with_gguf(model: str) -> str:
    """That chats: of the same publisher before others, then by size. The smallest where nothing is known of this one."""
    row = built_in().row(model)
    if row is None:
        return PACKAGED_MODELS[0].name
    publisher, size = model.split("/", maxsplit=1)[0], row.facts.parameters or 0
    found = [
        ((other.facts.name.split("/")[0] != publisher, abs((other.facts.parameters or 0) - size)), other.gguf)
        for other in built_in().rows
        if other.gguf and not any(word in other.facts.name for word in _NO_CHAT)
    ]
    return min(found)[1]


def near_models(catalogue: Catalogue, typed: str, readers: Readers) -> list[str]:
    """What may be meant, as it can be deployed here: what chats first, what nothing here reads last."""
    rows = search(catalogue.rows, typed)
    chats_first = sorted(rows, key=lambda row: any(word in row.facts.name for word in _NO_CHAT))[:_MOST_ASKED]
    forms = sorted((choose_form(row, readers) for row in chats_first), key=lambda form: form.engine is None)
    return [form.model for form in forms]


def unfetchable(model: str, readers: Readers) -> UnknownModel:
    """A short name of a stack file, which no engine here knows; with what to write instead."""
    near = near_models(built_in(), model, readers)
    ask = f"Did you mean `model: {'` or `model: '.join(near)}`? Else write" if near else "Write"
    return UnknownModel(
        f"there is no model {model!r}", hint=f"{ask} a repository of the hub (org/name) or the path of a .gguf file."
    )


def unknown_model(model: str, catalogue: Catalogue) -> UnknownModel:
    """With the names that may be meant."""
    why = catalogue.remark(model)
    near = () if why else catalogue.near(model)
    remark = why or (f"Did you mean {' or '.join(near)}?" if near else None)
    begin = f"{remark} " if remark else ""
    return UnknownModel(
        f"nothing is known of the model {model!r}",
        hint=begin + "Give the path of its folder or .gguf, or a name from `aimgpu catalogue list`; or give its size once: "
        f"`aimgpu catalogue add {model} --parameters 7B`.",
        page_hint=begin + "Choose one of the list, or give the path of its folder or .gguf file.",
        typed=model,
        near=near,
    )


def _candidate(row: Row, model: str, engine: str | None) -> ModelCandidate:
    packaged = find_packaged(model)
    precision = row.facts.precision
    if model == row.gguf:
        facts = built_in().find(model)
        precision = facts.precision if facts else precision
    size = packaged.size_bytes if packaged else weight_bytes(row.facts, precision)
    return ModelCandidate(name=row.facts.name, model=model, engine=engine, download_bytes=size)
