"""Bytes of the weights, on one GPU."""

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.formats.gguf_mixes import GGUF_MIXES, embedding_bytes, mix_bytes
from aimgpu.sizing.model import Architecture, ModelFacts
from aimgpu.sizing.precision import find_precision
from aimgpu.sizing.shape import embedding_parameters, expert_parameters

_FROM_FILES = "sum of the tensors in the file headers, less what stays on the host, plus buffers"
_FROM_ARITHMETIC = (
    "weights of linear layers x bytes per weight + embeddings, head and norms x 2 B, less what stays on the host, plus buffers"
)


def weights_term(model: ModelFacts, precision: str, *, tensor_parallel: int, on_host: int = 0, beside: int = 0) -> Term:
    """Exact from the tensor table where the files are at hand at this precision, else by arithmetic.

    `on_host` bytes are not on the GPU; `beside` bytes are buffers that every GPU holds in addition.
    """
    from_files = model.tensor_bytes is not None and same_precision(model.precision, precision)
    total = model.tensor_bytes if from_files and model.tensor_bytes is not None else weight_bytes(model, precision)
    inputs: dict[str, int | str] = {"parameters": model.parameters, "total_bytes": total}
    if not from_files:
        inputs["bytes_per_weight"] = str(find_precision(precision).weight_bytes)
        inputs["unquantised_parameters"] = unquantised_parameters(model, find_precision(precision).name)
    return Term(
        name="weights",
        memory_bytes=-(-max(total - on_host, 0) // tensor_parallel) + beside,
        exactness=Exactness.EXACT
        if tensor_parallel == 1 and (from_files or _is_plain(model, precision))
        else Exactness.ESTIMATED,
        formula=_FROM_FILES if from_files else _FROM_ARITHMETIC,
        inputs=inputs | {"on_host_bytes": on_host, "beside_bytes": beside, "tensor_parallel": tensor_parallel},
    )


def weight_bytes(model: ModelFacts, precision: str) -> int:
    """All weights at this precision; what quantisation leaves alone stays at 16 bits."""
    kind = find_precision(precision)
    if kind.name in GGUF_MIXES and model.architecture is not None:
        return mix_bytes(model, model.architecture, GGUF_MIXES[kind.name])
    unquantised = unquantised_parameters(model, kind.name)
    return round((model.parameters - unquantised) * kind.weight_bytes + unquantised * kind.other_bytes)


def unquantised_parameters(model: ModelFacts, precision: str) -> int:
    """Embeddings, an untied head, vision towers and norms, which quantisers leave alone; MXFP4 leaves all but the experts."""
    architecture = model.architecture
    if architecture is None:
        return 0
    if precision == "mxfp4" and architecture.experts:
        return max(model.parameters - expert_parameters(architecture), 0)
    norms = architecture.hidden_size * (2 * architecture.layers + 1)
    return min(model.parameters, embedding_parameters(architecture) + norms + architecture.encoder_parameters)


def input_embedding_bytes(model: ModelFacts, architecture: Architecture, precision: str) -> int:
    """The table that turns tokens into vectors, at this precision."""
    kind = find_precision(precision)
    if model.input_embedding_bytes is not None and same_precision(model.precision, precision):
        return model.input_embedding_bytes
    if kind.name in GGUF_MIXES:
        return embedding_bytes(architecture, GGUF_MIXES[kind.name])
    return round(architecture.embedding_parameters * kind.other_bytes)


def same_precision(one: str, other: str) -> bool:
    """Whether both store the weights in the same way (bf16 and fp16 take the same bytes)."""
    first, second = find_precision(one).name, find_precision(other).name
    return first == second or {first, second} == {"fp16", "bf16"}


def _is_plain(model: ModelFacts, precision: str) -> bool:
    """Whether every weight takes the same bytes, so that the published parameter count is all there is to know."""
    return model.counted and model.architecture is not None and find_precision(precision).name in ("fp32", "fp16", "bf16")
