"""Tokens of a text or a prompt, by the model's own tokenizer."""

from typing import Any

import orjson

from aimgpu.errors import EngineFailed, InvalidRequest
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.openai.chat import CHAT_PATH, model_name, prepare_chat, wait_until_loaded
from aimgpu.gateway.dialects.translate import WRONG_SHAPES, CollectedAnswer, TranslatingSend
from aimgpu.gateway.http.asgi import Send, send_json
from aimgpu.gateway.routes import ServedModel

_PROMPT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs", "response_format")
_LLAMACPP, _VLLM = "llamacpp", "vllm"


async def count_prompt(call: Call, fields: Fields, refused: Send) -> int | None:
    """Tokens of a chat's prompt, template and tools included. None: the engine's refusal went into `refused`."""
    model = call.find(model_name(fields))
    prepared = await prepare_chat(call, fields)
    prompt = {name: prepared[name] for name in _PROMPT_FIELDS if name in prepared}
    answer = CollectedAnswer()
    if model.card.engine == _LLAMACPP:
        await call.serve(f"{CHAT_PATH}/input_tokens", prompt, answer)
        name = "input_tokens"
    elif model.card.engine == _VLLM:
        await call.serve("/tokenize", prompt, answer)
        name = "count"
    else:  # the usage of a one-token answer counts the prompt
        await call.serve(CHAT_PATH, prompt | {"max_tokens": 1}, answer)
        name = "usage"
    if not answer.ok:
        await answer.pass_on(refused)
        return None
    try:
        found = answer.json()[name]
        return int(found["prompt_tokens"] if isinstance(found, dict) else found)
    except WRONG_SHAPES:
        raise EngineFailed("The engine's count could not be understood.") from None


async def tokenize(call: Call) -> None:
    """VLLM's form: `prompt` or `messages` in, `tokens`, `count` and `max_model_len` out. `content` is llama.cpp's `prompt`."""
    fields = await call.read_fields()
    model = call.find(model_name(fields))
    if model.card.engine == _VLLM:
        await call.serve("/tokenize", fields, call.send)
        return
    text = await _prompt(call, fields, model)
    question = {
        "model": model_name(fields),
        "content": text,
        "add_special": fields.get("add_special_tokens", True) is not False,
        "with_pieces": True,
    }
    await call.serve("/tokenize", question, _TokensSend(call.send, model, pieces=bool(fields.get("return_token_strs"))))


async def detokenize(call: Call) -> None:
    fields = await call.read_fields()
    call.find(model_name(fields))
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise InvalidRequest("'tokens' must be an array of integers.", param="tokens")
    await call.serve("/detokenize", {"model": model_name(fields), "tokens": tokens}, _TextSend(call.send))


async def count_response_input(call: Call, chat: Fields) -> None:
    count = await count_prompt(call, chat, call.send)
    if count is not None:
        await send_json(call.send, {"object": "response.input_tokens", "input_tokens": count})


async def _prompt(call: Call, fields: Fields, model: ServedModel) -> str:
    text: Any = fields.get("prompt", fields.get("content"))
    if isinstance(text, str):
        return text
    if not isinstance(fields.get("messages"), list):
        raise InvalidRequest("'prompt' or 'messages' is needed.", param="prompt")
    model = await wait_until_loaded(call, model)
    made = await call.services.ask(model.backends[0], "/apply-template", {"messages": fields["messages"]})
    try:
        return str(orjson.loads(made)["prompt"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise InvalidRequest(f"'{model.name}' cannot make a prompt of these messages.", param="messages") from None


class _Untranslated(TranslatingSend):
    def failure(self, status: int, error: Fields) -> object:  # noqa: ARG002  # the status goes out with the head
        return {"error": error}


class _TokensSend(_Untranslated):
    def __init__(self, send: Send, model: ServedModel, *, pieces: bool) -> None:
        super().__init__(send)
        self._model = model
        self._pieces = pieces

    def whole(self, answer: Fields) -> object:
        tokens = answer["tokens"]
        found: Fields = {
            "tokens": [token["id"] for token in tokens],
            "count": len(tokens),
            "max_model_len": self._model.card.context_tokens,
        }
        if self._pieces:
            found["token_strs"] = [_piece(token["piece"]) for token in tokens]
        return found


class _TextSend(_Untranslated):
    def whole(self, answer: Fields) -> object:
        return {"prompt": answer.get("prompt", answer.get("content"))}


def _piece(piece: object) -> str:
    """llama.cpp gives bytes where they are not whole characters."""
    return bytes(piece).decode("utf-8", "replace") if isinstance(piece, list) else str(piece)
