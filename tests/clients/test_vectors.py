"""Vectors and rankings by a real engine: passed on where a model makes them, refused in words where it does not."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.clients.conftest import Gateway
from tests.programs.tiny_encoder import WIDTH, write_encoder

NAMES = ("vectors", "ranks", "text-vectors")
STACK = """
models:
  vectors: {{model: {folder}/vectors.gguf, engine: llamacpp, context: 128}}
  ranks: {{model: {folder}/ranks.gguf, engine: llamacpp, context: 128}}
  text-vectors: {{model: HuggingFaceTB/SmolLM2-135M-Instruct, engine: llamacpp, context: 512, args: {{embedding: true}}}}
"""


@pytest.fixture(scope="module")
def url(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vectors")
    write_encoder(folder / "vectors.gguf", ranks=False)
    write_encoder(folder / "ranks.gguf", ranks=True)
    (folder / "stack.yaml").write_text(STACK.format(folder=folder))
    gateway.deploy("--attach", "--file", str(folder / "stack.yaml"))
    yield gateway.url
    gateway.aimgpu("down", *NAMES)


def test_an_encoder_makes_a_vector_of_each_text(url: str) -> None:
    status, answer = _ask(url, "/v1/embeddings", {"model": "vectors", "input": ["a cat", "a dog", "a cat"]})
    assert status == 200
    first, second, third = (each["embedding"] for each in answer["data"])
    assert len(first) == WIDTH
    assert first == pytest.approx(third, abs=1e-3)
    assert first != pytest.approx(second, abs=1e-3)


def test_a_model_that_makes_text_makes_vectors_when_it_is_started_for_them(url: str) -> None:
    status, answer = _ask(url, "/v1/embeddings", {"model": "text-vectors", "input": "a cat"})
    assert (status, len(answer["data"][0]["embedding"])) == (200, 576)


def test_a_ranker_orders_documents(url: str) -> None:
    documents = ["a cat", "dog house", "zebra"]
    status, answer = _ask(url, "/v1/rerank", {"model": "ranks", "query": "cat", "documents": documents})
    scores = [each["relevance_score"] for each in answer["results"]]
    assert (status, scores) == (200, sorted(scores, reverse=True))
    assert {each["index"] for each in answer["results"]} == {0, 1, 2}
    status, answer = _ask(url, "/v1/rerank", {"model": "ranks", "query": "cat", "documents": documents, "top_n": 1})
    assert (status, len(answer["results"])) == (200, 1)


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("chat", "/v1/embeddings", {"input": "a"}),
        ("chat", "/v1/rerank", {"query": "a", "documents": ["a"]}),
        ("vectors", "/v1/rerank", {"query": "a", "documents": ["a"]}),
        ("vectors", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("ranks", "/v1/embeddings", {"input": "a"}),
        ("ranks", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_what_a_model_does_not_do_is_refused_in_words(url: str, model: str, path: str, body: dict[str, Any]) -> None:
    status, answer = _ask(url, path, {"model": model} | body)
    assert status == 400
    assert f"'{model}' does not offer {path}" in answer["error"]["message"]


def test_a_ranker_answers_no_score_where_ollamas_clients_expect_a_vector(url: str) -> None:
    status, answer = _ask(url, "/api/embed", {"model": "ranks", "input": "a"})
    assert status == 400
    assert "'ranks' does not offer /v1/embeddings" in str(answer["error"])


def _ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
