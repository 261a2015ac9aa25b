"""What a folder with config.json and safetensors headers says of a model."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing.formats.config import read_config, read_precision
from aimgpu.sizing.formats.safetensors import DTYPE_BITS, SafeTensor
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind
from aimgpu.sizing.shape import embedding_parameters, layer_parameters, least_parameters

_PRECISION_OF = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
_SCALES = (".scales", ".qzeros", ".g_idx", "_scale", "_scale_inv", "_scales", ".absmax", ".quant_map", ".zero_point")
_PACKED_INTO = ("I32", "U8", "I8", "U32")
_PACKED_BITS = {"int4": 4, "awq": 4, "mxfp4": 4, "nvfp4": 4, "nf4": 4, "int8": 8}


def facts_from_folder(name: str, config_text: str, tensors: Iterable[SafeTensor]) -> ModelFacts:
    """Exact bytes from the tensor tables; the shape from the config."""
    table = tuple(tensors)
    architecture, quantised = read_config(config_text)
    _, unknown = read_precision(config_text)
    if not table:
        return _without_weights(name, config_text, architecture)
    precision = quantised or _main_precision(table)
    names = {tensor.name for tensor in table}
    if architecture is not None:
        architecture = replace(architecture, tied_embeddings=not any(name.endswith("lm_head.weight") for name in names))
    embedding = next((tensor for tensor in table if tensor.name.endswith("embed_tokens.weight")), None)
    parameters = sum(_parameters(tensor, precision) for tensor in table)
    return ModelFacts(
        name=name,
        source="config.json and safetensors headers",
        parameters=parameters,
        precision=precision,
        architecture=architecture,
        tensor_bytes=sum(tensor.size_bytes for tensor in table),
        input_embedding_bytes=embedding.size_bytes if embedding else None,
        remarks=_doubts(parameters, architecture, unknown) if quantised is None else (),
    )


def _without_weights(name: str, config_text: str, architecture: Architecture | None) -> ModelFacts:
    """Facts estimated from the shape in config.json."""
    if architecture is None:
        raise InvalidModelFile(
            "the folder has no safetensors file, and its config.json no layers", hint="Give the folder with the weights."
        )
    precision, unknown = read_precision(config_text)
    if unknown is not None:
        raise InvalidModelFile(
            f"the folder has no safetensors file, and its quantisation ({unknown}) is not known",
            hint="Give the folder with the weights: their bytes are counted then.",
        )
    parameters = embedding_parameters(architecture) + layer_parameters(architecture) + architecture.further_parameters
    remark = f"no weight files: about {parameters} parameters by the layers of config.json, without towers for images or sound"
    return ModelFacts(
        name=name,
        source="config.json",
        parameters=parameters,
        precision=precision,
        architecture=architecture,
        counted=False,
        remarks=(remark,),
    )


def _doubts(parameters: int, architecture: Architecture | None, unknown: str | None) -> tuple[str, ...]:
    if unknown is None:
        return _remarks(parameters, architecture)
    return (f"quantised by a method that is not known ({unknown}): weights are counted as their files have them",)


def _remarks(parameters: int, architecture: Architecture | None) -> tuple[str, ...]:
    """Only of plain decoders: families with experts or states may have other layers than their config's numbers show."""
    if architecture is None or architecture.kind is ModelKind.ENCODER:
        return ()
    least = least_parameters(architecture)
    if architecture.experts or architecture.attention_layers is not None or 2 * parameters >= least:
        return ()
    return (f"the files hold {parameters} parameters, the layers of config.json {least}: weight files may be missing",)


def _parameters(tensor: SafeTensor, precision: str) -> int:
    """Weights of one tensor; packed ones hold several in each element, scales hold none."""
    if tensor.name.endswith(_SCALES):
        return 0
    bits = _PACKED_BITS.get(precision)
    if bits and tensor.dtype in _PACKED_INTO:
        return tensor.elements * (DTYPE_BITS[tensor.dtype] // bits)
    return tensor.elements


def _main_precision(tensors: tuple[SafeTensor, ...]) -> str:
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.dtype] += tensor.elements
    return _PRECISION_OF.get(weights.most_common(1)[0][0], "bf16")
