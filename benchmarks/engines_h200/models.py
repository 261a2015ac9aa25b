"""Model folders for vLLM without weights: config, tokenizer, and safetensors files that are holes behind a true header.

vLLM starts them with `--load-format dummy`, which fills the weights with random numbers on the GPU; the sizing reads the
headers as it would those of a published model. A folder of 14 billion parameters takes a few kilobytes of disk.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder in the form of Llama, or of Qwen2 where `biased`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 32_000
    tied: bool = False
    biased: bool = False
    context: int = 32_768

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, as published models have them."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                found[f"{at}.self_attn.{name}.weight"] = (width, self.hidden)
                if self.biased:
                    found[f"{at}.self_attn.{name}.bias"] = (width,)
            found[f"{at}.self_attn.o_proj.weight"] = (self.hidden, queries)
            for name in ("gate_proj", "up_proj"):
                found[f"{at}.mlp.{name}.weight"] = (self.inner, self.hidden)
            found[f"{at}.mlp.down_proj.weight"] = (self.hidden, self.inner)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{at}.{name}.weight"] = (self.hidden,)
        found["model.norm.weight"] = (self.hidden,)
        return found

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM" if self.biased else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.biased else "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "eos_token_id": 1,
            "bos_token_id": 2,
            "attention_bias": False,
            "mlp_bias": False,
        }


SHAPES = {
    "tiny": Shape(hidden=256, layers=2, heads=4, kv_heads=2, inner=512, context=8192),
    "0.5b": Shape(hidden=896, layers=24, heads=14, kv_heads=2, inner=4864, vocabulary=151_936, tied=True, biased=True),
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192),
    "1.5b": Shape(hidden=1536, layers=28, heads=12, kv_heads=2, inner=8960, vocabulary=151_936, tied=True, biased=True),
    "3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, inner=8192),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, inner=14_336, vocabulary=128_256),
    "14b": Shape(hidden=5120, layers=48, heads=40, kv_heads=8, inner=13_824, vocabulary=152_064, biased=True),
}


def write_model(folder: Path, shape: Shape) -> Path:
    """The folder; one that is there already is left as it is."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_weights(folder / "model.safetensors", shape.tensors())
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: every byte is a token, so that any text can be read."""
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *_byte_alphabet()))}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[word], "content": word, **special} for word in _SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False, "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32_768,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_alphabet() -> list[str]:
    """One printable letter per byte, as byte-level tokenizers write them: printable Latin-1 as it is, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (code for code in range(256) if code not in printable)
    letters = {code: chr(code) for code in printable} | {code: chr(256 + number) for number, code in enumerate(others)}
    return [letters[code] for code in range(256)]


def _write_weights(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
