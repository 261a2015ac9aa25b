"""Adapters on the newest real vLLM, on the CPU: random weights in 32 bits, made here."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.engines_h200.models import Shape, write_model
from tests.daemon.running import TestDaemon
from tests.engines_real.vllm_program import install_vllm
from tests.gateway.calling import call

SHAPE = Shape(hidden=64, layers=2, heads=2, kv_heads=2, inner=128, vocabulary=259, context=1024)
RANK = 4


class SimulatedDaemon(TestDaemon):
    program = "aimgpu.daemon.assembly"
    arguments = ("--simulate", "MI300X")


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    head: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def write_models(folder: Path) -> None:
    chance = np.random.default_rng(7)

    def weights(shape: tuple[int, ...]) -> Any:
        return np.ones(shape, np.float32) if len(shape) == 1 else chance.normal(0, 0.3, shape).astype(np.float32)

    base = {name: weights(shape) for name, shape in SHAPE.tensors().items()}
    merged, adapter = dict(base), dict[str, Any]()
    for name in [one for one in base if "q_proj" in one or "v_proj" in one or "down_proj" in one]:
        down, up = weights((RANK, base[name].shape[1])), weights((base[name].shape[0], RANK))
        merged[name] = base[name] + up @ down
        bare = name.removesuffix(".weight")
        adapter |= {f"base_model.model.{bare}.lora_A.weight": down, f"base_model.model.{bare}.lora_B.weight": up}
    for name, tensors in (("base", base), ("merged", merged)):
        write_model(folder / name, SHAPE)
        write_tensors(folder / name / "model.safetensors", tensors)
    (folder / "sql").mkdir()
    write_tensors(folder / "sql" / "adapter_model.safetensors", adapter)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "sql" / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SimulatedDaemon]:
    made = SimulatedDaemon(tmp_path / "home")
    made.set(PATH=os.pathsep.join([str(install_vllm()), os.environ["PATH"]]))
    yield made
    made.stop()


def test_an_adapter_answers_as_the_merged_model(daemon: SimulatedDaemon, tmp_path: Path) -> None:
    write_models(tmp_path)
    shared = {"engine": "vllm", "precision": "fp32", "context": 256, "concurrency": 2, "args": {"enforce-eager": True}}
    models = {
        "chat": {"model": "./base", "adapters": {"sql": "./sql"}, **shared},
        "merged": {"model": "./merged", **shared},
    }
    events = list(daemon.start().apply(json.dumps({"models": models}), str(tmp_path), dry_run=False))
    assert events[-1]["event"] == "done", events
    home = daemon.home.read_daemon()
    assert home is not None
    port = int(home.url.rsplit(":", 1)[1])

    def text(model: str) -> str:
        body = {"model": model, "prompt": "hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = call(port, "POST", "/v1/completions", body)
        assert answer.status == 200, answer.body
        return str(answer.json["choices"][0]["text"])

    assert text("chat:sql") == text("merged")
    assert text("chat") != text("merged")
