"""What popular front ends ask a server when they start, call by call."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from tests.clients.conftest import Gateway

HELLO = [{"role": "user", "content": "Say hello."}]
CALLS: list[tuple[str, str, str, Any]] = [
    # Open WebUI: its connection to Ollama is checked, listed and shown with versions; then a chat.
    ("Open WebUI", "GET", "/api/version", None),
    ("Open WebUI", "GET", "/api/tags", None),
    ("Open WebUI", "GET", "/api/ps", None),
    ("Open WebUI", "POST", "/api/show", {"name": "chat:latest"}),
    (
        "Open WebUI",
        "POST",
        "/api/chat",
        {"model": "chat:latest", "messages": HELLO, "options": {"num_predict": 4}, "keep_alive": "5m", "stream": True},
    ),
    ("Open WebUI", "GET", "/v1/models", None),
    # Continue: the model's context and stop words, what can be chosen, a chat, and a completion without a template.
    ("Continue", "POST", "/api/show", {"name": "chat"}),
    ("Continue", "GET", "/api/tags", None),
    (
        "Continue",
        "POST",
        "/api/chat",
        {
            "model": "chat",
            "messages": HELLO,
            "options": {"num_predict": 4, "num_ctx": 4096},
            "keep_alive": 1800,
            "stream": True,
        },
    ),
    (
        "Continue",
        "POST",
        "/api/generate",
        {"model": "chat", "prompt": "def hello(", "raw": True, "options": {"num_predict": 4}, "keep_alive": 1800},
    ),
    # Cline: models of an Ollama or of an OpenAI-compatible server, then a streamed chat with its usage.
    ("Cline", "GET", "/api/tags", None),
    ("Cline", "GET", "/v1/models", None),
    (
        "Cline",
        "POST",
        "/v1/chat/completions",
        {"model": "chat", "messages": HELLO, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
    ),
    # Claude Code and other tools for Anthropic's API.
    ("Anthropic tools", "POST", "/v1/messages/count_tokens?beta=true", {"model": "chat", "messages": HELLO}),
    (
        "Anthropic tools",
        "POST",
        "/v1/messages?beta=true",
        {"model": "chat", "messages": HELLO, "max_tokens": 4, "stream": True},
    ),
    # GuideLLM and load balancers.
    ("GuideLLM", "GET", "/health", None),
    ("GuideLLM", "GET", "/v1/models", None),
]


@pytest.mark.parametrize(("client", "method", "path", "body"), CALLS)
def test_a_front_end_gets_what_it_asks_for(gateway: Gateway, client: str, method: str, path: str, body: Any) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{gateway.url}{path}", data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    assert '"error"' not in text, f"{client}: {text}"
    assert answer.status == 200
    assert text


def test_continue_finds_the_context_length(gateway: Gateway) -> None:
    request = urllib.request.Request(f"{gateway.url}/api/show", b'{"name": "chat"}', {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        shown = json.load(answer)
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096


def test_errors_under_api_are_texts(gateway: Gateway) -> None:
    request = urllib.request.Request(f"{gateway.url}/api/show", b'{"model": "nobody"}', {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    with raised.value as answer:
        assert answer.code == 404
        assert isinstance(json.load(answer)["error"], str)
