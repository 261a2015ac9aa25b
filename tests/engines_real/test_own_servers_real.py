"""Real servers of others behind `engine: command`, on the CPU, with models of random weights made here."""

import io
import json
import math
import os
import struct
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.daemon.running import TestDaemon
from tests.engines_real.conftest import wait_until
from tests.engines_real.own_programs import EMBEDDING, SPEECH, install, write_model
from tests.gateway.calling import Got, call

BOUNDARY = "b0undary"
PYTHON = os.path.realpath(sys.executable)


class SimulatedDaemon(TestDaemon):
    program = "aimgpu.daemon.assembly"
    arguments = ("--simulate", "MI300X")


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = SimulatedDaemon(folder / "home")
        self.client = self.daemon.start()

    def apply(self, **models: dict[str, Any]) -> None:
        events = list(self.client.apply(json.dumps({"models": models}), str(self.folder), dry_run=False))
        assert events[-1]["event"] == "done", events

    def ask(self, path: str, body: object, headers: dict[str, str] | None = None) -> Got:
        home = self.daemon.home.read_daemon()
        assert home is not None
        return call(int(home.url.rsplit(":", 1)[1]), "POST", path, body, headers)

    def state(self, name: str) -> str:
        return next(str(one["state"]) for one in self.client.read_status()["instances"] if one["name"] == name)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    running = Stage(tmp_path_factory.mktemp("own"))
    yield running
    running.daemon.stop()


def tone() -> bytes:
    """A second of 440 Hz."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(
            b"".join(struct.pack("<h", int(9000 * math.sin(at * 440 * math.tau / 16_000))) for at in range(16_000))
        )
    return made.getvalue()


def form(sound: bytes, **fields: str) -> bytes:
    head = f"--{BOUNDARY}\r\ncontent-disposition: form-data; name="
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    file = f'{head}"file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\n'.encode()
    return b"".join([*parts, file, sound, f"\r\n--{BOUNDARY}--\r\n".encode()])


def test_a_speech_server_hears_sleeps_and_wakes(stage: Stage) -> None:
    modules = install(SPEECH)
    model = write_model(modules, "tiny_whisper", stage.folder / "whisper")
    stage.apply(
        ears={
            "engine": "command",
            "model": str(model),
            "command": [PYTHON, "-m", "faster_whisper_server", "{model}", "--host", "{host}", "--port", "{port}"],
            "env": {"PYTHONPATH": str(modules)},
            "gpu": {"memory": "1GiB"},
            "keep": "2s",
        }
    )
    sound = form(tone(), model="ears", language="en", temperature="0")
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    first = stage.ask("/v1/audio/transcriptions", sound, headers)
    assert first.status == 200, first.body
    assert first.json["text"], "random weights say something"
    wait_until(lambda: stage.state("ears") == "sleeping", "it sleeps")
    again = stage.ask("/v1/audio/transcriptions", sound, headers)
    assert again.json == first.json
    assert stage.ask("/v1/audio/translations", sound, headers).status == 200
    refused = stage.ask("/v1/embeddings", {"model": "ears", "input": "a"})
    assert refused.status == 400
    assert "/v1/embeddings" in refused.error["message"]


def test_an_embedding_server_embeds_under_the_name_that_it_gives_its_model(stage: Stage) -> None:
    modules = install(EMBEDDING)
    model = write_model(modules, "tiny_bert", stage.folder / "tiny-bert")
    start = "from infinity_emb.cli import cli; cli()"
    flags = ["v2", "--model-id", "{model}", "--host", "{host}", "--port", "{port}", "--url-prefix", "/v1", "--api-key", "{key}"]
    stage.apply(
        embed={
            "engine": "command",
            "model": str(model),
            "command": [PYTHON, "-c", start, *flags, "--engine", "torch", "--device", "cpu", "--no-bettertransformer"],
            "env": {"PYTHONPATH": str(modules), "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            "gpu": {"memory": "2GiB"},
            "aliases": ["text-embedding-3-small"],
        }
    )
    answer = stage.ask("/v1/embeddings", {"model": "text-embedding-3-small", "input": ["a b", "c d e", "a b"]})
    assert answer.status == 200, answer.body
    first, second, third = (one["embedding"] for one in answer.json["data"])
    assert len(first) == 32
    assert first == pytest.approx(third, abs=1e-5)
    assert first != pytest.approx(second, abs=1e-2)
    assert answer.json["model"].endswith("tiny-bert"), "its own name for it"
