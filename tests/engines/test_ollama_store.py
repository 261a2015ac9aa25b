"""Tags of a local Ollama store are sized from the file that they mean."""

import json
from pathlib import Path

import pytest

from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.domain import Ask, Auto, Deployment
from aimgpu.engines.ollama.store import find_model_file
from aimgpu.errors import UnknownModel

DIGEST = "sha256:" + "a" * 64


def put(store: Path, name: str, content: bytes = b"GGUF", digest: str = DIGEST) -> Path:
    manifest = store / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "b" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = store / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob


@pytest.mark.parametrize(
    ("tag", "path"),
    [
        ("mine", "registry.ollama.ai/library/mine/latest"),
        ("qwen3:4b", "registry.ollama.ai/library/qwen3/4b"),
        ("me/mine:v2", "registry.ollama.ai/me/mine/v2"),
        ("hf.co/org/name:Q4_K_M", "hf.co/org/name/Q4_K_M"),
    ],
)
def test_a_tag_is_found_as_ollama_would_find_it(tmp_path: Path, tag: str, path: str) -> None:
    blob = put(tmp_path, path)
    assert find_model_file(tag, tmp_path) == blob
    assert find_model_file(tag + "x", tmp_path) is None


@pytest.mark.parametrize("tag", ["../../etc/passwd", "a/../b", "a:../../b", "", "x:y:z", "a\nb", "/abs"])
def test_what_is_no_tag_is_not_looked_for(tmp_path: Path, tag: str) -> None:
    assert find_model_file(tag, tmp_path) is None


def test_a_damaged_manifest_or_a_missing_blob_is_not_found(tmp_path: Path) -> None:
    blob = put(tmp_path, "registry.ollama.ai/library/mine/latest")
    blob.unlink()
    assert find_model_file("mine", tmp_path) is None
    manifest = tmp_path / "manifests/registry.ollama.ai/library/mine/latest"
    manifest.write_text(manifest.read_text().replace(DIGEST, "sha256:../../manifests/x"))
    assert find_model_file("mine", tmp_path) is None
    (tmp_path / "manifests/registry.ollama.ai/library/mine/latest").write_text("no json")
    assert find_model_file("mine", tmp_path) is None


def test_a_model_of_the_store_is_sized_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Path
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    deployment = Deployment(name="chat", model="mine", ask=Ask(name="chat", want=Auto()))
    with pytest.raises(UnknownModel):
        SizingBasis().size(deployment, "ollama", None, None)
    put(tmp_path, "registry.ollama.ai/library/mine/latest", small_model.read_bytes())
    footprint = SizingBasis().size(deployment, "ollama", None, None)
    assert footprint.family is not None
    assert 0 < footprint.term_bytes("weights") <= small_model.stat().st_size
