"""llama.cpp itself, loading models of real shapes on this machine's CPU: its buffers beside the estimate from the same file.

The CPU backend lays its graph out by the same allocator as a GPU's, holds the input embedding too, and keeps one tensor more of
the layer's width beside the feed-forward part; it makes no 16-bit copy of a quantised cache.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sizing.sparse_models import Shape, write_model

from aimgpu.sizing import ModelFacts, SizingRequest, estimate_footprint, read_gguf
from aimgpu.units import MIB

_BUFFER = re.compile(r"\b(?:load_tensors|llama_kv_cache|sched_reserve): +\S+ (model|KV|compute) buffer size = +([\d.]+) MiB")
_PROGRAM = Path(__file__).parent.parent / "programs" / "llamacpp_buffers.py"
_SHAPES = {
    "llama": Shape(family="llama", hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192),
    "llama-tied-q4": Shape(family="llama", hidden=2048, heads=16, kv_heads=8, inner=5632, tied=True, quant="q4_k"),
    "qwen2": Shape(family="qwen2", hidden=1536, heads=12, kv_heads=2, inner=8960, has_biases=True),
    "qwen3": Shape(family="qwen3", hidden=1024, heads=16, kv_heads=8, norms_heads=True, tied=True),
    "qwen3moe-narrow": Shape(
        family="qwen3moe", hidden=2048, heads=16, norms_heads=True, experts=16, experts_used=8, expert_inner=768
    ),
    "qwen3moe-wide": Shape(
        family="qwen3moe", hidden=1024, heads=8, norms_heads=True, experts=16, experts_used=4, expert_inner=2048, inner=2048
    ),
    "gemma3": Shape(
        family="gemma3",
        layers=6,
        hidden=1024,
        heads=4,
        kv_heads=1,
        head_dim=256,
        inner=6144,
        tied=True,
        window=512,
        norms_heads=True,
        norms_after=True,
    ),
    "gemma2": Shape(family="gemma2", hidden=2304, heads=8, head_dim=256, inner=9216, tied=True, window=4096, norms_after=True),
    "gpt-oss": Shape(
        family="gpt-oss",
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inner=2880,
        window=128,
        experts=8,
        experts_used=4,
        expert_inner=2880,
        has_biases=True,
        has_sinks=True,
    ),
    "deepseek2": Shape(
        family="deepseek2",
        layers=3,
        hidden=2048,
        heads=64,
        kv_heads=1,
        latent=512,
        experts=16,
        experts_used=6,
        expert_inner=1408,
        inner=4096,
    ),
}
_RUNS: dict[str, dict[str, Any]] = {
    "plain": {"context": 4096},
    "long": {"context": 32768},
    "slots": {"context": 16384, "slots": 4},
    "wide-batch": {"context": 8192, "ubatch": 2048},
    "small-batch": {"context": 4096, "ubatch": 128},
    "q8-cache": {"context": 8192, "kv": "q8_0"},
    "q4-cache": {"context": 8192, "kv": "q4_0"},
    "no-flash": {"context": 4096, "flash": False},
    "long-no-flash": {"context": 16384, "flash": False, "slots": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", shape) for name, shape in _SHAPES.items()}


def _pairs() -> list[tuple[str, str]]:
    """Every shape with a third of the runs, every run with a third of the shapes."""
    return [(name, run) for row, name in enumerate(_SHAPES) for column, run in enumerate(_RUNS) if (row + column) % 3 == 0]


@pytest.mark.parametrize(("name", "run"), _pairs())
def test_llama_cpp_allocates_what_was_sized(name: str, run: str, models: dict[str, Path]) -> None:
    settings: dict[str, Any] = (
        {"slots": 1, "ubatch": 512, "kv": "f16", "flash": True} | _RUNS[run] | {"path": str(models[name])}
    )
    told = _load(settings)
    with models[name].open("rb") as file:
        facts = read_gguf(file, models[name].stat().st_size)
    terms = _estimate(facts, settings)
    embedding = 0 if facts.architecture is None or facts.architecture.tied_embeddings else facts.input_embedding_bytes or 0
    width = settings["ubatch"] * _SHAPES[name].hidden * 4 / MIB
    assert terms["kv_cache"] == pytest.approx(told["KV"], abs=0.02)
    assert terms["weights"] + embedding / MIB == pytest.approx(told["model"], abs=0.02)
    assert told["compute"] - 4 * width <= terms["activations"] <= told["compute"] + _copy_mib(settings, _SHAPES[name]) + 3


def _copy_mib(settings: dict[str, Any], shape: Shape) -> float:
    """What a GPU keeps beside a quantised cache, and this CPU does not."""
    if settings["kv"] == "f16":
        return 0
    elements = shape.latent + 64 if shape.latent else 2 * shape.kv_heads * shape.head_dim
    return float(settings["context"] * elements * 2 / MIB)


def _estimate(facts: ModelFacts, settings: dict[str, Any]) -> dict[str, float]:
    request = SizingRequest(
        model=facts,
        engine="llamacpp",
        engine_version=importlib.metadata.version("xllamacpp"),
        context_tokens=settings["context"] // settings["slots"],
        concurrency=settings["slots"],
        batched_tokens=settings["ubatch"],
        kv_precision=settings["kv"].replace("f16", "fp16"),
        flash_attention=settings["flash"],
    )
    return {term.name: term.memory_bytes / MIB for term in estimate_footprint(request).terms}


def _load(settings: dict[str, Any]) -> dict[str, float]:
    """Buffers in MiB by kind, as llama.cpp tells them; it is ended as soon as it has."""
    command = [sys.executable, str(_PROGRAM), json.dumps(settings)]
    told: dict[str, float] = {}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            match = _BUFFER.search(line)
            if match:
                told[match[1]] = told.get(match[1], 0) + float(match[2])
            if "sched_reserve: graph" in line:
                process.kill()
                return told
    if process.returncode < 0:
        pytest.skip(f"the wheel's llama.cpp died of signal {-process.returncode}: this CPU is none that it was built for")
    pytest.fail("".join(lines)[-2000:])
