"""What clients ask about models: lists, details, loading and unloading, fetching with progress, and tokens."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.conversations import Said, to_whole
from tests.examples import examples
from tests.gateway.memory import Caller as Connection
from tests.gateway.memory import MemoryEngine, Records, World, json_reads, make_world, post, read_answers, run
from tests.http_answer import HttpAnswer

from aimgpu.errors import ModelUnavailable
from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings
from aimgpu.gateway.dialects.ollama.models import digest, list_loaded, list_tags, show
from aimgpu.gateway.dialects.table import OPERATIONS, find_operation
from aimgpu.gateway.openapi import describe_gateway
from aimgpu.gateway.routes import ModelCard, ServedModel

CARD = ModelCard(
    engine="llamacpp",
    format="gguf",
    family="llama",
    parameters=134_515_008,
    quantization="Q4_1",
    weights_bytes=98_000_000,
    memory_bytes=300_000_000,
    context_tokens=2048,
    embedding_length=576,
)


def served(name: str = "chat", state: str = "ready", *, simulated: bool = False, card: ModelCard = CARD) -> ServedModel:
    return ServedModel(
        name=name, model="org/m", state=state, reason=None, simulated=simulated, backends=(), created=1, card=card
    )


def test_a_model_is_listed_with_what_ollamas_command_needs() -> None:
    [entry] = list_tags((served(),))["models"]
    assert (entry["name"], entry["model"], entry["size"]) == ("chat:latest", "chat:latest", 98_000_000)
    assert re.fullmatch("[0-9a-f]{64}", entry["digest"])
    assert entry["details"]["parameter_size"] == "135M"
    assert entry["details"]["families"] == ["llama"]
    assert entry["modified_at"].startswith("1970-01-01T00:00:01")


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        (None, ""),
        (0, ""),
        (999, "999"),
        (1_500, "1.5K"),
        (134_515_008, "135M"),
        (7_615_616_512, "7.6B"),
        (70_000_000_000, "70.0B"),
        (405_000_000_000, "405B"),
        (1_000_000_000_000, "1.0T"),
    ],
)
def test_sizes_read_as_model_names_have_them(parameters: int | None, size: str) -> None:
    [entry] = list_tags((served(card=ModelCard(parameters=parameters)),))["models"]
    assert entry["details"]["parameter_size"] == size


def test_what_is_loaded_is_what_could_answer_and_a_simulated_gpu_holds_nothing() -> None:
    models = (served("a"), served("b", "asleep"), served("c", "draining"), served("d", "loading"), served("e", simulated=True))
    loaded = list_loaded(models)["models"]
    assert [entry["name"] for entry in loaded] == ["a:latest", "c:latest", "e:latest"]
    assert [entry["size_vram"] for entry in loaded] == [300_000_000, 300_000_000, 0]


def test_details_hold_the_architecture_and_only_what_is_known() -> None:
    shown = show(served())
    assert shown["model_info"]["llama.context_length"] == 2048
    assert shown["model_info"]["llama.embedding_length"] == 576
    assert shown["parameters"] == "num_ctx 2048"
    assert shown["capabilities"] == ["completion", "tools"]
    bare = show(served(card=ModelCard(embeds=True)))
    assert bare["model_info"] == {"general.architecture": "unknown", "general.name": "org/m"}
    assert (bare["parameters"], bare["capabilities"]) == ("", ["embedding"])


@settings(max_examples=examples(35))
@given(st.text(min_size=1, max_size=10), st.text(min_size=1, max_size=10))
def test_two_models_have_two_digests(one: str, other: str) -> None:
    assert (digest(served(one)) == digest(served(other))) is (one == other)


Pull = Callable[[str, Callable[[str, int, int | None], None]], object]


@dataclass
class Fetcher:
    act: Pull
    pulled: list[str] = field(default_factory=list)

    def pull(self, model: str, progress: Callable[[str, int, int | None], None]) -> object:
        self.pulled.append(model)
        return self.act(model, progress)


def fetch_two_files(_model: str, progress: Callable[[str, int, int | None], None]) -> None:
    for name in ("config.json", "model.gguf"):
        for done in (0, 50, 100):
            progress(name, done, 100 if name == "model.gguf" else None)


def fail(_model: str, _progress: Any) -> None:
    raise ModelUnavailable("there is no such model")


def fail_later(model: str, progress: Any) -> None:
    progress("model.gguf", 1, 100)
    fail(model, progress)


def pull(fields: dict[str, Any], act: Pull | None) -> tuple[HttpAnswer, Fetcher | None]:
    async def main() -> tuple[HttpAnswer, Fetcher | None]:
        fetcher = Fetcher(act) if act is not None else None
        world = make_world(MemoryEngine(lambda _path, _body: []))
        dependencies = GatewayDependencies(upstream=world.engine, observer=Records(), fetcher=fetcher)
        gateway = Gateway(world.routes, GatewaySettings(), dependencies)
        caller = Connection(gateway)
        caller.protocol.data_received(post("/api/pull", fields))
        task = next(iter(caller.state.tasks))
        await task  # a thread fetches, so turns of the loop are not enough
        [answer] = read_answers(caller.transport.data)
        return answer, fetcher

    return run(main())


def lines(answer: HttpAnswer) -> list[Any]:
    return [json.loads(line) for line in answer.body.splitlines()]


def test_progress_is_shown_file_by_file_and_success_last() -> None:
    answer, fetcher = pull({"model": "smollm2:latest"}, fetch_two_files)
    found = lines(answer)
    assert found[0] == {"status": "pulling manifest"}
    assert found[-1] == {"status": "success"}
    files = [line for line in found if "digest" in line]
    assert [(line["status"], line["completed"]) for line in files] == [
        (f"pulling {name}", done) for name in ("config.json", "model.gguf") for done in (0, 50, 100)
    ]
    assert len({line["digest"] for line in files}) == 2
    assert [line.get("total") for line in files] == [None] * 3 + [100] * 3
    assert fetcher is not None
    assert fetcher.pulled == ["smollm2"]


def test_one_answer_is_enough_for_who_wants_one() -> None:
    answer, _ = pull({"name": "smollm2", "stream": False}, fetch_two_files)
    assert (answer.status, answer.json) == (200, {"status": "success"})


@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_fetched_at_all_has_a_status_of_its_own(*, stream: bool) -> None:
    answer, _ = pull({"model": "nothing", "stream": stream}, fail)
    assert answer.status >= 400
    assert "no such model" in answer.json["error"]


def test_what_fails_later_is_the_last_line() -> None:
    answer, _ = pull({"model": "smollm2"}, fail_later)
    found = lines(answer)
    assert answer.status == 200
    assert found[-1] == {"error": "there is no such model"}
    assert {"status": "success"} not in found


def test_a_model_that_is_deployed_is_there_already() -> None:
    answer, fetcher = pull({"model": "chat:latest"}, fail)
    assert lines(answer) == [{"status": "pulling manifest"}, {"status": "success"}]
    assert fetcher is not None
    assert fetcher.pulled == []


@pytest.mark.parametrize(
    ("fields", "status"), [({}, 400), ({"model": 5}, 400), ({"model": "x", "stream": 1}, 400), ({"model": "x"}, 403)]
)
def test_a_pull_that_names_nothing_or_has_nobody_to_fetch_is_refused(fields: dict[str, Any], status: int) -> None:
    answer, _ = pull(fields, None)
    assert answer.status == status
    assert isinstance(answer.json["error"], str)


def ask(path: str, fields: dict[str, Any], answer: Any = None, engine: str = "llamacpp") -> tuple[HttpAnswer, World]:
    async def main() -> tuple[HttpAnswer, World]:
        reads = to_whole(Said(text="Hello")) if answer is None else json_reads(answer)
        world = make_world(MemoryEngine(lambda _path, _body: reads), card=ModelCard(engine=engine, context_tokens=100))
        return await world.ask(path, {"model": "chat", **fields}), world

    return run(main())


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), (0, "unload"), ("0s", "unload"), (-1, "load"), ("5m", "load"), (False, "load")]
)
def test_a_request_that_says_nothing_loads_or_unloads(path: str, keep_alive: Any, reason: str) -> None:
    answer, world = ask(path, {} if keep_alive is None else {"keep_alive": keep_alive})
    assert (answer.json["done"], answer.json["done_reason"]) == (True, reason)
    assert world.gateway.slots.wake_requests.take_sleeps() == (("chat",) if reason == "unload" else ())
    assert world.engine.asked == []
    assert world.gateway.slots.in_flight("chat-0") == 0


def test_a_chat_may_unload_its_model_after_its_answer() -> None:
    answer, world = ask("/api/chat", {"messages": [{"role": "user", "content": "?"}], "keep_alive": 0, "stream": False})
    assert answer.json["message"]["content"] == "Hello"
    assert world.gateway.slots.wake_requests.take_sleeps() == ("chat",)


@pytest.mark.parametrize("legacy", [True, False])
def test_vectors_have_ollamas_shape_in_both_of_its_forms(*, legacy: bool) -> None:
    vectors = {"data": [{"embedding": [1.0, 2.0]}, {"embedding": [3.0, 4.0]}], "usage": {"prompt_tokens": 3}}
    answer, world = ask("/api/embeddings" if legacy else "/api/embed", {"prompt" if legacy else "input": ["a", "b"]}, vectors)
    if legacy:
        assert answer.json == {"embedding": [1.0, 2.0]}
    else:
        assert (answer.json["embeddings"], answer.json["prompt_eval_count"]) == ([[1.0, 2.0], [3.0, 4.0]], 3)
    assert world.engine.asked[0][1]["input"] == ["a", "b"]


def test_vectors_are_passed_on_as_the_engine_wrote_them_and_a_text_like_one_is_left_alone() -> None:
    text = 'say "embedding": [1]'
    numbers = [0.1, -1e-07, 1.5e300, 3]
    answer, _ = ask("/api/embed", {"input": "a"}, {"data": [{"note": text, "embedding": numbers}, {"embedding": "AAAA"}]})
    assert answer.json["embeddings"] == [numbers, "AAAA"]


@pytest.mark.parametrize("vector", [[0.1] * 300_000, None, 5])
def test_what_is_no_vector_is_an_answer_that_is_not_understood(vector: Any) -> None:
    answer, _ = ask("/api/embed", {"input": "a"}, {"data": [{"embedding": vector}]})
    assert (answer.status, answer.json) == (502, {"error": "The engine's answer could not be understood."})


def test_tokens_of_llamacpp_are_shown_as_vllm_shows_them() -> None:
    tokens = {"tokens": [{"id": 1, "piece": "He"}, {"id": 2, "piece": [226, 130]}]}
    answer, _ = ask("/v1/tokenize", {"prompt": "He", "return_token_strs": True}, tokens)
    assert answer.json == {"tokens": [1, 2], "count": 2, "max_model_len": 100, "token_strs": ["He", "\ufffd"]}
    assert ask("/v1/detokenize", {"tokens": [1, 2]}, {"content": "He"})[0].json == {"prompt": "He"}


@pytest.mark.parametrize("tokens", [None, "1", [1, "2"], {"a": 1}])
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    answer, world = ask("/v1/detokenize", {"tokens": tokens})
    assert (answer.status, answer.json["error"]["param"]) == (400, "tokens")
    assert world.engine.asked == []


def test_every_operation_is_found_described_and_refuses_other_methods() -> None:
    described = describe_gateway("0")["paths"]
    for operation in OPERATIONS:
        assert find_operation(operation.method, operation.path.replace("{id}", "resp_1")) is operation
        assert operation.method.lower() in described[operation.path]
        assert "requestBody" in described[operation.path][operation.method.lower()] or not operation.reads_body
    assert find_operation("GET", "/v1/nothing") is None
    assert find_operation("GET", "/v1/responses/a/b/c") is None
    head = find_operation("HEAD", "/api/tags")
    assert head is not None
    assert head.method == "GET"
