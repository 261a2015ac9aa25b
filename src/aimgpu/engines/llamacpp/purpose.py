"""What a model file is for: text, vectors or scores. llama.cpp has to be started for one of them."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from aimgpu.errors import InvalidModelFile
from aimgpu.sizing.formats.gguf import read_header
from aimgpu.sizing.formats.gguf_facts import RANK_POOLING


class Purpose(StrEnum):
    TEXT = "text"
    EMBEDDING = "embedding"
    RANKING = "reranking"


FLAGS = {purpose.value: purpose for purpose in (Purpose.EMBEDDING, Purpose.RANKING)}


def find_purpose(model_path: Path, flags: Mapping[str, str]) -> Purpose:
    """By the flags that were sized, and for a model that makes vectors by what its file says of them."""
    if "embedding" not in flags:
        return Purpose.TEXT
    try:
        with model_path.open("rb") as stream:
            metadata = read_header(stream, model_path.stat().st_size).metadata
    except (OSError, InvalidModelFile):
        return Purpose.EMBEDDING  # the engine reports what is wrong with the file
    pooling = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return Purpose.RANKING if pooling == RANK_POOLING else Purpose.EMBEDDING
