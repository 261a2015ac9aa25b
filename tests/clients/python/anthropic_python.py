"""Anthropic's own Python client."""

import asyncio
from typing import Any

import anthropic
from calls import KEY, MODEL, URL, call, main

client: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": "Say hello."}]}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": CITY},
    {"name": "get_time", "description": "The time in a city.", "input_schema": CITY},
]
PARIS: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 80,
    "tools": TOOLS,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
}


@call
def create() -> None:
    message = client.messages.create(**SHORT)
    assert message.type == "message"
    assert message.content[0].text
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens > 0
    assert message.stop_reason in {"max_tokens", "end_turn"}


@call
def create_async() -> None:
    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY) as asynchronous:
            return await asynchronous.messages.create(**SHORT)

    assert asyncio.run(ask()).content[0].text


@call
def create_with_bearer_token() -> None:
    with anthropic.Anthropic(base_url=URL, auth_token=KEY, max_retries=0) as other:
        assert other.messages.create(**SHORT).content  # type: ignore[union-attr]


@call
def system_and_blocks() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A model."}]},
        {"role": "user", "content": "Which one?"},
    ]
    system = [{"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 20}
    options = {"extra_body": sampling, "stop_sequences": ["zzz"], "metadata": {"user_id": "me"}}
    assert client.messages.create(**SHORT | {"messages": messages}, system=system, **options).content[0].text


@call
def stream_events() -> None:
    kinds = [event.type for event in client.messages.create(**SHORT, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert "content_block_delta" in kinds


@call
def stream_helper() -> None:
    with client.messages.stream(**SHORT) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text
    assert message.content[0].text == text
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens > 0


@call
def tools_any() -> None:
    message = client.messages.create(**PARIS, tool_choice={"type": "any"})
    used = message.content[-1]
    assert message.stop_reason == "tool_use"
    assert used.type == "tool_use"
    assert isinstance(used.input, dict)


@call
def tools_named_and_result() -> None:
    message = client.messages.create(**PARIS, tool_choice={"type": "tool", "name": "get_time"})
    used = message.content[-1]
    assert used.name == "get_time"
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "12:00"}
    turns = [*PARIS["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    later = client.messages.create(**PARIS | {"messages": turns, "max_tokens": 10})
    assert later.content is not None


@call
def tools_stream() -> None:
    with client.messages.stream(**PARIS, tool_choice={"type": "any"}) as stream:
        kinds = [event.type for event in stream]
        used = stream.get_final_message().content[-1]
    assert used.type == "tool_use"
    assert isinstance(used.input, dict)
    assert "input_json" in kinds


@call
def tools_auto() -> None:
    assert client.messages.create(**PARIS).stop_reason in {"tool_use", "end_turn", "max_tokens"}


@call
def count_tokens() -> None:
    fields = {name: SHORT[name] for name in ("model", "messages")}
    few = client.messages.count_tokens(**fields).input_tokens
    more = client.messages.count_tokens(**fields, tools=TOOLS, system="Answer briefly.").input_tokens
    assert 0 < few < more
    assert client.messages.create(**SHORT).usage.input_tokens == few


@call
def list_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).display_name == MODEL


@call
def unknown_model() -> None:
    try:
        client.messages.create(**SHORT | {"model": "nobody"})
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert "nobody" in error.message
    else:
        raise AssertionError("it was not refused")


@call
def bad_requests() -> None:
    for fields in (
        {"messages": []},
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ):
        try:
            client.messages.create(**SHORT | fields)
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        else:
            raise AssertionError(f"{fields} was not refused")


if __name__ == "__main__":
    main()
