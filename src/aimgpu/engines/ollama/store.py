"""Ollama's own store of models: which file a tag means. Read only; Ollama itself brings and removes what is in it."""

import json
import os
import re
from pathlib import Path

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_LARGEST_MANIFEST = 1 << 20
_WITH_NAMESPACE = 2


def store_folder() -> Path:
    """OLLAMA_MODELS, else the place that Ollama uses by itself."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path("~/.ollama/models").expanduser())


def find_model_file(model: str, store: Path | None = None) -> Path | None:
    """The GGUF file of a tag ("qwen3:4b", "me/mine", "hf.co/org/name:Q4_K_M"); None: it is not in the store."""
    folder = store or store_folder()
    manifest = _manifest_path(folder, model)
    if manifest is None:
        return None
    try:
        if manifest.stat().st_size > _LARGEST_MANIFEST:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [str(layer["digest"]) for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not digests or not _DIGEST.fullmatch(digests[0]):
        return None
    blob = folder / "blobs" / digests[0].replace(":", "-")
    return blob if blob.is_file() else None


def _manifest_path(store: Path, model: str) -> Path | None:
    """As Ollama completes a short name: host, then namespace, then name, then tag."""
    name, _, tag = model.rpartition(":") if ":" in model.rsplit("/", 1)[-1] else (model, "", _TAG)
    parts = name.split("/")
    if len(parts) == 1:
        parts = [_HOST, _NAMESPACE, *parts]
    elif len(parts) == _WITH_NAMESPACE:
        parts = [_HOST, *parts]
    if not all(_PART.fullmatch(part) for part in (*parts, tag)):
        return None
    return store / "manifests" / Path(*parts) / tag
