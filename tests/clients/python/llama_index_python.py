"""LlamaIndex over Ollama's and OpenAI's API."""

from typing import Literal

from calls import KEY, MODEL, URL, call, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


HELLO = [ChatMessage(role="user", content="Say hello.")]


def _ollama(tokens: int = 8) -> Ollama:
    options = {"num_predict": tokens}
    return Ollama(model=MODEL, base_url=URL, request_timeout=300, context_window=2048, additional_kwargs=options)


def _openai(tokens: int = 8) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=tokens, is_chat_model=True, is_function_calling_model=True
    )


@call
def ollama_complete() -> None:
    assert _ollama().complete("Once upon a time").text


@call
def ollama_chat() -> None:
    assert _ollama().chat(HELLO).message.content


@call
def ollama_stream() -> None:
    assert list(_ollama().stream_chat(HELLO))[-1].message.content


@call
def ollama_structured() -> None:
    model = _ollama(60).as_structured_llm(Colour)
    assert model.complete("Name a colour.").raw.name in {"red", "green", "blue"}  # type: ignore[union-attr]


@call
def ollama_tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = _ollama(80).chat_with_tools([tool], "Weather in Paris?")
    for called in answer.message.additional_kwargs.get("tool_calls") or ():
        assert called["function"]["name"] == "get_weather"


@call
def openai_chat_and_stream() -> None:
    assert _openai().chat(HELLO).message.content
    assert list(_openai().stream_chat(HELLO))[-1].message.content


@call
def openai_tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = _openai(80).chat_with_tools([tool], "Weather in Paris?", tool_required=True)
    assert _openai().get_tool_calls_from_response(answer)[0].tool_name == "get_weather"


if __name__ == "__main__":
    main()
