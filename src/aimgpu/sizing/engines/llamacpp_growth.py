"""What llama.cpp and Ollama make of more memory than they need, one step after the other.

They reserve the whole context of every slot, so more memory is of use only with more slots or a longer context. Slots come
first: with one, every other request waits, whatever its length. Sixteen keep llama.cpp's decoding well filled (up to eight
sequences CUDA and HIP multiply vectors, `MMVQ_MAX_BATCH_SIZE` in ggml; beyond that matrices). Then a context up to the trained
length, which only long requests feel; then slots again, up to 64, which every build takes (`LLAMA_MAX_SEQ`).
"""

from collections.abc import Iterator
from dataclasses import replace

from aimgpu.sizing.model import Architecture
from aimgpu.sizing.request import SizingRequest
from aimgpu.units import GIB

FEW_SLOTS = 16
MOST_SLOTS = 64
_MORE_SLOTS = 2  # at once, beyond the first few
_STEPS_PER_DOUBLING = 8  # of the context
# Ollama (0.33.0, llm/llama_server.go) starts llama-server with `--fit`, which moves layers to the host where less than 1 GiB
# would stay free, and takes larger batches for longer contexts.
OLLAMA_FREE_BYTES = GIB
# Served one request at a time whatever it is set to (server/sched.go in 0.33.0), by the names of GGUF files and of config.json.
_OLLAMA_ONE_SLOT = frozenset(
    {"mllama", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe"}
    | {"nemotronh", "nemotronhmoe", "nemotronhomni"}
)


def with_free_slots(request: SizingRequest) -> SizingRequest:
    """One request at once, and more where the grant is larger than the need."""
    return replace(request, concurrency=1, free_slots=True)


def larger_requests(request: SizingRequest) -> Iterator[SizingRequest]:
    """Each with a little more of what the user did not give, in the order in which memory is given out.

    None where the model's shape is not known, which makes its cache a guess, and none for an encoder, which has no cache.
    """
    shape = request.model.architecture
    if shape is None or request.is_encoder:
        return
    takes_slots = request.free_slots and not _has_one_slot(request, shape)
    for slots in range(request.concurrency + 1, FEW_SLOTS + 1) if takes_slots else ():
        request = replace(request, concurrency=slots)
        yield request
    for context in _longer_contexts(request.context, shape.max_context) if request.context_tokens is None else ():
        request = replace(request, context_tokens=context)
        yield request
    for slots in range(FEW_SLOTS + _MORE_SLOTS, MOST_SLOTS + 1, _MORE_SLOTS) if takes_slots else ():
        request = replace(request, concurrency=slots)
        yield request


def _has_one_slot(request: SizingRequest, shape: Architecture) -> bool:
    return request.engine == "ollama" and shape.family.replace("_", "") in _OLLAMA_ONE_SLOT


def _longer_contexts(context: int, trained: int) -> Iterator[int]:
    """An eighth longer at a time, counted from each doubling, and the trained length last."""
    while context < trained:
        for eighths in range(1, _STEPS_PER_DOUBLING + 1):
            longer = context + context * eighths // _STEPS_PER_DOUBLING
            if longer >= trained:
                yield trained
                return
            yield longer
        context *= 2
