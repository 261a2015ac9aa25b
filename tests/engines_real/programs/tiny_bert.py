"""Writes a BERT with one layer and random weights as transformers saves it: tiny_bert.py FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast  # type: ignore[import-not-found]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(7)
    shape = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertModel(shape).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
