"""Several choices of one request, served one after another: an engine has no more slots than it was sized for.

There are `n` for each prompt of `/v1/completions`, in the order of the prompts.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from aimgpu.errors import EngineFailed, InvalidRequest
from aimgpu.gateway.apart import apart
from aimgpu.gateway.dialects.call import Call, Fields
from aimgpu.gateway.dialects.translate import EVENT_END, NOT_UNDERSTOOD, WRONG_SHAPES, CollectedAnswer, read_event
from aimgpu.gateway.http.asgi import Message, Send, send_answer

_MOST = 128
_MOST_SENT = 16 * 1024 * 1024
_MOST_ANSWERED = 16 * 1024 * 1024  # all choices together
_LARGEST = (1 << 63) - 1
_DONE = b"[DONE]"
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
ServeOne = Callable[[Call, Fields, Send], Awaitable[None]]


async def serve_choices(call: Call, path: str, fields: Fields, send: Send, serve_one: ServeOne | None = None) -> None:
    prompts, copies = read_prompts(fields), fields.get("n") or 1
    number = len(prompts) * copies
    if number > _MOST:
        text = "'n' must be" if len(prompts) == 1 else "The prompts times 'n' must be"
        raise InvalidRequest(f"{text} at most {_MOST}.", param="n" if len(prompts) == 1 else "prompt")
    shared = {name: value for name, value in fields.items() if name not in ("n", "prompt")}
    repeated = call.size if len(prompts) == 1 else len(await apart(call.size, orjson.dumps, shared))
    if number * repeated > _MOST_SENT:
        text = f"'n' times the request must be at most {_MOST_SENT} bytes: an engine gets it once for each choice."
        raise InvalidRequest(text, hint="Ask for fewer choices at once.", param="n")
    parts = [
        {**shared, **({} if prompt is None else {"prompt": prompt}), **_seed(fields, copy)}
        for prompt in prompts
        for copy in range(copies)
    ]

    async def serve(one: Fields, into: Send) -> None:
        if serve_one is not None:
            await serve_one(call, one, into)
        else:
            await call.serve(path, one, into)

    if fields.get("stream") is True:
        joined = _JoinedStreams(send, number, copies)
        for index, part in enumerate(parts):
            joined.index = index
            await serve(part, joined)
            if joined.ended:
                return
    else:
        answers: list[CollectedAnswer] = []
        for part in parts:
            answers.append(CollectedAnswer())
            await serve(part, answers[-1])
            if not answers[-1].ok:
                await answers[-1].pass_on(send)
                return
            if sum(len(answer.body) for answer in answers) > _MOST_ANSWERED:
                text = f"The choices together are longer than {_MOST_ANSWERED} bytes."
                raise EngineFailed(text, hint="Ask for fewer choices at once.")
        headers = [header for header in answers[0].headers if header[0] != b"content-length"]
        try:
            size = sum(len(answer.body) for answer in answers)
            joined_answer = await apart(size, lambda: orjson.dumps(_join([answer.json() for answer in answers], copies)))
        except WRONG_SHAPES:
            raise EngineFailed("The engine's answer could not be understood.") from None
        await send_answer(send, 200, headers, joined_answer)


def read_prompts(fields: Fields) -> list[Any]:
    """Those of `/v1/completions`, each a text or its tokens; a chat has the one prompt None."""
    prompt: Any = fields.get("prompt")
    several = (
        isinstance(prompt, list) and prompt and "messages" not in fields and all(isinstance(one, str | list) for one in prompt)
    )
    return prompt if several else [prompt]


def _seed(fields: Fields, copy: int) -> Fields:
    """Each choice of a prompt has its own, or all of them would be the same."""
    seed = fields.get("seed")
    if not isinstance(seed, int):
        return {}
    return {"seed": seed + copy if seed + copy <= _LARGEST else seed - copy}


def _join(answers: list[Fields], copies: int) -> Fields:
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    usages = {index: answer.get("usage") or {} for index, answer in enumerate(answers)}
    return {**answers[0], "choices": choices} | {"usage": _add(usages, copies)}


def _add(usages: dict[int, Fields], copies: int) -> Fields:
    """By the index of the choice. A prompt counts once, whatever the number of its choices."""
    prompt: Any = sum(usage.get("prompt_tokens") or 0 for index, usage in usages.items() if index % copies == 0)
    completion = sum(usage.get("completion_tokens") or 0 for usage in usages.values())
    first = next(iter(usages.values()))
    return {**first, **dict(zip(_COUNTS, (prompt, completion, prompt + completion), strict=True))}


class _JoinedStreams:
    """An ASGI `send` that makes one stream of several."""

    def __init__(self, send: Send, number: int, copies: int) -> None:
        self._send = send
        self._number = number
        self._copies = copies
        self.index = 0
        self.ended = False
        self._started = False
        self._id: object = None
        self._usages: dict[int, Fields] = {}
        self._last: Fields = {}
        self._failed: CollectedAnswer | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._failed is not None:
            await self._fail(message)
        else:
            await self._pass(message)

    async def _start(self, message: Message) -> None:
        if message["status"] != 200:  # noqa: PLR2004  # an error is JSON
            self._failed = CollectedAnswer()
            await self._failed(message)
        elif not self._started:
            self._started = True
            await self._send(message)

    async def _fail(self, message: Message) -> None:
        assert self._failed is not None  # noqa: S101  # looked at by the caller
        await self._failed(message)
        if message.get("more_body", False):
            return
        self.ended = True
        if self._started:
            await self._send({"type": "http.response.body", "body": b"data: " + self._failed.body + EVENT_END})
        else:
            await self._failed.pass_on(self._send)

    async def _pass(self, message: Message) -> None:
        events = b"".join(self._translate(event) for event in message.get("body", b"").split(EVENT_END))
        last = not message.get("more_body", False)
        if last and (self.index == self._number - 1 or self.ended):
            if not self.ended:
                events += self._end()
            self.ended = True
            await self._send({"type": "http.response.body", "body": events})
        elif events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    def _translate(self, event: bytes) -> bytes:
        data = read_event(event)
        if data is None or data == _DONE:
            return b""
        try:
            return self._join_chunk(event, orjson.loads(data))
        except WRONG_SHAPES:
            self.ended = True
            return b"data: " + orjson.dumps({"error": NOT_UNDERSTOOD}) + EVENT_END

    def _join_chunk(self, event: bytes, chunk: Fields) -> bytes:
        if "error" in chunk:
            self.ended = True
            return event + EVENT_END
        self._id = self._id or chunk.get("id")
        chunk["id"] = self._id
        self._last = {name: value for name, value in chunk.items() if name not in ("choices", "usage", "timings")}
        usage = chunk.pop("usage", None)
        if isinstance(usage, dict) and all(isinstance(usage.get(name, 0), int) for name in _COUNTS):
            self._usages[self.index] = usage
        if not chunk.get("choices"):
            return b""
        for choice in chunk["choices"]:
            choice["index"] = self.index
        return b"data: " + orjson.dumps(chunk) + EVENT_END

    def _end(self) -> bytes:
        usage = b""
        if self._usages:
            usage = (
                b"data: " + orjson.dumps({**self._last, "choices": [], "usage": _add(self._usages, self._copies)}) + EVENT_END
            )
        return usage + b"data: [DONE]" + EVENT_END
