"""Ollama's own Python client."""

import asyncio
import base64
from typing import Any

import ollama
from calls import MODEL, URL, call, main

client: Any = ollama.Client(host=URL, timeout=300)
HELLO = [{"role": "user", "content": "Say hello."}]
FEW = {"num_predict": 6, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"colour": {"type": "string", "enum": ["red", "green"]}}, "required": ["colour"]}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Name of the city.
    """
    return f"Sunny in {city}."


def refused(status: int, function: Any, *arguments: Any, **fields: Any) -> str:
    try:
        result = function(*arguments, **fields)
        if fields.get("stream"):
            list(result)
    except ollama.ResponseError as error:
        assert error.status_code == status, error
        assert error.error, error
        assert not error.error.startswith("{"), error
        return str(error.error)
    raise AssertionError("it was not refused")


@call
def list_models() -> None:
    found = {model.model: model for model in client.list().models}[f"{MODEL}:latest"]
    assert len(found.digest) == 64
    assert found.size > 1_000_000
    assert found.details.family == "llama"


@call
def ps() -> None:
    found = {model.model: model for model in client.ps().models}[f"{MODEL}:latest"]
    assert found.context_length == 4096


@call
def show() -> None:
    found = client.show(MODEL)
    assert found.modelinfo["general.architecture"] == "llama"
    assert "completion" in found.capabilities
    assert found.details.quantization_level == "Q4_1"


@call
def show_unknown() -> None:
    refused(404, client.show, "nobody")


@call
def chat() -> None:
    answer = client.chat(MODEL, HELLO, options=FEW)
    assert answer.message.content
    assert answer.done
    assert answer.eval_count > 0
    assert answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.eval_duration > 0


@call
def chat_with_tag() -> None:
    assert client.chat(f"{MODEL}:latest", HELLO, options=FEW).model == f"{MODEL}:latest"


@call
def chat_stream() -> None:
    parts = list(client.chat(MODEL, HELLO, options=FEW, stream=True))
    assert "".join(part.message.content for part in parts)
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1].done_reason in {"length", "stop"}
    assert parts[-1].eval_count > 0


@call
def chat_async() -> None:
    async def ask() -> Any:
        return await ollama.AsyncClient(host=URL).chat(MODEL, HELLO, options=FEW)

    assert asyncio.run(ask()).message.content


@call
def chat_tools() -> None:
    answer = client.chat(
        MODEL, [{"role": "user", "content": "Weather in Paris?"}], tools=[get_weather], options={"num_predict": 80}
    )
    for one in answer.message.tool_calls or ():
        assert one.function.name == "get_weather"
        assert isinstance(one.function.arguments, dict)


@call
def chat_tool_result() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]}
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny."}
    assert client.chat(MODEL, [*HELLO, called, result], options=FEW).message.content


@call
def chat_schema() -> None:
    answer = client.chat(MODEL, HELLO, format=SCHEMA, options={"num_predict": 30})
    assert '"colour"' in answer.message.content


@call
def chat_json() -> None:
    assert client.chat(MODEL, HELLO, format="json", options={"num_predict": 20}).message.content.lstrip().startswith("{")


@call
def chat_options() -> None:
    options = {
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "seed": 1,
        "stop": ["zzz"],
        "num_ctx": 2048,
        **FEW,
    }
    assert client.chat(MODEL, HELLO, options=options).message.content


@call
def chat_unknown_options_refused() -> None:
    assert "mirostat" in refused(400, client.chat, MODEL, HELLO, options={"mirostat": 2})
    assert "num_gpu" in refused(400, client.chat, MODEL, HELLO, options={"num_gpu": 1})
    assert "4096" in refused(400, client.chat, MODEL, HELLO, options={"num_ctx": 1_000_000})


@call
def chat_image_refused() -> None:
    image = base64.b64encode(bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")).decode()
    assert refused(400, client.chat, MODEL, [{"role": "user", "content": "What is it?", "images": [image]}])


@call
def chat_unknown_model() -> None:
    refused(404, client.chat, "nobody", HELLO)


@call
def chat_logprobs() -> None:
    answer = client.chat(MODEL, HELLO, options=FEW, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs[0].top_logprobs) == 2


@call
def generate() -> None:
    answer = client.generate(MODEL, "Once upon a time", system="Tell a story.", options=FEW)
    assert answer.response
    assert answer.eval_count > 0


@call
def generate_stream() -> None:
    parts = list(client.generate(MODEL, "Once upon a time", options=FEW, stream=True))
    assert "".join(part.response for part in parts)
    assert parts[-1].done


@call
def generate_raw() -> None:
    assert client.generate(MODEL, "Once upon a time", raw=True, options=FEW).response


@call
def generate_suffix_refused() -> None:
    assert "suffix" in refused(400, client.generate, MODEL, "def f(", suffix="return x")


@call
def load_only() -> None:
    assert client.generate(MODEL).done_reason == "load"


@call
def unload_and_wake() -> None:
    assert client.generate("other", keep_alive=0).done_reason == "unload"
    assert client.generate("other", "Once", options=FEW).response


@call
def embed_refused_by_a_chat_model() -> None:
    assert "/v1/embeddings" in refused(400, client.embed, MODEL, "hello")
    assert "/v1/embeddings" in refused(400, client.embeddings, MODEL, "hello")


@call
def pull_what_is_deployed() -> None:
    assert client.pull(MODEL).status == "success"


@call
def pull_with_progress() -> None:
    steps = list(client.pull("smollm2:135m", stream=True))
    assert steps[-1].status == "success"


@call
def pull_unknown() -> None:
    assert "nobody" in refused(503, client.pull, "nobody/knows-this")


@call
def changes_refused() -> None:
    assert refused(403, client.copy, MODEL, "other-name")
    assert refused(403, client.delete, MODEL)
    assert refused(403, client.create, "mine", from_=MODEL)
    assert refused(403, client.push, MODEL)


if __name__ == "__main__":
    main()
