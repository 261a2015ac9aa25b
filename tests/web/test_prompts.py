"""Prompts: kept only when the operator asks for it, few, and short."""

import pytest

from aimgpu.domain import Priority
from aimgpu.errors import InvalidInput
from aimgpu.gateway.records import RequestRecord, excerpt_prompt
from aimgpu.qos.slo.activity import ActivityLog, parse_kept_prompts


def finished(prompt: str | None) -> RequestRecord:
    return RequestRecord(
        "chat",
        "chat-0",
        "anyone",
        Priority.MEDIUM,
        200,
        None,
        streamed=False,
        queued_seconds=0.0,
        first_byte_seconds=0.1,
        seconds=0.2,
        output_tokens=5,
        prompt=prompt,
    )


def test_only_the_last_prompts_are_kept_and_none_stays_with_its_request() -> None:
    log = ActivityLog(lambda: 0.0, prompts=2)
    for text in ("first", "second", "third"):
        log.finished(finished(text))
    assert [log.prompt(number) for number in (1, 2, 3)] == [None, "second", "third"]
    assert [entry.record.prompt for entry in log.requests()] == [None, None, None]


def test_without_the_switch_not_even_a_prompt_that_was_handed_over_is_kept() -> None:
    log = ActivityLog(lambda: 0.0)
    log.finished(finished("secret"))
    assert log.prompts_kept == 0
    assert log.prompt(1) is None
    assert log.requests()[0].record.prompt is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}, "hello"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image_url"}]}]}, "what is "),
        ({"prompt": "once upon"}, "once upon"),
        ({"input": ["one", "two"]}, "one two"),
        ({"messages": ["not an object"]}, ""),
        ({"messages": "nonsense", "prompt": 5}, ""),
        ({"prompt": "x" * 5000}, "x" * 2000 + "…"),
    ],
)
def test_the_excerpt_of_a_prompt(fields: dict[str, object], text: str) -> None:
    assert excerpt_prompt(fields) == text


@pytest.mark.parametrize("text", ["-1", "yes", "201", "1.5", "٣"])
def test_a_switch_that_makes_no_sense_is_refused_with_its_bounds(text: str) -> None:
    with pytest.raises(InvalidInput, match="from 0 to 200"):
        parse_kept_prompts(text)
