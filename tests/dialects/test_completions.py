"""`/v1/completions`: each field that OpenAI has is honoured or refused, and probabilities come in the shape of completions."""

import json
from typing import Any

import pytest
from tests.gateway.calling import call
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json, begin_stream, end_stream, write_chunk

from aimgpu.gateway.routes import ModelCard

TOKENS = [
    {
        "token": "b",
        "logprob": -0.5,
        "bytes": [98],
        "top_logprobs": [{"token": "b", "logprob": -0.5}, {"token": "x", "logprob": -2}],
    },
    {"token": "cd", "logprob": -1.5, "bytes": [99, 100], "top_logprobs": []},
]


def complete(serve: Serve, engine: ScriptedEngine, engine_name: str = "llamacpp", **fields: Any) -> Any:
    served = serve()
    served.routes.serve("chat", engine, card=ModelCard(engine=engine_name))
    return call(served.port, "POST", "/v1/completions", {"model": "chat", "prompt": "a", **fields})


async def finish(engine: ScriptedEngine, asked: Asked) -> None:
    """As llama.cpp answers."""
    if asked.fields.get("stream"):
        await begin_stream(asked)
        for token in TOKENS:
            choice = {"index": 0, "text": token["token"], "logprobs": {"content": [token]}, "finish_reason": None}
            await write_chunk(asked, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await write_chunk(asked, b"data: [DONE]\n\n")
        await end_stream(asked)
    else:
        choice = {"index": 0, "text": "bcd", "logprobs": {"content": TOKENS}, "finish_reason": "stop"}
        await answer_json(
            asked, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
        )


def test_probabilities_have_the_shape_of_completions(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = finish
    (choice,) = complete(serve, engine, logprobs=2).json["choices"]
    assert choice["logprobs"] == {
        "tokens": ["b", "cd"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"b": -0.5, "x": -2}, {}],
        "text_offset": [0, 1],
    }


def test_probabilities_of_a_stream_go_on_where_the_last_part_ended(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = finish
    body = complete(serve, engine, logprobs=2, stream=True).body.decode()
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]
    assert body.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_before_the_text_where_it_is_asked_for(serve: Serve, engine: ScriptedEngine, *, stream: bool) -> None:
    engine.script = finish
    got = complete(serve, engine, echo=True, stream=stream)
    if stream:
        texts = [
            json.loads(line[6:])["choices"][0]["text"] for line in got.body.decode().splitlines() if line.startswith("data: {")
        ]
        assert "".join(texts) == "abcd"
    else:
        assert got.json["choices"][0]["text"] == "abcd"
    assert "echo" not in engine.asked[0].fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"echo": True, "prompt": ["a", "b"], "logprobs": 1}, "echo"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": [[1]] * 2, "user": "u" * 9_000_000}, "n"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    serve: Serve, engine: ScriptedEngine, fields: dict[str, Any], param: str
) -> None:
    got = complete(serve, engine, **fields)
    assert (got.status, got.error["param"]) == (400, param)
    assert not engine.asked


async def repeat(engine: ScriptedEngine, asked: Asked) -> None:
    """Answers with the prompt, and counts its letters. Of two prompts llama.cpp answers one."""
    prompt: Any = asked.fields["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[0])
    usage = {"prompt_tokens": len(text), "completion_tokens": 2, "total_tokens": len(text) + 2}
    choice = {"index": 0, "text": f"<{text}>", "logprobs": {"content": TOKENS}, "finish_reason": "stop"}
    if asked.fields.get("stream"):
        await begin_stream(asked)
        await write_chunk(asked, b"data: " + json.dumps({"id": text, "choices": [choice], "usage": usage}).encode() + b"\n\n")
        await write_chunk(asked, b"data: [DONE]\n\n")
        await end_stream(asked)
    else:
        await answer_json(asked, {"id": text, "choices": [choice], "usage": usage})


@pytest.mark.parametrize("engine_name", ["llamacpp", "ollama"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_each_of_several_prompts_is_answered_and_counted(
    serve: Serve, engine: ScriptedEngine, engine_name: str, more: dict[str, int], *, stream: bool
) -> None:
    engine.script = repeat
    got = complete(serve, engine, engine_name, prompt=["a", "bcd", [7, 8]], n=2, seed=5, stream=stream, **more)
    if stream:
        events = [line[6:] for line in got.body.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usage = chunks[-1]["usage"]
    else:
        choices, usage = got.json["choices"], got.json["usage"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in choices] == ["<a>", "<a>", "<bcd>", "<bcd>", "<7>", "<7>"]
    assert usage == {"prompt_tokens": 1 + 3 + 1, "completion_tokens": 12, "total_tokens": 17}
    assert [asked.fields["seed"] for asked in engine.asked] == [5, 6, 5, 6, 5, 6]
    if more:
        assert all(choice["logprobs"]["text_offset"] == [0, 1] for choice in choices)


def test_each_of_several_prompts_comes_before_its_own_text(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = repeat
    choices = complete(serve, engine, prompt=["a", "bcd"], echo=True).json["choices"]
    assert [choice["text"] for choice in choices] == ["a<a>", "bcd<bcd>"]


def test_the_tokens_of_one_prompt_are_one_prompt_and_vllm_gets_all_at_once(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = repeat
    for engine_name, given, sent in (
        ("llamacpp", [1, 2], [[1, 2]]),
        ("llamacpp", ["a"], ["a"]),
        ("vllm", ["a", "b"], [["a", "b"]]),
    ):
        engine.asked.clear()
        assert complete(serve, engine, engine_name, prompt=given).status == 200
        assert [asked.fields["prompt"] for asked in engine.asked] == sent


def test_what_means_nothing_more_is_left_out_and_what_an_engine_reads_reaches_it(serve: Serve, engine: ScriptedEngine) -> None:
    engine.script = finish
    assert complete(serve, engine, best_of=1, suffix="").status == 200
    assert {"best_of", "suffix"}.isdisjoint(engine.asked[-1].fields)
    assert len(complete(serve, engine, best_of=2, n=2).json["choices"]) == 2
    assert complete(serve, engine, "ollama", suffix="end").status == 200
    assert engine.asked[-1].fields["suffix"] == "end"
    assert complete(serve, engine, "vllm", echo=True, logprobs=1).status == 200
    assert engine.asked[-1].fields["echo"] is True


def test_a_model_answers_under_its_name_with_the_tag_that_ollamas_clients_add(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine)
    asked = {"model": "chat:latest", "messages": [{"role": "user", "content": "hi"}]}
    assert call(served.port, "POST", "/v1/chat/completions", asked).status == 200
    assert call(served.port, "POST", "/v1/chat/completions", asked | {"model": "other:latest"}).status == 404
