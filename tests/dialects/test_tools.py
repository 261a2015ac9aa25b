"""Tools that a model's template does not have, by a grammar."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.calling import call, chat
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import COMPLETION, Asked, ScriptedEngine, answer_json

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.dialects.openai.tool_choice import read_tool_choice
from aimgpu.gateway.dialects.openai.tool_grammar import constrain, read_call
from aimgpu.gateway.routes import ModelCard

NESTED = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/Place"}},
    "$defs": {"Place": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Place"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": NESTED}},
    {"type": "function", "function": {"name": "stay", "parameters": {"type": "object"}}},
]
NAMES = st.sampled_from(["go", "stay"])
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(), st.booleans()), max_size=3)


def _schema(fields: dict[str, Any]) -> Any:
    prepared = constrain(fields, read_tool_choice(fields))
    return prepared["response_format"]["json_schema"]["schema"]


def _answer(text: str, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}]}


def test_references_of_each_tool_find_their_definitions() -> None:
    schema = _schema({"messages": [], "tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"})
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert references == set(schema["$defs"]) == {"0_Place", "1_Place"}


def test_a_named_tool_is_the_only_one_and_a_free_choice_may_answer() -> None:
    named = {"messages": [], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "stay"}}}
    assert _schema(named)["properties"]["name"] == {"const": "stay"}
    assert "answer" in _schema({"messages": [], "tools": TOOLS})["anyOf"][-1]["properties"]


@given(NAMES, ARGUMENTS)
def test_a_call_is_read_as_it_was_written(name: str, arguments: dict[str, object]) -> None:
    choice = read_call(_answer(json.dumps({"name": name, "arguments": arguments})))["choices"][0]
    [called] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert called["function"]["name"] == name
    assert json.loads(called["function"]["arguments"]) == arguments


@given(NAMES, ARGUMENTS, st.integers(0, 60))
def test_a_call_that_was_cut_short_says_so(name: str, arguments: dict[str, object], cut: int) -> None:
    text = json.dumps({"name": name, "arguments": arguments})[:-1][:cut]
    choice = read_call(_answer(text, "length"))["choices"][0]
    assert choice["finish_reason"] == "length"
    for called in choice["message"].get("tool_calls") or ():
        assert called["function"]["name"] == name


def test_text_is_text() -> None:
    choice = read_call(_answer('{"answer": "No tool is needed."}'))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "No tool is needed."}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "fly"}]}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": "text"}}]},
        {"functions": [{"name": "x"}]},
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_tool_choice(fields)


def _llamacpp(*, has_tools: bool) -> Any:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        if "/apply-template" in asked.line:
            prompt = "aimgpu_probe" if has_tools else "no tools here"
            await answer_json(asked, {"prompt": prompt})
        elif "response_format" in asked.fields:
            await answer_json(asked, COMPLETION | _answer('{"name": "go", "arguments": {}}'))
        else:
            await answer_json(asked, COMPLETION)

    return script


def test_a_template_with_tools_is_left_to_the_engine(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = _llamacpp(has_tools=True)
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="llamacpp"))
    chat(served.port, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "go"}})
    asked = engine.asked[-1].fields
    assert asked["tool_choice"] == "required"
    assert asked["tools"] == [TOOLS[0]]


def test_a_template_without_tools_is_looked_at_once_and_the_call_comes_by_grammar(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = _llamacpp(has_tools=False)
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="llamacpp"))
    for _ in range(2):
        got = chat(served.port, tools=TOOLS, tool_choice="required")
        assert got.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "go"
    assert [asked.line.split()[1] for asked in engine.asked].count("/apply-template") == 1


def test_vllm_gets_tools_and_choices_as_they_are(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="vllm"))
    named = {"type": "function", "function": {"name": "go"}}
    chat(served.port, tools=TOOLS, tool_choice=named, n=3)
    assert engine.asked[-1].fields["tool_choice"] == named
    assert engine.asked[-1].fields["n"] == 3


def test_choices_are_asked_for_one_by_one(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, slots=1, card=ModelCard(engine="llamacpp"))
    got = chat(served.port, n=3, seed=5)
    assert [choice["index"] for choice in got.json["choices"]] == [0, 1, 2]
    assert [asked.fields["seed"] for asked in engine.asked] == [5, 6, 7]
    assert got.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 15, "total_tokens": 18}
    streamed = chat(served.port, n=2, stream=True)
    assert streamed.body.count(b"[DONE]") == 1
    assert engine.most_active == 1


def test_a_choice_that_fails_ends_the_request_with_its_error(serve: Serve, engine: ScriptedEngine) -> None:
    async def script(engine: ScriptedEngine, asked: Asked) -> None:
        await answer_json(asked, {"error": {"message": "too long", "type": "x"}}, "400 Bad Request")

    engine.script = script
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine="llamacpp"))
    assert chat(served.port, n=3).status == 400
    got = call(
        served.port, "POST", "/v1/chat/completions", {"model": "chat", "messages": [{"role": "user"}], "n": 2, "stream": True}
    )
    assert got.status == 400
    assert got.error["message"] == "too long"
