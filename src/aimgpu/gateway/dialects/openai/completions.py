"""`/v1/completions`: the fields that engines do not read are honoured here or refused, never ignored."""

from typing import Any

import orjson

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.body import check_fields
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import COUNTS_CHOICES, model_name, wants_many
from aimgpu.gateway.dialects.openai.choices import read_prompts, serve_choices
from aimgpu.gateway.dialects.translate import EVENT_END, TranslatingSend
from aimgpu.gateway.http.asgi import Send

_SPECIAL_FIELDS = frozenset({"n", "echo", "suffix", "best_of", "logprobs"})
_READS_ALL = frozenset({"vllm"})  # but for what no engine reads
_READS_SUFFIX = frozenset({"ollama"})
_MOST_LOGPROBS = 20


def is_special_completion(fields: Fields) -> bool:
    """Whether an engine may not be able to answer it alone: llama.cpp counts one of several prompts, Ollama takes one text."""
    return not _SPECIAL_FIELDS.isdisjoint(fields) or isinstance(fields.get("prompt"), list)


async def complete(call: Call) -> None:
    fields = await call.read_fields()
    model = call.find(model_name(fields))
    check_fields(call.path, fields)
    fields = _checked(fields, str(model.card.engine))
    if model.card.engine in COUNTS_CHOICES:
        await _complete_one(call, fields, call.send)
    elif wants_many(fields) or len(prompts := read_prompts(fields)) > 1:
        await serve_choices(call, call.path, fields, call.send, _complete_one)
    else:
        await _complete_one(call, {**fields, "prompt": prompts[0]}, call.send)


async def _complete_one(call: Call, fields: Fields, send: Send) -> None:
    engine = call.find(model_name(fields)).card.engine
    echo, logprobs = fields.get("echo") is True, fields.get("logprobs") is not None
    if engine is None or engine in _READS_ALL or not (echo or logprobs):
        await call.serve(call.path, fields, send)
        return
    (prompt,) = read_prompts(fields)
    if echo and (logprobs or not isinstance(prompt, str)):
        raise InvalidRequest("'echo' is offered for prompts of text, without 'logprobs'.", param="echo")
    asked = {name: value for name, value in fields.items() if name != "echo"}
    await call.serve(call.path, asked, _CompletionSend(send, prompt if echo and isinstance(prompt, str) else ""))


def _checked(fields: Fields, engine: str) -> Fields:
    if fields.get("suffix") and engine not in _READS_SUFFIX:
        raise InvalidRequest("'suffix' is not offered.", hint="Put what follows into the prompt.", param="suffix")
    best_of: Any = fields.get("best_of")
    if best_of is not None and best_of != (fields.get("n") or 1):
        raise InvalidRequest("'best_of' is not offered: every choice is returned.", hint="Use 'n'.", param="best_of")
    logprobs: Any = fields.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or not 0 <= logprobs <= _MOST_LOGPROBS):
        raise InvalidRequest(f"'logprobs' must be an integer from 0 to {_MOST_LOGPROBS}.", param="logprobs")
    return {name: value for name, value in fields.items() if name not in ("best_of", "suffix") or (name == "suffix" and value)}


class _CompletionSend(TranslatingSend):
    """The prompt before the first text, and probabilities in the shape of completions where an engine gave that of a chat."""

    def __init__(self, send: Send, prompt: str) -> None:
        super().__init__(send)
        self._prompt = prompt
        self._offset = 0

    def whole(self, answer: Fields) -> object:
        self._change(answer)
        return answer

    def failure(self, status: int, error: Fields) -> object:  # noqa: ARG002  # the status goes out with the head
        return {"error": error}

    def event(self, chunk: Fields) -> bytes:
        self._change(chunk)
        return b"data: " + orjson.dumps(chunk) + EVENT_END

    def end(self) -> bytes:
        return b"data: [DONE]" + EVENT_END

    def _change(self, answer: Fields) -> None:
        for choice in answer.get("choices") or ():
            choice["text"] = self._prompt + (choice.get("text") or "")
            self._prompt = ""
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
                choice["logprobs"] = self._of_tokens(logprobs["content"])

    def _of_tokens(self, tokens: list[Fields]) -> Fields:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{one["token"]: one["logprob"] for one in token.get("top_logprobs") or ()} for token in tokens],
            "text_offset": offsets,
        }
