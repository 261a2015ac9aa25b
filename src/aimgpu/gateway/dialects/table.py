"""Every operation of every dialect, by method and path."""

from collections.abc import Mapping

from aimgpu.errors import MethodNotAllowed
from aimgpu.gateway.dialects.anthropic import OPERATIONS as ANTHROPIC
from aimgpu.gateway.dialects.call import Operation
from aimgpu.gateway.dialects.ollama import OPERATIONS as OLLAMA
from aimgpu.gateway.dialects.openai.chat import chat, is_special_chat
from aimgpu.gateway.dialects.openai.completions import complete, is_special_completion
from aimgpu.gateway.dialects.openai.passed import pass_form, pass_on, rerank
from aimgpu.gateway.dialects.openai.tokens import detokenize, tokenize
from aimgpu.gateway.dialects.responses import OPERATIONS as RESPONSES

OPENAI = (
    Operation(method="POST", path="/v1/rerank", handle=rerank, summary="Order documents by a query."),
    Operation(method="POST", path="/v1/audio/transcriptions", handle=pass_form, summary="Speech to text."),
    Operation(method="POST", path="/v1/audio/translations", handle=pass_form, summary="Speech to English text."),
    Operation(method="POST", path="/v1/audio/speech", handle=pass_on, summary="Text to speech."),
    Operation(method="POST", path="/v1/images/generations", handle=pass_on, summary="Make images from a text."),
    Operation(method="POST", path="/v1/images/edits", handle=pass_form, summary="Change an image as a text says."),
    Operation(method="POST", path="/v1/images/variations", handle=pass_form, summary="Make images like one."),
    Operation(method="POST", path="/v1/tokenize", handle=tokenize, summary="The tokens of a text or of a chat's prompt."),
    Operation(method="POST", path="/v1/detokenize", handle=detokenize, summary="The text of tokens."),
)
OPERATIONS: tuple[Operation, ...] = (*OPENAI, *RESPONSES, *ANTHROPIC, *OLLAMA)
# Answered by the application itself unless a request has one of these fields.
CHAT = Operation(method="POST", path="/v1/chat/completions", handle=chat, summary="Chat.")
COMPLETIONS = Operation(method="POST", path="/v1/completions", handle=complete, summary="Complete a text.")
BEYOND_ENGINES = {CHAT.path: (CHAT, is_special_chat), COMPLETIONS.path: (COMPLETIONS, is_special_completion)}


def find_operation(method: str, path: str) -> Operation | None:
    """None: no dialect has this path. Raises MethodNotAllowed."""
    found = _BY_PATH.get(path) or _find_pattern(path)
    if found is None:
        return None
    operation = found.get("GET" if method == "HEAD" else method)
    if operation is None:
        error = MethodNotAllowed(f"{path[:100]} takes {' or '.join(found)}.")
        error.allowed = ", ".join(found)
        raise error
    return operation


def _find_pattern(path: str) -> Mapping[str, Operation] | None:
    """By a path with `{id}` in it."""
    parts = path.split("/")
    for pattern, methods in _PATTERNS:
        if len(parts) == len(pattern) and all(ours in (_ID, theirs) for ours, theirs in zip(pattern, parts, strict=True)):
            return methods
    return None


def _index() -> Mapping[str, Mapping[str, Operation]]:
    found: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        found.setdefault(operation.path, {})[operation.method] = operation
    return found


_ID = "{id}"
_BY_PATH = _index()
_PATTERNS = tuple((path.split("/"), methods) for path, methods in _BY_PATH.items() if _ID in path)
