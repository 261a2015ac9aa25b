"""What an answer must not reveal to one key about the requests of another: what the engine had in its prefix cache.

`cached_tokens` and llama.cpp's `timings` and `prompt_progress` say how much of a prompt was sent before, so a caller could
guess the prompts of others, a token at a time.
"""

import functools
import hashlib
import secrets

import orjson

_COUNTS = frozenset({"cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "tokens_cached"})
_REMOVED = frozenset({"timings", "prompt_ms", "prompt_per_second", "prompt_progress", "__verbose"})
_NESTED = frozenset({"usage", "prompt_tokens_details", "input_tokens_details", "response", "message"})
_EVENT_END = b"\n\n"
_DATA = b"data: "
_PROCESS_SECRET = secrets.token_bytes(32)


@functools.lru_cache(maxsize=4096)
def make_cache_salt(caller: str) -> str:
    """The same for all requests of a caller while this process lives, and not to be guessed by another."""
    return hashlib.blake2b(caller.encode(), key=_PROCESS_SECRET, digest_size=16).hexdigest()


def may_reveal(answer: bytes) -> bool:
    """Whether it is worth parsing: most answers are not. Without quotes: frequent bytes make the search slow.

    From the end: such a search stops at the first letter of a word, which is rarer in these answers than the last.
    """
    return answer.rfind(b"timings") >= 0 or answer.rfind(b"cache") >= 0


def hide_cache_use(answer: bytes) -> bytes:
    """A whole JSON answer without what it says about the cache; what is not JSON is left as it is."""
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer
    return orjson.dumps(_hide(parsed)) if isinstance(parsed, dict) else answer


def hide_in_events(events: bytes) -> bytes:
    """The same for whole events of a stream."""
    return _EVENT_END.join(_hide_in_event(event) if may_reveal(event) else event for event in events.split(_EVENT_END))


def _hide_in_event(event: bytes) -> bytes:
    lines = (
        _DATA + hide_cache_use(line.removeprefix(_DATA)) if line.startswith(_DATA) else line for line in event.split(b"\n")
    )
    return b"\n".join(lines)


def _hide(value: object) -> object:
    """Only where usage is reported, not in what the model said: texts are never objects, and tool calls are texts."""
    if isinstance(value, dict):
        return {
            name: 0 if name in _COUNTS and isinstance(each, int) else _hide(each) if name in _NESTED else each
            for name, each in value.items()
            if name not in _REMOVED
        }
    return value
