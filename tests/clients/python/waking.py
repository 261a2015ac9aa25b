"""Streams of a model that sleeps, all at once, by OpenAI's and Anthropic's clients; prints what each got."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
from calls import KEY, MODEL, URL

by_openai: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
by_anthropic: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Say hello."}]


def chat() -> Iterator[str]:
    for chunk in by_openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
        yield chunk.choices[0].delta.content


def completion() -> Iterator[str]:
    for chunk in by_openai.completions.create(model=MODEL, prompt="Say hello.", stream=True):
        yield chunk.choices[0].text


def responses() -> Iterator[str]:
    for event in by_openai.responses.create(model=MODEL, input="Say hello.", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


def messages() -> Iterator[str]:
    with by_anthropic.messages.stream(model=MODEL, max_tokens=6, messages=HELLO) as stream:
        yield from stream.text_stream


def attempt(call: Callable[[], Iterator[str]]) -> dict[str, str]:
    try:
        return {"call": call.__name__, "text": "".join(call())}
    except (openai.APIError, anthropic.APIError) as error:
        return {"call": call.__name__, "error": str(error)}


CALLS = (chat, completion, responses, messages)
with ThreadPoolExecutor(len(CALLS)) as pool:
    for line in pool.map(attempt, CALLS):
        sys.stdout.write(json.dumps(line) + "\n")
