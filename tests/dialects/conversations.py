"""A model's answer as data, as an engine would send it, and as each dialect's caller reads it back."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from tests.gateway.memory import json_reads, stream_reads
from tests.http_answer import HttpAnswer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
ARGUMENTS = st.dictionaries(TEXTS, st.one_of(st.integers(-99, 99), TEXTS, st.booleans(), st.none()), max_size=2)
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ToolCall:
    identity: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a model answered: thoughts, text, tool calls, and how it ended."""

    thinking: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reason: str = "stop"
    prompt_tokens: int = 7
    output_tokens: int = 5

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.output_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.output_tokens, "total_tokens": total}


@st.composite
def answers(draw: st.DrawFn, *, tools: bool = True, thinking: bool = True) -> Said:
    calls = draw(st.lists(ARGUMENTS, max_size=2)) if tools else []
    reason = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    return Said(
        thinking=draw(TEXTS) if thinking else "",
        text=draw(TEXTS),
        calls=tuple(ToolCall(f"call_{index}", f"tool_{index}", arguments) for index, arguments in enumerate(calls)),
        reason=reason,
        prompt_tokens=draw(st.integers(0, 50)),
        output_tokens=draw(st.integers(0, 50)),
    )


@dataclass
class Cutter:
    """Cuts texts where the test chose; the cuts are used again and again."""

    sizes: list[int]
    _at: int = field(default=0)

    def cut(self, text: str) -> list[str]:
        parts = []
        while text:
            size = self.sizes[self._at % len(self.sizes)]
            self._at += 1
            parts.append(text[:size])
            text = text[size:]
        return parts


CUTTERS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(Cutter)


def to_chunks(said: Said, cutter: Cutter, *, thinking_name: str = "reasoning_content", empties: bool = False) -> list[Any]:
    """OpenAI's chunks of a stream, as engines send them: a role first, the reason and the usage last."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if empties else ""}]
    deltas += [{thinking_name: part} for part in cutter.cut(said.thinking)]
    deltas += [{"content": part} for part in cutter.cut(said.text)]
    for index, call in enumerate(said.calls):
        first = {"index": index, "id": call.identity, "type": "function", "function": {"name": call.name, "arguments": ""}}
        deltas.append({"tool_calls": [first]})
        arguments = cutter.cut(json.dumps(call.arguments))
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in arguments]
    if empties:
        deltas = [delta for each in deltas for delta in (each, {}, {"content": ""}, {"content": None})]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": said.reason}]})
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [head | chunk for chunk in [*chunks, {"choices": [], "usage": said.usage}]]


def to_events(chunks: Iterable[Any]) -> list[bytes]:
    return [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks]


def to_stream(said: Said, cutter: Cutter, **how: Any) -> list[bytes]:
    return stream_reads([*to_events(to_chunks(said, cutter, **how)), DONE])


def to_whole(said: Said) -> list[bytes]:
    calls = [
        {"id": call.identity, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in said.calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None, "reasoning_content": said.thinking or None}
    choice = {"index": 0, "finish_reason": said.reason, "message": message | ({"tool_calls": calls} if calls else {})}
    return json_reads({"id": "c", "object": "chat.completion", "created": 1, "choices": [choice], "usage": said.usage})


def recut(reads: list[bytes], sizes: list[int]) -> list[bytes]:
    """The same bytes, cut without regard to what they mean: within characters, chunks and lines too."""
    data, parts, at = b"".join(reads), [], 0
    while data:
        size = sizes[at % len(sizes)]
        at += 1
        parts.append(data[:size])
        data = data[size:]
    return parts


def _usage(found: Any, prompt: str, output: str) -> dict[str, int]:
    return {"prompt_tokens": found[prompt], "output_tokens": found[output]}


def read_openai(answer: HttpAnswer) -> Said:
    text, thinking, reason = "", "", ""
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    assert answer.body.endswith(DONE)
    for chunk in answer.events:
        usage = _usage(chunk["usage"], "prompt_tokens", "completion_tokens") if chunk.get("usage") else usage
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            text += choice["delta"].get("content") or ""
            thinking += choice["delta"].get("reasoning_content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                found = calls.setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
                found["name"] += call["function"].get("name") or ""
                found["arguments"] += call["function"]["arguments"]
    made = tuple(ToolCall(one["id"], one["name"], json.loads(one["arguments"])) for one in calls.values())
    return Said(thinking, text, made, reason, **usage)


_ANTHROPIC_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def read_anthropic(answer: HttpAnswer) -> Said:
    """Puts the blocks together, and checks that each is opened, written to and closed in its turn."""
    events = answer.events
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append(event["content_block"] | {"json": ""})
            is_open = True
        else:
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = event["type"] != "content_block_stop"
            _add_delta(blocks[-1], event.get("delta") or {})
    assert not is_open
    return _to_said(blocks, events[-2]["delta"]["stop_reason"], events[-2]["usage"])


def read_anthropic_whole(answer: HttpAnswer) -> Said:
    blocks = [block | {"json": json.dumps(block.get("input"))} for block in answer.json["content"]]
    return _to_said(blocks, answer.json["stop_reason"], answer.json["usage"])


def _add_delta(block: dict[str, Any], delta: dict[str, str]) -> None:
    match delta.get("type"):
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["json"] += delta["partial_json"]


def _to_said(blocks: list[dict[str, Any]], reason: str, usage: Any) -> Said:
    calls = tuple(
        ToolCall(block["id"], block["name"], json.loads(block["json"])) for block in blocks if block["type"] == "tool_use"
    )
    thinking = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return Said(thinking, text, calls, _ANTHROPIC_REASONS[reason], **_usage(usage, "input_tokens", "output_tokens"))


def read_response(answer: HttpAnswer) -> Said:
    """From the events alone; checks that the last one, which holds all of it, is what they add up to."""
    events = answer.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({"type": event["item"]["type"], "id": event["item"]["id"], "text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            items[-1]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["done"] = event["item"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert [item["done"] for item in items] == response["output"]
    for item in items:
        kept = item["done"].get("arguments") if item["type"] == "function_call" else item["done"]["content"][0]["text"]
        assert kept == item["text"]
    return response_to_said(response)


def response_to_said(response: Any) -> Said:
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append(ToolCall(item["call_id"], item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += item["content"][0]["text"]
    reason = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    usage = _usage(response["usage"], "input_tokens", "output_tokens")
    return Said(texts["reasoning"], texts["message"], tuple(calls), reason, **usage)


def read_ollama(answer: HttpAnswer) -> Said:
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    text, thinking, calls = "", "", []
    for line in lines:
        said = line.get("message") or {**line, "content": line.get("response")}  # /api/generate has them at the top
        text += said["content"]
        thinking += said.get("thinking") or ""
        calls += [(call["id"], call["function"]) for call in said.get("tool_calls") or ()]
    made = tuple(ToolCall(identity, function["name"], function["arguments"]) for identity, function in calls)
    usage = _usage(lines[-1], "prompt_eval_count", "eval_count")
    reason = "tool_calls" if made else lines[-1]["done_reason"]
    return Said(thinking, text, made, reason, **usage)


_MESSAGES = [{"role": "user", "content": "?"}]
Reader = Callable[[HttpAnswer], Said]
STREAMS: dict[str, tuple[str, dict[str, Any], Reader]] = {
    "openai": ("/v1/chat/completions", {"messages": _MESSAGES, "stream": True}, read_openai),
    "anthropic": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 9, "stream": True}, read_anthropic),
    "responses": ("/v1/responses", {"input": "?", "stream": True}, read_response),
    "ollama": ("/api/chat", {"messages": _MESSAGES}, read_ollama),
    "ollama generate": ("/api/generate", {"prompt": "?"}, read_ollama),
}
WHOLES: dict[str, tuple[str, dict[str, Any], Reader]] = {
    "anthropic": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 9}, read_anthropic_whole),
    "responses": ("/v1/responses", {"input": "?"}, lambda answer: response_to_said(answer.json)),
    "ollama": ("/api/chat", {"messages": _MESSAGES, "stream": False}, read_ollama),
    "ollama generate": ("/api/generate", {"prompt": "?", "stream": False}, read_ollama),
}
