"""An engine's own errors: whose fault they are, and how OpenAI would have said it."""

import re
from typing import Any

import orjson

from aimgpu.errors import EngineFailed, EngineUnavailable, InvalidRequest

_OVERLOAD_STATUSES = frozenset({429, 503})
_NOT_OFFERED = frozenset(
    {404, 405, 501}
)  # embeddings of a model that chats: the caller's mistake, so it breaks no promise and shows no broken engine
_REFUSED = 400
_FAILED, _NOT_SUPPORTED = 500, b" is not supported"  # how llama-server answers an image for a model that reads none
_NO_TEXT = b"does not support logits"  # and a chat with one that makes vectors
_MAX_MESSAGE = 500
_MOST_SEARCHED = 8 * 1024
# What llama-server, Ollama and older vLLM answer with 500 although the request is at fault: a grammar, a schema, a template or
# a picture that cannot be parsed. Counted as the caller's, else forty of them would break every promise of the model.
_CALLERS_FAULT = re.compile(
    r"json\.exception|(failed|unable|error|cannot)[^.]{0,40} (pars|initialize samplers|apply template|load (image|audio))"
    r"|(grammar|schema|regex|template|tool)[^.]{0,60}(invalid|unsupported|error|fail|not supported|too (deep|large))"
    r"|(invalid|unsupported|unrecognized|unknown) (grammar|json|schema|regex|tool|message|role|content|pattern|type)",
    re.IGNORECASE,
)
_ENGINES_FAULT = re.compile(r"cuda|hip|rocm|out of memory|device|nccl|kv cache|assert", re.IGNORECASE)
# How llama.cpp names what OpenAI's clients look for by its code.
_CODES = {"exceed_context_size_error": "context_length_exceeded"}


def refuse_failure(status: int, body: bytes, model: str, path: str) -> None:
    """Raises where an engine's answer is not passed on: it is too busy, broken, or offers no such thing."""
    if _REFUSED <= status < _FAILED and status not in _OVERLOAD_STATUSES and status not in _NOT_OFFERED:
        return
    said = _read_error(body).get("message")
    said = said[:_MOST_SEARCHED] if isinstance(said, str) else None
    message = f": {said[:_MAX_MESSAGE]}" if said is not None else ""
    if status in _OVERLOAD_STATUSES:
        raise EngineUnavailable(f"The engine takes no more now ({status}{message}).")
    if status in _NOT_OFFERED or (status == _FAILED and (_NOT_SUPPORTED in body or _NO_TEXT in body)):
        what = path if status in _NOT_OFFERED or _NO_TEXT in body else f"this{message}"
        raise InvalidRequest(f"{model} does not offer {what}.", hint="Ask a model that does.", param="model")
    if status == _FAILED and said is not None and _CALLERS_FAULT.search(said) and not _ENGINES_FAULT.search(said):
        raise InvalidRequest(f"The engine cannot use this request{message}.")
    raise EngineFailed(f"The engine answered {status}{message}.")  # its fault, so not our own 500


def to_openai(status: int, body: bytes) -> bytes:
    """What an engine reports as wrong with a request, in OpenAI's shape; whatever else it reports stays in it."""
    error = _read_error(body)
    message, kind, code = error.get("message"), error.get("type"), error.get("code")
    shaped = {
        "message": message if isinstance(message, str) else f"The engine answered {status}.",
        "type": kind if isinstance(kind, str) else "invalid_request_error",
        "param": error.get("param"),
        "code": code if isinstance(code, str) else _CODES.get(str(kind), "invalid_request"),
    }
    return orjson.dumps({"error": error | shaped})


def _read_error(body: bytes) -> dict[str, Any]:
    """llama.cpp and newer vLLM nest it as OpenAI does, older vLLM does not, Ollama returns a text, FastAPI a "detail"."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    found = parsed.get("error", parsed)
    if isinstance(found, str):
        return {"message": found}
    if not isinstance(found, dict):
        return {}
    if "detail" in found:
        detail = found["detail"]
        return {"message": detail if isinstance(detail, str) else orjson.dumps(detail).decode()}
    return found
