"""Writes a Whisper with one layer and random weights as CTranslate2 reads it: tiny_whisper.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
import numpy as np
from faster_whisper.tokenizer import _LANGUAGE_CODES  # type: ignore[import-not-found]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]

WIDTH, HEADS = 32, 2
CHANCE = np.random.default_rng(1)


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    spec = ctranslate2.specs.WhisperSpec(1, HEADS, 1, HEADS)
    fill(spec, len(words))
    spec.register_vocabulary(words)
    spec.config.suppress_ids = spec.config.suppress_ids_begin = []
    spec.config.alignment_heads = [[0, 0]]
    spec.config.lang_ids = [tokenizer.token_to_id(f"<|{name}|>") for name in _LANGUAGE_CODES]
    spec.validate()
    spec.save(str(folder))


def make_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    times = (f"{number * 0.02:.2f}" for number in range(1501))
    names = ("endoftext", "startoftranscript", *_LANGUAGE_CODES, *tasks, *times)
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    return tokenizer


def fill(spec: Any, words: int) -> None:
    encoder, decoder = spec.encoder, spec.decoder
    encoder.conv1.weight, encoder.conv1.bias = weights(WIDTH, 80, 3), weights(WIDTH)
    encoder.conv2.weight, encoder.conv2.bias = weights(WIDTH, WIDTH, 3), weights(WIDTH)
    encoder.position_encodings.encodings = weights(1500, WIDTH)
    decoder.position_encodings.encodings = weights(448, WIDTH)
    decoder.embeddings.weight, decoder.projection.weight = weights(words, WIDTH), weights(words, WIDTH)
    for side in (encoder, decoder):
        norm(side.layer_norm)
        for layer in side.layer:
            attend(layer.self_attention, (3, 1))
            norm(layer.ffn.layer_norm)
            linear(layer.ffn.linear_0, 4 * WIDTH, WIDTH)
            linear(layer.ffn.linear_1, WIDTH, 4 * WIDTH)
    for layer in decoder.layer:
        attend(layer.attention, (1, 2, 1))


def attend(spec: Any, widths: tuple[int, ...]) -> None:
    norm(spec.layer_norm)
    for one, width in zip(spec.linear, widths, strict=True):
        linear(one, width * WIDTH, WIDTH)


def linear(spec: Any, outputs: int, inputs: int) -> None:
    spec.weight, spec.bias = weights(outputs, inputs), weights(outputs)


def norm(spec: Any) -> None:
    spec.gamma, spec.beta = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)


def weights(*shape: int) -> Any:
    return CHANCE.normal(0, 0.1, shape).astype(np.float32)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
