"""Bytes of the weights, on one GPU."""

from aimgpu.domain import Exactness, Term
from aimgpu.sizing.model import ModelFacts
from aimgpu.sizing.precision import find_precision


def weights_term(model: ModelFacts, precision: str, *, tensor_parallel: int, on_host: int) -> Term:
    """Exact from the tensor table where the files are at hand at this precision, else by arithmetic."""
    if model.tensor_bytes is not None and same_precision(model.precision, precision):
        total = model.tensor_bytes - on_host
        return Term(
            name="weights",
            memory_bytes=-(-total // tensor_parallel),
            exactness=Exactness.EXACT if tensor_parallel == 1 else Exactness.ESTIMATED,
            formula="sum of the tensors' bytes in the file header, less what stays on the host",
            inputs={"tensor_bytes": model.tensor_bytes, "on_host_bytes": on_host, "tensor_parallel": tensor_parallel},
        )
    return _by_arithmetic(model, precision, tensor_parallel, on_host)


def weight_bytes(model: ModelFacts, precision: str) -> int:
    """All weights at this precision; what quantisation leaves alone stays at 16 bits."""
    kind = find_precision(precision)
    unquantised = unquantised_parameters(model)
    return round((model.parameters - unquantised) * kind.weight_bytes + unquantised * kind.other_bytes)


def unquantised_parameters(model: ModelFacts) -> int:
    """Embeddings, an untied head, vision towers and norms, which quantisers leave alone."""
    architecture = model.architecture
    if architecture is None:
        return 0
    embeddings = architecture.embedding_parameters * (1 if architecture.tied_embeddings else 2)
    norms = architecture.hidden_size * (2 * architecture.layers + 1)
    return min(model.parameters, embeddings + norms + architecture.encoder_parameters)


def same_precision(one: str, other: str) -> bool:
    """Whether both store the weights in the same way (bf16 and fp16 take the same bytes)."""
    first, second = find_precision(one).name, find_precision(other).name
    return first == second or {first, second} == {"fp16", "bf16"}


def _by_arithmetic(model: ModelFacts, precision: str, tensor_parallel: int, on_host: int) -> Term:
    kind = find_precision(precision)
    exact = model.architecture is not None and kind.name in ("fp32", "fp16", "bf16") and tensor_parallel == 1
    return Term(
        name="weights",
        memory_bytes=-(-(weight_bytes(model, precision) - on_host) // tensor_parallel),
        exactness=Exactness.EXACT if exact else Exactness.ESTIMATED,
        formula="parameters of linear layers x bytes per weight + embeddings, head, norms x 2 B, less what stays on the host",
        inputs={
            "parameters": model.parameters,
            "unquantised_parameters": unquantised_parameters(model),
            "bytes_per_weight": str(kind.weight_bytes),
            "on_host_bytes": on_host,
            "tensor_parallel": tensor_parallel,
        },
    )
