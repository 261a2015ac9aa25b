"""What Ollama's clients ask about models: lists, what is loaded, one in detail."""

import hashlib
from datetime import UTC, datetime

from aimgpu.gateway.dialects.call import Fields
from aimgpu.gateway.routes import LATEST, ServedModel

_NEVER = "9999-12-31T23:59:59Z"  # Ollama's clients print it as "Forever"
_LOADED = frozenset({"ready", "draining"})
_SCALES = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))


def list_tags(models: tuple[ServedModel, ...]) -> Fields:
    return {"models": [_entry(model) | {"modified_at": _created(model)} for model in models]}


def list_loaded(models: tuple[ServedModel, ...]) -> Fields:
    return {
        "models": [
            _entry(model)
            | {
                "size": model.card.memory_bytes or model.card.weights_bytes or 0,
                "size_vram": 0 if model.simulated else model.card.memory_bytes or 0,
                "expires_at": _NEVER,
                "context_length": model.card.context_tokens or 0,
            }
            for model in models
            if model.state in _LOADED
        ]
    }


def show(model: ServedModel) -> Fields:
    card = model.card
    family = card.family or "unknown"
    info: Fields = {"general.architecture": family, "general.name": model.model}
    if card.parameters is not None:
        info["general.parameter_count"] = card.parameters
    if card.context_tokens is not None:
        info[f"{family}.context_length"] = card.context_tokens
    if card.embedding_length is not None:
        info[f"{family}.embedding_length"] = card.embedding_length
    return {
        "modelfile": f"# Deployed by AIM GPU Sharing as {model.name}.\nFROM {model.model}\n",
        "parameters": f"num_ctx {card.context_tokens}" if card.context_tokens is not None else "",
        "template": "",
        "details": _details(model),
        "model_info": info,
        "capabilities": ["embedding"] if card.embeds else ["completion", "tools"],
        "modified_at": _created(model),
    }


def digest(model: ServedModel) -> str:
    """Of the deployment and what it is made from: clients take two names with one digest for the same model."""
    made_from = f"{model.name}\n{model.model}\n{model.card.quantization}\n{model.card.weights_bytes}"
    return hashlib.sha256(made_from.encode()).hexdigest()


def _entry(model: ServedModel) -> Fields:
    named = model.name if ":" in model.name else model.name + LATEST
    return {
        "name": named,
        "model": named,
        "size": model.card.weights_bytes or 0,
        "digest": digest(model),
        "details": _details(model),
    }


def _details(model: ServedModel) -> Fields:
    card = model.card
    family = card.family or ""
    return {
        "parent_model": model.model,
        "format": card.format or "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(card.parameters) if card.parameters else "",
        "quantization_level": card.quantization or "",
    }


def _created(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()


def _short(count: int) -> str:
    """As model names have it: 135M, 7.6B."""
    scale, letter = next(((scale, letter) for scale, letter in _SCALES if count >= scale), (1, ""))
    number = count / scale
    return f"{number:.0f}{letter}" if number >= 100 else f"{number:.1f}{letter}"  # noqa: PLR2004 -- three digits say enough
