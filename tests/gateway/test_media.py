"""URLs in requests reach an engine only where they are data, or of a domain that was named."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.gateway.loop_time import Served, serve_once

from aimgpu.errors import InvalidInput, InvalidRequest
from aimgpu.gateway.media import check_media, may_name_media, parse_media_domains

METADATA = "http://169.254.169.254/latest/meta-data"


def chat(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


ASKS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda url: chat({"type": "image_url", "image_url": {"url": url}})),
    "chat, short": ("/v1/chat/completions", lambda url: chat({"image_url": url})),
    "video": ("/v1/chat/completions", lambda url: chat({"type": "video_url", "video_url": {"url": url}})),
    "audio": ("/v1/chat/completions", lambda url: chat({"type": "audio_url", "audio_url": {"url": url}})),
    "responses": (
        "/v1/responses",
        lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    ),
    "anthropic": (
        "/v1/messages",
        lambda url: {"max_tokens": 5} | chat({"type": "image", "source": {"type": "url", "url": url}}),
    ),
    "tokens counted": ("/v1/messages/count_tokens", lambda url: chat({"type": "image", "source": {"type": "url", "url": url}})),
    "embeddings": ("/v1/embeddings", lambda url: {"input": "x", **chat({"type": "image_url", "image_url": {"url": url}})}),
    "embeddings of pictures": ("/v1/embeddings", lambda url: {"modality": "image", "input": [url]}),
    "an image by its name": ("/v1/images/generations", lambda url: {"prompt": "x", "image": [url]}),
    "a voice": ("/v1/audio/speech", lambda url: {"input": "x", "ref_audio": url}),
    "documents": ("/v1/rerank", lambda url: {"query": "x", "documents": [{"image": url}]}),
    "tokenize": ("/v1/tokenize", lambda url: chat({"type": "image_url", "image_url": {"url": url}})),
}


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize("name", ASKS)
def test_no_url_of_a_caller_reaches_an_engine(name: str, engine: str) -> None:
    path, make = ASKS[name]
    body = json.dumps({"model": "chat", **make(METADATA)}).encode()
    spent = serve_once(Served(path=path, body=body, engine=engine))
    assert (spent.status, spent.asked) == (400, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"images": ["iVBORw0KGgo"], "prompt": METADATA},
        {"input": [METADATA]},
        {"input": [METADATA], "modality": "text"},
        chat({"type": "image", "image": "data:image/png;base64,AAAA"}),
        chat({"type": "text", "text": f"what is in the image at {METADATA}?"}),
    ],
)
def test_content_and_texts_that_name_a_url_pass(fields: dict[str, Any]) -> None:
    check_media(fields, ())


def test_a_name_that_is_written_with_escapes_is_read_as_what_it_says() -> None:
    body = json.dumps({"model": "chat", **chat({"image_url": METADATA})}).encode().replace(b"image_url", b"image_\\u0075rl")
    assert may_name_media(body)
    assert serve_once(Served(path="/v1/chat/completions", body=body)).asked == 0


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,AAAA", "https://cdn.example.org/a.png", "HTTP://CDN.example.org:8080/a"]
)
def test_data_and_named_domains_pass(url: str) -> None:
    check_media(chat({"image_url": {"url": url}}), parse_media_domains("cdn.example.org, other.example"))


@pytest.mark.parametrize(
    "url",
    [
        METADATA,
        "file:///etc/passwd",
        "ftp://cdn.example.org/a",
        "//cdn.example.org/a",
        "https://cdn.example.org@evil.example/a",
        "https://evil.example\\@cdn.example.org/",
        "https://cdn.example.org.evil.example/",
        "https://cdn.example.org\t.evil.example/",
        " data:image/png;base64,AAAA",
        "https://[cdn.example.org/",
        "",
    ],
)
def test_every_other_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="does not fetch"):
        check_media(chat({"image_url": {"url": url}}), parse_media_domains("cdn.example.org"))


def test_urls_of_schemas_and_of_texts_are_no_media() -> None:
    tool = {"type": "function", "function": {"name": "open", "parameters": {"properties": {"url": {"default": METADATA}}}}}
    check_media({"messages": [{"role": "user", "content": f"read {METADATA}"}], "tools": [tool]}, frozenset())


@pytest.mark.parametrize("text", ["https://a.example", "a.example:80", "*.example", "a b", "x/y"])
def test_a_list_of_domains_holds_names_alone(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_media_domains(text)
