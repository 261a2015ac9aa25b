"""What a GGUF header says of the model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing.formats.gguf import GgufHeader, Scalar, read_header
from aimgpu.sizing.model import Architecture, ModelFacts, ModelKind

_ENCODERS = frozenset({"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert"})
RANK_POOLING = 4  # llama.cpp's LLAMA_POOLING_TYPE_RANK
_LARGEST_NUMBER = 1 << 31
_LARGEST_HEADERS = 256 << 20  # of all files together
_WINDOW_EVERY = {
    "gemma2": 2,
    "gemma3": 6,
    "gpt-oss": 2,
    "cohere2": 4,
    "olmo2": 4,
}  # one layer in these looks back in full


def read_gguf(stream: BinaryIO, file_bytes: int) -> ModelFacts:
    """Facts of a GGUF file from its header alone; the tensor bytes are exact."""
    return read_gguf_shards([(stream, file_bytes)])


def read_gguf_shards(shards: Sequence[tuple[BinaryIO, int]]) -> ModelFacts:
    """Facts of a model in several files, in their order: the first carries the metadata, all carry tensors."""
    headers: list[GgufHeader] = []
    for stream, file_bytes in shards:
        headers.append(read_header(stream, file_bytes))
        if sum(one.tell() for one, _ in shards[: len(headers)]) > _LARGEST_HEADERS:
            raise InvalidModelFile("the headers of the files are too large together", hint="Give the files of one model.")
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if not tensors:
        raise InvalidModelFile("the GGUF file holds no tensors", hint="Give the file with the weights, not a vocabulary.")
    return _facts(replace(headers[0], tensors=tensors))


def _facts(header: GgufHeader) -> ModelFacts:
    by_name = {tensor.name: tensor for tensor in header.tensors}
    embedding = by_name.get("token_embd.weight")
    name = header.metadata.get("general.name")
    experts_used = _Numbers(header).number("expert_used_count")
    parameters = sum(tensor.elements for tensor in header.tensors)
    return ModelFacts(
        in_gguf=True,
        ranks=_Numbers(header).number("pooling_type") == RANK_POOLING,
        name=name if isinstance(name, str) else "model",
        source="GGUF header",
        parameters=parameters,
        precision=_main_type(header),
        active_parameters=_active(header, experts_used) if experts_used else None,
        architecture=_architecture(header, tied="output.weight" not in by_name),
        tensor_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        input_embedding_bytes=embedding.size_bytes if embedding else None,
    )


class _Numbers:
    """The header's numbers under the prefix of its architecture."""

    def __init__(self, header: GgufHeader) -> None:
        family = header.metadata.get("general.architecture")
        self.family = family if isinstance(family, str) else "unknown"
        self._metadata = header.metadata

    def number(self, key: str, default: int = 0) -> int:
        """The value, or the largest of a per-layer array; a number that no model has is refused."""
        value = self._metadata.get(f"{self.family}.{key}")
        numbers = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, int | float)]
        if not numbers:
            return default
        largest = max(numbers)
        if not all(0 <= number <= _LARGEST_NUMBER for number in numbers):  # false for NaN too
            raise InvalidModelFile(f"the GGUF header says {key} = {largest}", hint="Download the file again.")
        return int(largest)

    def per_layer(self, key: str) -> tuple[Scalar, ...] | None:
        value = self._metadata.get(f"{self.family}.{key}")
        return value if isinstance(value, tuple) else None


def _architecture(header: GgufHeader, *, tied: bool) -> Architecture | None:
    numbers = _Numbers(header)
    layers, hidden = numbers.number("block_count"), numbers.number("embedding_length")
    heads = numbers.number("attention.head_count")
    if not layers or not hidden or not heads or heads > hidden:
        return None
    layers -= min(numbers.number("nextn_predict_layers"), layers - 1)
    window = numbers.number("attention.sliding_window")
    shared = min(numbers.number("attention.shared_kv_layers"), layers - 1)  # such layers use the cache of an earlier one
    attention_layers = max(_attention_layers(numbers, layers) - shared, 0)
    return Architecture(
        family=numbers.family,
        kind=ModelKind.ENCODER if numbers.family in _ENCODERS else ModelKind.DECODER,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=_kv_heads(numbers, heads, sliding=False),
        head_dim=numbers.number("attention.key_length") or hidden // heads,
        intermediate_size=numbers.number("feed_forward_length"),
        vocab_size=numbers.number("vocab_size") or header.array_lengths.get("tokenizer.ggml.tokens", 0),
        tied_embeddings=tied,
        max_context=numbers.number("context_length"),
        sliding_window=window,
        sliding_layers=_sliding_layers(numbers, layers - shared) if window else 0,
        sliding_kv_elements=_sliding_kv_elements(numbers, heads) if window else 0,
        attention_layers=attention_layers if attention_layers < layers else None,
        state_elements=_state_elements(numbers) * max(layers - attention_layers - shared, 0),
        kv_lora_rank=numbers.number("attention.kv_lora_rank"),
        rope_head_dim=numbers.number("rope.dimension_count") if numbers.number("attention.kv_lora_rank") else 0,
        experts=numbers.number("expert_count"),
        experts_used=numbers.number("expert_used_count"),
        expert_intermediate_size=numbers.number("expert_feed_forward_length"),
    )


def _attention_layers(numbers: _Numbers, layers: int) -> int:
    per_layer = numbers.per_layer("attention.head_count_kv")
    if per_layer is not None:
        return sum(1 for heads in per_layer[:layers] if heads)
    every = numbers.number("full_attention_interval") if numbers.number("ssm.state_size") else 0
    return layers // every if every else layers


def _kv_heads(numbers: _Numbers, default: int, *, sliding: bool) -> int:
    """Of the layers that see everything, or of those with a window, where the header lists them layer by layer."""
    counts = numbers.per_layer("attention.head_count_kv")
    pattern = numbers.per_layer("attention.sliding_window_pattern")
    if counts is None or pattern is None:
        return numbers.number("attention.head_count_kv", default)
    kept = [count for count, slides in zip(counts, pattern, strict=False) if bool(slides) is sliding and isinstance(count, int)]
    return max(kept, default=numbers.number("attention.head_count_kv", default))


def _sliding_kv_elements(numbers: _Numbers, heads: int) -> int:
    """Keys and values of one token in a window layer, where its heads are not as wide as the others'."""
    keys = numbers.number("attention.key_length_swa")
    return _kv_heads(numbers, heads, sliding=True) * (keys + numbers.number("attention.value_length_swa", keys)) if keys else 0


def _sliding_layers(numbers: _Numbers, layers: int) -> int:
    pattern = numbers.per_layer("attention.sliding_window_pattern")
    if pattern is not None:
        return sum(1 for slides in pattern[:layers] if slides)
    every = numbers.number("attention.sliding_window_pattern") or _WINDOW_EVERY.get(numbers.family, 0)
    return layers - layers // every if every else layers


def _state_elements(numbers: _Numbers) -> int:
    """Elements one SSM layer keeps for a sequence: the convolution's window and the state itself."""
    inner, state = numbers.number("ssm.inner_size"), numbers.number("ssm.state_size")
    convolution, groups = numbers.number("ssm.conv_kernel"), numbers.number("ssm.group_count")
    return max(convolution - 1, 0) * (inner + 2 * groups * state) + state * inner


def _main_type(header: GgufHeader) -> str:
    weights: Counter[str] = Counter()
    for tensor in header.tensors:
        weights[tensor.type] += tensor.elements
    return weights.most_common(1)[0][0]


def _active(header: GgufHeader, used: int) -> int:
    experts = max(_Numbers(header).number("expert_count"), 1)
    routed = sum(tensor.elements for tensor in header.tensors if "_exps." in tensor.name)
    return sum(tensor.elements for tensor in header.tensors) - routed + routed * used // experts
