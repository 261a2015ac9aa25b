"""OpenAI's own client."""

import asyncio
import base64
import io
from typing import Any, Literal

import openai
from calls import KEY, MODEL, URL, call, main
from pydantic import BaseModel

client: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
HELLO = [{"role": "user", "content": "Say hello."}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "The time in a city.", "parameters": CITY}}
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: dict[str, Any] = {"model": MODEL, "messages": PARIS, "tools": [WEATHER, CLOCK], "max_tokens": 80, "temperature": 0}
FLAT = [{"type": "function", "name": one["function"]["name"], "parameters": CITY} for one in (WEATHER, CLOCK)]  # type: ignore[index]
PIXEL = base64.b64encode(bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")).decode()


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]


def refused(status: int, function: Any, *arguments: Any, **fields: Any) -> openai.APIStatusError:
    """The call must fail with this status, a message and a code."""
    try:
        function(*arguments, **fields)
    except openai.APIStatusError as error:
        assert error.status_code == status, error
        assert error.body["message"], error.body  # type: ignore[index]
        assert error.code, error.body
        return error
    raise AssertionError("it was not refused")


@call
def models_list() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@call
def models_retrieve() -> None:
    assert client.models.retrieve(MODEL).owned_by == "aimgpu"


@call
def models_retrieve_unknown() -> None:
    refused(404, client.models.retrieve, "nobody")


@call
def chat_create() -> None:
    answer = client.chat.completions.create(**SHORT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    assert answer.model == MODEL


@call
def chat_create_async() -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as asynchronous:
            return await asynchronous.chat.completions.create(**SHORT)

    assert asyncio.run(ask()).choices[0].message.content


@call
def chat_stream() -> None:
    chunks = list(client.chat.completions.create(**SHORT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].choices[0].finish_reason in {"length", "stop"}


@call
def chat_stream_usage() -> None:
    chunks = list(client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0


@call
def chat_stream_helper() -> None:
    with client.chat.completions.stream(**SHORT) as stream:
        kinds = [event.type for event in stream]
        assert stream.current_completion_snapshot.choices[0].message.content
    assert "content.delta" in kinds


@call
def chat_raw_response() -> None:
    raw = client.chat.completions.with_raw_response.create(**SHORT)
    assert raw.headers["x-aimgpu-instance"]
    assert raw.parse().choices[0].message.content


@call
def chat_streaming_response() -> None:
    with client.chat.completions.with_streaming_response.create(**SHORT) as response:
        assert b"choices" in b"".join(response.iter_bytes())


@call
def chat_parts_and_roles() -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "Which one?"},
    ]
    assert client.chat.completions.create(**SHORT | {"messages": messages}).choices[0].message.content


@call
def chat_developer_role() -> None:
    messages = [{"role": "developer", "content": "Answer briefly."}, *HELLO]
    assert client.chat.completions.create(**SHORT | {"messages": messages}).choices[0].message.content


@call
def chat_sampling_options() -> None:
    options = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 7, "stop": ["zzz"], "user": "me"}
    assert client.chat.completions.create(**SHORT | {"temperature": 0.7}, **options).choices


@call
def chat_max_completion_tokens() -> None:
    fields = {name: value for name, value in SHORT.items() if name != "max_tokens"}
    assert client.chat.completions.create(**fields, max_completion_tokens=4).usage.completion_tokens <= 4


@call
def chat_unused_fields() -> None:
    assert client.chat.completions.create(**SHORT, metadata={"a": "b"}, store=False, service_tier="auto").choices


@call
def chat_logprobs() -> None:
    answer = client.chat.completions.create(**SHORT, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@call
def chat_logit_bias() -> None:
    assert client.chat.completions.create(**SHORT, logit_bias={"100": -100}).choices


@call
def chat_stop() -> None:
    whole = client.chat.completions.create(**SHORT).choices[0].message.content
    letter = whole[1]
    assert letter not in client.chat.completions.create(**SHORT, stop=letter).choices[0].message.content


@call
def chat_n_within_slots() -> None:
    answer = client.chat.completions.create(**SHORT, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


@call
def chat_n_above_slots() -> None:
    answer = client.chat.completions.create(**SHORT | {"temperature": 1}, n=5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens > 6


@call
def chat_n_stream() -> None:
    chunks = list(client.chat.completions.create(**SHORT, n=3, stream=True, stream_options={"include_usage": True}))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens > 3


@call
def chat_json_object() -> None:
    answer = client.chat.completions.create(**SHORT | {"max_tokens": 30}, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.lstrip().startswith("{")


@call
def chat_parse() -> None:
    answer = client.chat.completions.parse(**SHORT | {"max_tokens": 30}, response_format=Colour)
    assert answer.choices[0].message.parsed.name in {"red", "green", "blue"}


@call
def chat_tools_auto() -> None:
    message = client.chat.completions.create(**TOOLS).choices[0].message
    assert message.tool_calls or message.content is not None


@call
def chat_tools_required() -> None:
    choice = client.chat.completions.create(**TOOLS, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name in {"get_weather", "get_time"}


@call
def chat_tools_named() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    message = client.chat.completions.create(**TOOLS, tool_choice=named).choices[0].message
    assert [one.function.name for one in message.tool_calls] == ["get_time"]


@call
def chat_tools_none() -> None:
    assert client.chat.completions.create(**TOOLS, tool_choice="none").choices[0].message.tool_calls is None


@call
def chat_tools_named_unknown() -> None:
    refused(400, client.chat.completions.create, **TOOLS, tool_choice={"type": "function", "function": {"name": "nobody"}})


@call
def chat_tools_stream() -> None:
    with client.chat.completions.stream(**TOOLS, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        called = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert called.function.name in {"get_weather", "get_time"}
    assert "tool_calls.function.arguments.done" in kinds


@call
def chat_tool_result() -> None:
    message = client.chat.completions.create(**TOOLS, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees, sunny"}
    messages = [*PARIS, message, result]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10).choices[0].message.content


@call
def chat_tools_parse() -> None:
    class GetColour(BaseModel):
        colour: Colour

    tool = openai.pydantic_function_tool(GetColour)
    answer = client.chat.completions.parse(**SHORT | {"max_tokens": 60}, tools=[tool], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments.colour.name in {"red", "green", "blue"}


@call
def chat_functions_refused() -> None:
    refused(400, client.chat.completions.create, **SHORT, functions=[WEATHER["function"]])


@call
def chat_image_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{PIXEL}"}}
    refused(400, client.chat.completions.create, **SHORT | {"messages": [{"role": "user", "content": [part]}]})


@call
def chat_impossible_numbers_refused() -> None:
    refused(400, client.chat.completions.create, **SHORT | {"max_tokens": 0})
    refused(400, client.chat.completions.create, **SHORT | {"temperature": -5})
    refused(400, client.chat.completions.create, **SHORT, n=0)
    refused(400, client.chat.completions.create, **SHORT, top_p=3)


@call
def chat_unknown_model() -> None:
    assert refused(404, client.chat.completions.create, **SHORT | {"model": "nobody"}).code == "model_not_found"


@call
def chat_prompt_too_long() -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    assert refused(400, client.chat.completions.create, **SHORT | {"messages": long}).code == "context_length_exceeded"


@call
def completions_create() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=6)
    assert answer.choices[0].text


@call
def completions_stream() -> None:
    chunks = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@call
def completions_n() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@call
def completions_logprobs() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=2, logprobs=2)
    assert answer.choices[0].logprobs is not None


@call
def embeddings_refused_by_a_chat_model() -> None:
    assert "/v1/embeddings" in refused(400, client.embeddings.create, model=MODEL, input="hello").message


@call
def transcription_refused_by_a_chat_model() -> None:
    sound = io.BytesIO(b"RIFF$\0\0\0WAVEfmt ")
    sound.name = "sound.wav"
    assert "audio" in refused(400, client.audio.transcriptions.create, model=MODEL, file=sound).message


@call
def paths_that_are_not_offered() -> None:
    assert "/v1/images/generations" in refused(400, client.images.generate, model=MODEL, prompt="a cat").message
    refused(404, client.moderations.create, model=MODEL, input="text")
    refused(404, client.files.list)


@call
def responses_create() -> None:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=6)
    assert answer.output_text
    assert answer.usage.output_tokens > 0
    assert answer.status in {"completed", "incomplete"}


@call
def responses_instructions_and_items() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello."}]}]
    answer = client.responses.create(model=MODEL, instructions="Answer briefly.", input=items, max_output_tokens=6)
    assert answer.instructions == "Answer briefly."
    assert answer.output_text


@call
def responses_stream() -> None:
    events = list(client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=6, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in {"response.completed", "response.incomplete"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")


@call
def responses_stream_helper() -> None:
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=6) as stream:
        kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds


@call
def responses_previous() -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=4)
    second = client.responses.create(model=MODEL, input="What is my name?", max_output_tokens=4, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + 4


@call
def responses_previous_unknown() -> None:
    refused(404, client.responses.create, model=MODEL, input="Hello.", previous_response_id="resp_nobody")


@call
def responses_kept_and_deleted() -> None:
    made = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=4)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert client.responses.input_items.list(made.id).data[0].content == "Say hello."
    client.responses.delete(made.id)
    refused(404, client.responses.retrieve, made.id)


@call
def responses_not_stored() -> None:
    made = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=4, store=False)
    refused(404, client.responses.retrieve, made.id)


@call
def responses_tools() -> None:
    answer = client.responses.create(
        model=MODEL, input="What is the weather in Paris?", tools=FLAT, tool_choice="required", max_output_tokens=80
    )
    called = answer.output[0]
    assert called.type == "function_call"
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "18 degrees"}
    later = client.responses.create(model=MODEL, input=[result], previous_response_id=answer.id, max_output_tokens=6)
    assert later.output_text


@call
def responses_tools_stream() -> None:
    with client.responses.stream(
        model=MODEL,
        input="What is the weather in Paris?",
        tools=FLAT,
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=80,
    ) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output[0].name == "get_weather"
    assert "response.function_call_arguments.done" in kinds


@call
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="Name a colour.", text_format=Colour, max_output_tokens=30)
    assert answer.output_parsed.name in {"red", "green", "blue"}


@call
def responses_hosted_tools_refused() -> None:
    refused(400, client.responses.create, model=MODEL, input="News?", tools=[{"type": "web_search"}])


@call
def responses_count_input() -> None:
    assert client.responses.input_tokens.count(model=MODEL, input="Say hello.").input_tokens > 3


if __name__ == "__main__":
    main()
