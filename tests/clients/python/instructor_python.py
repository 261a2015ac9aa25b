"""instructor, in each of its modes that a chat model can serve."""

from typing import Any, Literal

import anthropic
import instructor
import openai
from calls import KEY, MODEL, URL, call, main
from pydantic import BaseModel


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]


class Paint(BaseModel):
    colour: Colour
    litres: Literal[1, 2, 3]


def _client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300), mode=mode)


def _ask(client: Any) -> Paint:
    messages = [{"role": "user", "content": "Two litres of red paint."}]
    paint = client.create(model=MODEL, response_model=Paint, messages=messages, max_tokens=80, max_retries=0)
    assert isinstance(paint, Paint)
    return paint


@call
def tools_mode() -> None:
    _ask(_client(instructor.Mode.TOOLS))


@call
def json_schema_mode() -> None:
    _ask(_client(instructor.Mode.JSON_SCHEMA))


@call
def tools_mode_stream() -> None:
    messages = [{"role": "user", "content": "Two litres of red paint."}]
    parts = _client(instructor.Mode.TOOLS).create_partial(model=MODEL, response_model=Paint, messages=messages, max_tokens=80)
    last = list(parts)[-1]
    assert last.colour.name in {"red", "green", "blue"}


@call
def anthropic_tools_mode() -> None:
    native = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    _ask(instructor.from_anthropic(native, mode=instructor.Mode.ANTHROPIC_TOOLS))


if __name__ == "__main__":
    main()
