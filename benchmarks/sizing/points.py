"""Measured points: a CSV line in, the sizing request of that run out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aimgpu.domain import Vendor
from aimgpu.errors import AimGpuError
from aimgpu.sizing import ModelFacts, SizingRequest, built_in, find_precision
from aimgpu.sizing.version import llamacpp_build

GIB = 1 << 30
_DEFAULT_SEQUENCES = 256  # vLLM's default on most cards
_DEFAULT_TOKENS = 2048
_AMD = ("MI", "GFX", "STRIX", "RADEON", "RX ")
# Names in the points that are no repository id, and the model whose weights they have.
_KNOWN_AS = {
    "Llama-3.x-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "weights 15.27 GiB": "Qwen/Qwen3-8B",
    "unsloth 1.5B bnb-4bit": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",  # 1.49 GiB fits only a head of its own
}
_KV_TYPES = {"f16": "fp16", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", "q8_0": "q8_0", "q4_0": "q4_0"}
_FLASH_BY_DEFAULT_BUILD = 6325
_ENGINES = {name: name for name in ("transformers", "vllm", "llamacpp", "ollama")} | {
    "llama.cpp": "llamacpp",
    "llama-server": "llamacpp",
    "llama-cpp-python": "llamacpp",
}
_QUANTS = {"FP16": "fp16", "BF16": "bf16", "bnb-NF4": "nf4", "bnb-4bit": "nf4", "MXFP4": "mxfp4", "NVFP4": "nvfp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured run, and the request that sizes it."""

    id: str
    engine: str
    model: ModelFacts
    quant: str
    gpus: int
    request: SizingRequest
    measured: Mapping[str, float]  # GiB: weights, kv, activation, total, where the run told
    kv_bytes_per_token: float | None = None


def read_point(cells: Mapping[str, str]) -> Point | str:
    """The point, or why it cannot be used."""
    try:
        return _read_point(cells)
    except (AimGpuError, ValueError) as error:
        return f"{cells['model']}: {error}"


def _read_point(cells: Mapping[str, str]) -> Point | str:
    engine = _ENGINES.get(cells["engine"].strip().lower(), "")
    if not engine:
        return f"engine {cells['engine']} is not sized"
    model = _find_model(cells["model"])
    if model is None:
        return f"{cells['model']} is not in the catalogue"
    # vLLM fills what is left with cache, so its size says nothing; bytes per token do.
    names = ("weights", "activation") if engine == "vllm" else ("weights", "kv", "activation", "total")
    measured = {name: float(cells[f"{name}_gib"]) for name in names if cells.get(f"{name}_gib")}
    if not measured and not cells.get("kv_tokens"):
        return "nothing was measured"
    quant = find_precision(_QUANTS.get(cells["quant"], cells["quant"])).name
    return Point(
        id=cells["id"],
        engine=engine,
        model=model,
        quant=quant,
        gpus=int(cells["tp"] or 1),
        request=_request(cells, engine, model, quant),
        measured=measured,
        kv_bytes_per_token=float(cells["kv_gib"]) * GIB / int(cells["kv_tokens"])
        if cells["kv_gib"] and cells["kv_tokens"]
        else None,
    )


def _kv_bytes_per_token(cells: Mapping[str, str]) -> float | None:
    told = cells.get("kv_gib") and cells.get("kv_tokens")
    return float(cells["kv_gib"]) * GIB / int(cells["kv_tokens"]) if told else None


def _request(cells: Mapping[str, str], engine: str, model: ModelFacts, quant: str) -> SizingRequest:
    def number(name: str) -> int | None:
        return int(cells[name]) if cells.get(name) else None

    prompt, answer = number("input_tokens"), number("output_tokens")
    context = prompt + answer if prompt and answer else number("max_model_len")
    if "excludes un-chunked prefill" in cells.get("note", ""):
        prompt = 1  # such a peak was taken over decoding alone
    sequences, tokens = number("max_num_seqs"), number("max_batched_tokens")
    if engine == "vllm":
        tokens = tokens or context or _DEFAULT_TOKENS  # before chunked prefill a batch held one whole request
        sequences = sequences or (1 if number("max_batched_tokens") else _DEFAULT_SEQUENCES)
    return SizingRequest(
        model=model,
        engine=engine,
        engine_version=cells["engine_version"] or None,
        precision=quant,
        context_tokens=context,
        prompt_tokens=prompt,
        concurrency=sequences or 1,
        batched_tokens=tokens,
        tensor_parallel=int(cells["tp"] or 1),
        gpu=cells["gpu"],
        kv_precision=_KV_TYPES.get(cells.get("kv_dtype", "")) if engine != "transformers" else None,
        flash_attention=_flash_attention(cells, engine),
        vendor=Vendor.AMD if cells["gpu"].upper().startswith(_AMD) or "gfx" in cells["gpu"] else Vendor.NVIDIA,
    )


def _flash_attention(cells: Mapping[str, str], engine: str) -> bool | None:
    """As the note says; else llama.cpp turns it on by itself from build 6325 on, and of others nothing is known."""
    note = cells.get("note", "").lower()
    if re.search(r"(no|without) flash|flash.?att\w* ?(=|:)? ?(0|off)|\bfa ?(=|:)? ?(0|off)", note):
        return False
    told = "flash" in note or re.search(r"\bfa\b", note) is not None
    if engine not in ("llamacpp", "ollama"):
        return told or None
    return told or llamacpp_build(cells["engine_version"]) >= _FLASH_BY_DEFAULT_BUILD


def _find_model(name: str) -> ModelFacts | None:
    """Points name models loosely: by id, without the organisation, or by their weights."""
    bare = re.sub(r"\s*\(.*\)$", "", name).strip()
    bare = re.sub(r"(-FP8|-AWQ|-GGUF|-GPTQ-Int[48])+$", "", _KNOWN_AS.get(bare, bare), flags=re.IGNORECASE)
    found = built_in().find(bare)
    if found is not None:
        return found
    last = bare.split("/")[-1].casefold()
    same = {
        row.facts.name: row.facts
        for row in built_in().rows
        if last in {known.split("/")[-1].casefold() for known in (row.facts.name, *row.aliases)}
    }
    return next(iter(same.values())) if len(same) == 1 else None
