"""LangChain over all three dialects."""

from typing import Literal

from calls import KEY, MODEL, URL, call, main
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def _openai(tokens: int = 8) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=SecretStr(KEY), max_completion_tokens=tokens, max_retries=0)


def _ollama(tokens: int = 8) -> ChatOllama:
    return ChatOllama(model=MODEL, base_url=URL, num_predict=tokens)


def _anthropic(tokens: int = 8) -> ChatAnthropic:
    return ChatAnthropic(
        model_name=MODEL, base_url=URL, api_key=SecretStr(KEY), max_tokens_to_sample=tokens, timeout=300, stop=None
    )


@call
def openai_invoke_and_stream() -> None:
    assert _openai().invoke("Say hello.").text
    assert "".join(chunk.text for chunk in _openai().stream("Say hello."))


@call
def openai_tools() -> None:
    called = _openai(80).bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?").tool_calls
    assert called[0]["name"] == "get_weather"


@call
def openai_structured_output() -> None:
    assert isinstance(_openai(80).with_structured_output(Colour).invoke("Name a colour."), Colour)


@call
def openai_responses() -> None:
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key=SecretStr(KEY),
        use_responses_api=True,
        max_completion_tokens=16,
        max_retries=0,
    )
    assert model.invoke("Say hello.").text
    assert "".join(chunk.text for chunk in model.stream("Say hello."))


@call
def openai_completion() -> None:
    model = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=SecretStr(KEY), max_tokens=8, max_retries=0)
    assert model.invoke("Once upon a time")


@call
def ollama_invoke_and_stream() -> None:
    assert _ollama().invoke("Say hello.").text
    assert "".join(chunk.text for chunk in _ollama().stream("Say hello."))


@call
def ollama_structured_output() -> None:
    assert isinstance(_ollama(80).with_structured_output(Colour).invoke("Name a colour."), Colour)


@call
def ollama_tools() -> None:
    for called in _ollama(80).bind_tools([get_weather]).invoke("Weather in Paris?").tool_calls:
        assert called["name"] == "get_weather"


@call
def ollama_completion() -> None:
    assert OllamaLLM(model=MODEL, base_url=URL, num_predict=8).invoke("Once upon a time")


@call
def anthropic_invoke_and_stream() -> None:
    assert _anthropic().invoke("Say hello.").text
    assert "".join(chunk.text for chunk in _anthropic().stream("Say hello."))


@call
def anthropic_tools() -> None:
    called = _anthropic(80).bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?").tool_calls
    assert called[0]["name"] == "get_weather"


if __name__ == "__main__":
    main()
