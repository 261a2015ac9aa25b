"""What a dialect has and this gateway does not, or what makes no sense: refused before an engine is asked."""

from typing import Any

import pytest
from tests.dialects.conversations import Said, to_whole
from tests.gateway.memory import MemoryEngine, World, json_reads, make_world, run
from tests.http_answer import HttpAnswer

from aimgpu.gateway.routes import ModelCard

USER = {"role": "user", "content": "?"}
TOOL = {"name": "go", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}


def ask(path: str, fields: dict[str, Any], engine: str = "llamacpp", answer: Any = None) -> tuple[HttpAnswer, World]:
    async def main() -> tuple[HttpAnswer, World]:
        def reads(asked_path: str, _body: Any) -> list[bytes]:
            if asked_path == "/apply-template":
                return json_reads({"prompt": "a template without tools"})
            return json_reads(answer) if answer is not None else to_whole(Said(text="Hello"))

        world = make_world(MemoryEngine(reads), card=ModelCard(engine=engine, context_tokens=100))
        return await world.ask(path, {"model": "chat", **fields}), world

    return run(main())


def chats_asked(world: World) -> list[Any]:
    return [body for path, body in world.engine.asked if path != "/apply-template"]


def _blocks(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


ANTHROPIC: dict[str, tuple[dict[str, Any], str]] = {  # with a word that the refusal needs
    "no messages": ({"messages": []}, ""),
    "messages of another kind": ({"messages": "hello"}, ""),
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a limit in words": ({"max_tokens": "many"}, "max_tokens"),
    "a limit that is a boolean": ({"max_tokens": True}, "max_tokens"),
    "no tokens at all": ({"max_tokens": 0}, "max_tokens"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, ""),
    "content of another kind": ({"messages": [{"role": "user", "content": 5}]}, ""),
    "blocks of another kind": ({"messages": [{"role": "user", "content": ["x"]}]}, ""),
    "a document": (_blocks({"type": "document", "source": {}}), ""),
    "an image without a source": (_blocks({"type": "image"}), ""),
    "an image said by the model": (_blocks({"type": "image", "source": {"url": "x"}}, role="assistant"), ""),
    "an image as a tool's result": (
        _blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}),
        "tool_result.content",
    ),
    "a system prompt with an image": ({"system": [{"type": "image"}]}, "system"),
    "tools of another kind": ({"tools": {"name": "go"}}, "tools"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "name"),
    "a tool that runs at Anthropic": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Tools of type"),
    "a choice in words": ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
    "a choice among no tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a named tool among none": ({"tool_choice": {"type": "tool", "name": "go"}}, "tool_choice"),
    "a named tool among others": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "stay"}}, "tool_choice"),
    "a format without a schema": ({"output_format": {"type": "json_schema"}}, "output_format"),
    "a stream in words": ({"stream": "yes"}, "stream"),
    "a temperature below zero": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize(("fields", "word"), ANTHROPIC.values(), ids=ANTHROPIC)
def test_anthropics_messages(fields: dict[str, Any], word: str) -> None:
    answer, world = ask("/v1/messages", {"messages": [USER], "max_tokens": 5} | fields)
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert word in answer.json["error"]["message"]
    assert chats_asked(world) == []


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "none"}, None])
def test_a_choice_that_asks_for_nothing_needs_no_tools(choice: Any) -> None:
    answer, world = ask("/v1/messages", {"messages": [USER], "max_tokens": 5, "tool_choice": choice})
    assert answer.status == 200
    assert "tool_choice" not in chats_asked(world)[0]


RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "input of another kind": ({"input": {"role": "user"}}, "input"),
    "items of another kind": ({"input": ["hello"]}, "input"),
    "an item without a role": ({"input": [{"type": "message", "content": "x"}]}, "input"),
    "an unknown item": ({"input": [{"type": "computer_call"}]}, "input"),
    "an unknown part": ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input"),
    "an image by its file": ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input"),
    "content of another kind": ({"input": [{"role": "user", "content": 5}]}, "input"),
    "instructions of another kind": ({"instructions": ["be brief"]}, "instructions"),
    "tools of another kind": ({"tools": 5}, "tools"),
    "a tool of another kind": ({"tools": ["go"]}, "tools"),
    "a tool that runs at OpenAI": ({"tools": [{"type": "file_search"}]}, "tools"),
    "in the background": ({"background": True}, "background"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "a conversation": ({"conversation": {"id": "c"}}, "conversation"),
    "no tokens at all": ({"max_output_tokens": 0}, "max_tokens"),
    "a choice among no tools": ({"tool_choice": "required", "tools": []}, ""),
}


@pytest.mark.parametrize(("fields", "param"), RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_responses(fields: dict[str, Any], param: str, path: str) -> None:
    if path.endswith("input_tokens") and param in {"max_tokens", ""}:
        return  # neither is part of a prompt
    answer, world = ask(path, {"input": "?"} | fields)
    if not param:
        assert answer.status == 200, "a choice among no tools is none"
        return
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert chats_asked(world) == []


OLLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "messages of another kind": ("/api/chat", {"messages": "hello"}),
    "a message of another kind": ("/api/chat", {"messages": ["hello"]}),
    "images of another kind": ("/api/chat", {"messages": [USER | {"images": "x"}]}),
    "an image of another kind": ("/api/chat", {"messages": [USER | {"images": [5]}]}),
    "calls of another kind": ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}),
    "a call without a name": ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
    "a stream in words": ("/api/chat", {"messages": [USER], "stream": "yes"}),
    "a format in words": ("/api/chat", {"messages": [USER], "format": "yaml"}),
    "an unknown option": ("/api/chat", {"messages": [USER], "options": {"mirostat_tau": 2}}),
    "options of another kind": ("/api/chat", {"messages": [USER], "options": [1]}),
    "an option of the deployment": ("/api/chat", {"messages": [USER], "options": {"num_gpu": 1}}),
    "a context that is longer": ("/api/chat", {"messages": [USER], "options": {"num_ctx": 101}}),
    "a context in words": ("/api/chat", {"messages": [USER], "options": {"num_ctx": "100"}}),
    "a suffix": ("/api/generate", {"prompt": "a", "suffix": "b"}),
    "a template": ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}),
    "a context from before": ("/api/generate", {"prompt": "a", "context": [1, 2]}),
    "a prompt of another kind": ("/api/generate", {"prompt": ["a"]}),
    "a system prompt of another kind": ("/api/generate", {"prompt": "a", "system": 5}),
    "a raw prompt with an image": ("/api/generate", {"prompt": "a", "raw": True, "images": ["x"]}),
    "raw in words": ("/api/generate", {"prompt": "a", "raw": 1}),
    "texts of another kind": ("/api/embed", {"input": 5}),
    "a text of another kind": ("/api/embed", {"input": ["a", 5]}),
    "logprobs in words": ("/api/chat", {"messages": [USER], "logprobs": "yes"}),
    "no tokens at all": ("/api/chat", {"messages": [USER], "options": {"num_predict": 0}}),
}


@pytest.mark.parametrize(("path", "fields"), OLLAMA.values(), ids=OLLAMA)
def test_ollamas_requests(path: str, fields: dict[str, Any]) -> None:
    answer, world = ask(path, fields)
    assert answer.status == 400
    assert isinstance(answer.json["error"], str)
    assert chats_asked(world) == []


@pytest.mark.parametrize("value", [-1, -2])
def test_an_answer_without_bounds_has_none(value: int) -> None:
    _, world = ask("/api/chat", {"messages": [USER], "options": {"num_predict": value}})
    assert "max_tokens" not in chats_asked(world)[0]


DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]
VERY_DEEP: Any = "x"
for _ in range(900):
    VERY_DEEP = [VERY_DEEP]


@pytest.mark.parametrize("deep", [DEEP, VERY_DEEP], ids=["300", "900"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [USER], "n": 2, "metadata": 0}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required", "metadata": 0}),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 0}}}]},
        ),
        ("/v1/completions", {"prompt": "?", "n": 2, "metadata": 0}),
        ("/v1/rerank", {"query": "?", "documents": ["a"], "metadata": 0}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "?", "more": 0}]}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": {"x": 0}}]}],
            },
        ),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"x": 0}}}]}]},
        ),
        ("/api/chat", {"messages": [USER], "format": {"x": 0}}),
        ("/v1/tokenize", {"messages": [{"role": "user", "content": [{"x": 0}]}]}),
    ],
)
def test_a_body_nested_too_deep_is_the_callers_fault_wherever_it_is_deep(path: str, fields: dict[str, Any], deep: Any) -> None:
    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: deep if each == 0 and isinstance(each, int) else put(each) for name, each in value.items()}
        return [put(each) for each in value] if isinstance(value, list) else value

    answer, world = ask(path, put(fields))
    assert answer.status == 400, answer.body
    assert "nested" in str(answer.json["error"])
    assert chats_asked(world) == []
    assert len(world.records.found) <= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "yes"},
        {"stream": True, "stream_options": "usage"},
        {"stream_options": [1]},
        {"max_tokens": "many"},
        {"messages": [5]},
    ],
)
def test_wrong_fields_are_found_where_tools_come_by_a_grammar(fields: dict[str, Any]) -> None:
    """The engine does not get all of them then, and so could not refuse them."""
    answer, world = ask("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required"} | fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] in fields
    assert chats_asked(world) == []


@pytest.mark.parametrize(
    "answer",
    [{}, {"id": 5, "output": []}, [], "text", {"output": []}, {"id": "r", "output": [], "deep": DEEP}],
    ids=["empty", "a number", "a list", "a text", "no id", "deep"],
)
def test_vllms_response_that_makes_no_sense_is_its_failure(answer: Any) -> None:
    found, _ = ask("/v1/responses", {"input": "?"}, engine="vllm", answer=answer)
    assert found.status == 502
    assert found.json["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("store", [True, False, None])
def test_vllms_response_says_whether_it_is_kept(store: bool | None) -> None:  # noqa: FBT001
    fields = {"input": "?"} | ({} if store is None else {"store": store})
    found, world = ask("/v1/responses", fields, engine="vllm", answer={"id": "r", "output": [], "store": False})
    assert found.json["store"] is (store is not False)
    assert chats_asked(world)[0]["store"] is False, "the engine keeps nothing"
    assert len(world.gateway._services.responses) == (store is not False)


@pytest.mark.parametrize(
    ("fields", "refusing"),
    [
        ({"web_search_options": {}}, {"llamacpp", "ollama", "vllm"}),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, {"llamacpp", "ollama"}),
        ({"modalities": ["text"]}, set()),
    ],
)
def test_what_an_engine_would_leave_out_in_silence_is_refused(fields: dict[str, Any], refusing: set[str]) -> None:
    for engine in ("llamacpp", "ollama", "vllm"):
        got, world = ask("/v1/chat/completions", {"messages": [USER], **fields}, engine)
        assert got.status == (400 if engine in refusing else 200), engine
        assert (got.status == 200) == bool(chats_asked(world))
        assert got.status == 200 or got.json["error"]["param"] == next(iter(fields))
