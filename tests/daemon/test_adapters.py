"""Adapters as models, with the real daemon and the real llama.cpp: a llama and adapters of random weights, made here."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import TestDaemon, wait_for
from tests.gateway.calling import Got, call
from tests.programs import tiny_llama

from aimgpu.engines.llamacpp.wheel import installed_wheel
from aimgpu.keyfile import KeyClass, KeyStore

pytestmark = pytest.mark.skipif(installed_wheel() is None, reason="the wheel xllamacpp is not installed")


class SimulatedDaemon(TestDaemon):
    program = "aimgpu.daemon.assembly"
    arguments = ("--simulate", "MI300X")


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weights = tiny_llama.make_weights()
        tiny_llama.write_model(folder / "base.gguf", weights)
        for name, seed in (("sql", 1), ("tone", 2)):
            adapter = tiny_llama.make_adapter(seed)
            tiny_llama.write_adapter(folder / f"{name}.gguf", adapter)
            tiny_llama.write_model(folder / f"merged-{name}.gguf", tiny_llama.merge(weights, adapter))
        tiny_llama.write_adapter(folder / "wide.gguf", tiny_llama.make_adapter(3, width=32))
        tiny_llama.write_adapter(folder / "other.gguf", tiny_llama.make_adapter(3), architecture="qwen2")
        (folder / "peft").mkdir()
        self.daemon = SimulatedDaemon(folder / "home")
        self.client = self.daemon.start()

    def apply(self, **models: Mapping[str, Any]) -> list[dict[str, Any]]:
        given = {name: {"context": 256, "engine": "llamacpp", **fields} for name, fields in models.items()}
        return list(self.client.apply(json.dumps({"models": given}), str(self.folder), dry_run=False))

    def ask(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> Got:
        home = self.daemon.home.read_daemon()
        assert home is not None
        return call(int(home.url.rsplit(":", 1)[1]), "GET" if body is None else "POST", path, body, headers)

    def tokens(self, model: str, prompt: str = "hello", **fields: Any) -> str:
        """The most likely ones, one after the other: the vocabulary has a character for each."""
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = self.ask("/v1/completions", body | fields)
        assert answer.status == 200, answer.body
        text: str = answer.json["choices"][0]["text"]
        assert len(text) > 12
        return text


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    running = Stage(tmp_path_factory.mktemp("adapters"))
    yield running
    running.daemon.stop()


CHAT = {
    "model": "./base.gguf",
    "adapters": {"sql": "./sql.gguf", "tone": {"path": "./tone.gguf", "name": "polite", "priority": "high"}},
    "concurrency": 2,
}


@pytest.fixture(scope="module")
def served(stage: Stage) -> Stage:
    merged = {f"merged-{name}": {"model": f"./merged-{name}.gguf"} for name in ("sql", "tone")}
    events = stage.apply(chat=CHAT, plain={"model": "./base.gguf"}, **merged)
    assert events[-1]["event"] == "done", events
    return stage


def test_an_adapter_answers_as_the_merged_model_token_by_token(served: Stage) -> None:
    for prompt in ("hello", "SELECT", "once upon a time"):
        base, sql, tone = (served.tokens(name, prompt) for name in ("chat", "chat:sql", "polite"))
        assert base == served.tokens("plain", prompt)
        assert sql == served.tokens("merged-sql", prompt)
        assert tone == served.tokens("merged-tone", prompt)
        assert len({base, sql, tone}) == 3


def test_no_caller_chooses_an_adapter_beside_its_name(served: Stage) -> None:
    chosen = [{"id": 0, "scale": 1.0}]
    assert served.tokens("chat", lora=chosen) == served.tokens("plain")
    assert served.tokens("polite", lora=chosen) == served.tokens("merged-tone")


def test_every_adapter_is_a_model_of_its_own(served: Stage) -> None:
    listed = {one["id"]: one for one in served.ask("/v1/models").json["data"]}
    assert {name: one["parent"] for name, one in listed.items() if one["parent"]} == {"chat:sql": "chat", "polite": "chat"}
    (chat,) = (one for one in served.client.read_status()["deployments"] if one["name"] == "chat")
    assert chat["adapters"] == ["chat:sql", "polite"]
    served.tokens("chat:sql")
    shown = served.ask("/metrics").body.decode().splitlines()
    assert any(line.startswith("aim_model_requests_total{") and 'model="chat:sql"' in line for line in shown)
    talk = {"model": "polite", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = served.ask("/v1/chat/completions", talk)
    assert answer.status == 200, answer.body


def test_adapters_are_counted(served: Stage) -> None:
    instances = {one["name"]: one for one in served.client.read_status()["instances"]}
    more = instances["chat"]["memory_bytes"] - instances["plain"]["memory_bytes"]
    sizes = [sum(one.nbytes for one in tiny_llama.make_adapter(seed).values()) for seed in (1, 2)]
    assert more >= sum(sizes)


def test_a_request_for_an_adapter_wakes_its_model(served: Stage) -> None:
    expected = served.tokens("merged-sql")
    served.apply(chat=CHAT | {"keep": "1s"})
    wait_for(
        lambda: next(i for i in served.client.read_status()["instances"] if i["name"] == "chat")["state"] == "sleeping",
        "asleep",
    )
    assert served.tokens("chat:sql") == expected


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("./missing.gguf", "does not exist"),
        ("./wide.gguf", "of another size than the model's"),
        ("./other.gguf", "is for qwen2, and the model is llama"),
        ("./base.gguf", "no LoRA adapter"),
        ("./peft", "is no adapter for llamacpp"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_the_start(stage: Stage, path: str, shown: str) -> None:
    events = stage.apply(wrong={"model": "./base.gguf", "adapters": {"sql": path}})
    assert shown in json.dumps(events)
    assert all(one["name"] != "wrong" for one in stage.client.read_status()["instances"])


def test_a_key_for_an_adapter_covers_neither_its_model_nor_the_others(served: Stage) -> None:
    key = KeyStore(served.daemon.home.keys_file).add("ann", KeyClass(models=("chat:sql",)))
    headers = {"authorization": f"Bearer {key}"}

    def status(model: str) -> int:
        return served.ask("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, headers).status

    wait_for(lambda: status("chat") == 403, "the key counts")
    assert [status(name) for name in ("chat:sql", "chat", "polite")] == [200, 403, 403]
