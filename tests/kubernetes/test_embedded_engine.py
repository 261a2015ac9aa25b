"""llama.cpp in a pod: started for what the model's file is for, with the words that a `llama-server` takes."""

import argparse
from itertools import pairwise
from pathlib import Path

import pytest
from tests.programs.tiny_encoder import write_encoder

from aimgpu.engines.llamacpp.purpose import Purpose
from aimgpu.kubernetes.models.serving.embedded_engine import main, model_purpose, server_words

GIVEN = argparse.Namespace(name="chat", port=8000, context=512, concurrency=3)


@pytest.mark.parametrize(("ranks", "purpose"), [(False, Purpose.EMBEDDING), (True, Purpose.RANKING)])
def test_an_encoder_is_served_for_what_its_file_says(tmp_path: Path, purpose: Purpose, *, ranks: bool) -> None:
    path = tmp_path / "model.gguf"
    write_encoder(path, ranks=ranks)
    assert model_purpose(path) is purpose


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all"])
def test_a_file_that_cannot_be_read_is_left_to_the_engine(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert model_purpose(path) is Purpose.TEXT
    assert model_purpose(tmp_path / "absent.gguf") is Purpose.TEXT


@pytest.mark.parametrize(
    ("purpose", "flags"),
    [(Purpose.TEXT, set()), (Purpose.EMBEDDING, {"--embedding"}), (Purpose.RANKING, {"--embedding", "--reranking"})],
)
def test_the_server_gets_the_context_of_all_requests_and_its_purpose(purpose: Purpose, flags: set[str]) -> None:
    words = server_words(GIVEN, Path("/models/x.gguf"), purpose)
    pairs = dict(pairwise(words))
    assert (pairs["--ctx-size"], pairs["--parallel"], pairs["--alias"], pairs["--model"]) == (
        "1536",
        "3",
        "chat",
        "/models/x.gguf",
    )
    assert {word for word in words if word in ("--embedding", "--reranking")} == flags


def test_a_model_that_cannot_be_fetched_ends_the_pod_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--model", str(tmp_path / "absent.gguf"), "--name", "chat", "--cache", str(tmp_path)])
    assert status != 0
    assert "absent.gguf" in capsys.readouterr().err
