"""LiteLLM with each of its providers that speak to a server of one's own."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network at its start otherwise

import litellm  # after its setting
from calls import KEY, MODEL, URL, call, main

HELLO = [{"role": "user", "content": "Say hello."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 8}
OLLAMA: dict[str, Any] = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "max_tokens": 8}
GENERATE: dict[str, Any] = {"model": f"ollama/{MODEL}", "api_base": URL, "max_tokens": 8}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 8}


def _text(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@call
def openai_completion() -> None:
    assert litellm.completion(messages=HELLO, **OPENAI).choices[0].message.content
    assert _text(litellm.completion(messages=HELLO, stream=True, **OPENAI))


@call
def openai_tools() -> None:
    answer = litellm.completion(messages=HELLO, tools=[WEATHER], tool_choice="required", **OPENAI | {"max_tokens": 80})
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@call
def openai_responses() -> None:
    answer = litellm.responses(
        input="Say hello.", model=OPENAI["model"], api_base=OPENAI["api_base"], api_key=KEY, max_output_tokens=8
    )
    assert answer.output[0].content[0].text  # type: ignore[union-attr]


@call
def ollama_chat() -> None:
    assert litellm.completion(messages=HELLO, **OLLAMA).choices[0].message.content
    assert _text(litellm.completion(messages=HELLO, stream=True, **OLLAMA))


@call
def ollama_generate() -> None:
    assert litellm.completion(messages=HELLO, **GENERATE).choices[0].message.content
    assert _text(litellm.completion(messages=HELLO, stream=True, **GENERATE))


@call
def anthropic_messages() -> None:
    assert litellm.completion(messages=HELLO, **ANTHROPIC).choices[0].message.content
    assert _text(litellm.completion(messages=HELLO, stream=True, **ANTHROPIC))


@call
def rerank_is_refused_in_words() -> None:
    try:
        litellm.rerank(model=f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, query="a", documents=["a", "b"])
    except Exception as error:  # noqa: BLE001  # its own kind depends on the provider
        assert "does not offer" in str(error), error
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    main()
