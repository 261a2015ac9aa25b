"""Pydantic AI over OpenAI's chat and responses. (Its release of today cannot use Anthropic's client of today.)"""

from typing import Any, Literal

from calls import KEY, MODEL, URL, call, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]


OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=OPENAI)
RESPONSES = OpenAIResponsesModel(MODEL, provider=OPENAI)
FEW: Any = {"max_tokens": 16}
SOME: Any = {"max_tokens": 80}


@call
def chat_text() -> None:
    assert Agent(CHAT, model_settings=FEW).run_sync("Say hello.").output


@call
def chat_output_by_tool() -> None:
    assert isinstance(Agent(CHAT, output_type=Colour, model_settings=SOME).run_sync("Name a colour.").output, Colour)


@call
def chat_output_by_schema() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Colour), model_settings=SOME)
    assert isinstance(agent.run_sync("Name a colour.").output, Colour)


@call
def responses_text() -> None:
    assert Agent(RESPONSES, model_settings=FEW).run_sync("Say hello.").output


@call
def responses_output_by_tool() -> None:
    assert isinstance(Agent(RESPONSES, output_type=Colour, model_settings=SOME).run_sync("Name a colour.").output, Colour)


if __name__ == "__main__":
    main()
