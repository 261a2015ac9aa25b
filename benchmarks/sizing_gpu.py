"""Own truth: models of several shapes with random weights in transformers on a real GPU, measured and compared with the sizing.

    PYTHONPATH=src python3 -m benchmarks.sizing_gpu [--out FILE]

Needs a GPU, torch and transformers; no network, no checkpoints, none of the project's dependencies. Every case makes the
model from its catalogue shape, generates, and reads the peak of torch's allocator; the device context is what the driver says
is used before and after torch touched the device. Takes about two minutes on an H200.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from aimgpu.domain import Vendor
from aimgpu.sizing import Architecture, ModelFacts, SizingRequest, built_in, estimate_footprint

_RESULT = Path(__file__).parent / "results" / "sizing_gpu.json"
_ALLOCATOR_TERMS = ("weights", "kv_cache", "activations", "engine")
_SECONDS = 150  # no new model after this
_CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "mistral": "MistralConfig",
    "granite": "GraniteConfig",
}
# Grouped and full heads, tied and untied, narrow and wide feed-forwards, a window, small and large vocabularies.
_MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "google/gemma-3-1b-it",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "ibm-granite/granite-3.3-2b-instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "microsoft/Phi-3.5-mini-instruct",
    "Qwen/Qwen3-4B",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "microsoft/phi-4",
)
_CASES = ((1, 64, 1), (4096, 32, 1), (16384, 16, 1), (2048, 16, 8))  # prompt, answer, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    torch: Any
    transformers: Any
    vendor: Vendor
    gpu: str
    context_bytes: int | None  # None: no tool told what the driver counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=_RESULT)
    out: Path = parser.parse_args().out
    begin = time.monotonic()
    machine = _start()
    rows: list[dict[str, object]] = []
    for name in _MODELS:
        if time.monotonic() - begin > _SECONDS:
            print(f"out of time before {name}")
            break
        rows += _measure_model(machine, name)
    result = _result(machine, rows)
    for path in (out, *([Path(os.environ["OUT"]) / "sizing_gpu.json"] if os.environ.get("OUT") else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))
    return 0


def _start() -> Machine:
    before = _used_bytes()
    torch, transformers = import_module("torch"), import_module("transformers")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    after = _used_bytes()
    own = torch.cuda.memory_reserved()
    return Machine(
        torch=torch,
        transformers=transformers,
        vendor=Vendor.AMD if torch.version.hip else Vendor.NVIDIA,
        gpu=torch.cuda.get_device_name(0),
        context_bytes=after - before - own if before is not None and after is not None else None,
    )


def _used_bytes() -> int | None:
    """What the driver counts as used on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return int(answer.strip()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _measure_model(machine: Machine, name: str) -> list[dict[str, object]]:
    facts = built_in().find(name)
    if facts is None or facts.architecture is None:
        return [{"model": name, "skipped": "not in the catalogue"}]
    try:
        model = _make_model(machine, facts.architecture, 2 * facts.parameters)
        return list(_measure_cases(machine, model, facts))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # one family that cannot be built spoils no other
        return [{"model": name, "skipped": f"{type(error).__name__}: {error}"[:200]}]
    finally:
        gc.collect()
        machine.torch.cuda.empty_cache()


def _make_model(machine: Machine, shape: Architecture, shape_bytes: int) -> Any:  # noqa: ANN401 -- torch is not there where this is checked
    make_config = getattr(machine.transformers, _CONFIGS[shape.family])
    values: dict[str, object] = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": max(shape.max_context, 32768),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if shape.sliding_window:
        values["sliding_window"] = shape.sliding_window
    torch = machine.torch
    # Transformers loads a checkpoint into one block that it took before; so do we, else every matrix is rounded up alone.
    block = torch.empty(shape_bytes, dtype=torch.uint8, device="cuda")
    del block
    with torch.device("cuda"):
        model = machine.transformers.AutoModelForCausalLM.from_config(make_config(**values), dtype=torch.bfloat16)
    return model.eval()


def _measure_cases(machine: Machine, model: Any, facts: ModelFacts) -> Iterator[dict[str, object]]:  # noqa: ANN401 -- as above
    torch = machine.torch
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for prompt, answer, batch in _CASES:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(3, 1000, (batch, prompt), device="cuda")
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=answer,
                min_new_tokens=answer,
                do_sample=False,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated()
        yield _row(machine, facts, (prompt, answer, batch), parameters, measured)


def _row(machine: Machine, facts: ModelFacts, case: tuple[int, int, int], parameters: int, measured: int) -> dict[str, object]:
    prompt, answer, batch = case
    request = SizingRequest(
        model=facts,
        engine="transformers",
        engine_version=machine.transformers.__version__,
        precision="bf16",
        context_tokens=prompt + answer,
        prompt_tokens=prompt,
        concurrency=batch,
        vendor=machine.vendor,
        gpu=machine.gpu.removeprefix("NVIDIA ").removeprefix("AMD Instinct "),
        flash_attention=False,
    )
    footprint = estimate_footprint(request)
    estimated = sum(term.memory_bytes for term in footprint.terms if term.name in _ALLOCATOR_TERMS)
    return {
        "model": facts.name,
        "prompt": prompt,
        "answer": answer,
        "batch": batch,
        "parameters_built": parameters,
        "parameters_catalogue": facts.parameters,
        "measured_bytes": measured,
        "estimated_bytes": estimated,
        "error_percent": round(100 * (estimated / measured - 1), 2),
        "terms": {term.name: term.memory_bytes for term in footprint.terms},
    }


def _result(machine: Machine, rows: Sequence[dict[str, object]]) -> dict[str, object]:
    errors = [float(str(row["error_percent"])) for row in rows if "error_percent" in row]
    figures: dict[str, object] = {"points": len(errors), "context_bytes": machine.context_bytes}
    if errors:
        figures |= {
            "mape": round(statistics.fmean(map(abs, errors)), 2),
            "worst_under": -min([*errors, 0.0]),
            "worst_over": max([*errors, 0.0]),
        }
    return {
        "command": "PYTHONPATH=src python3 -m benchmarks.sizing_gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{machine.gpu}, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": machine.torch.__version__,
            "transformers": machine.transformers.__version__,
        },
        "figures": figures,
        "rows": list(rows),
    }


if __name__ == "__main__":
    sys.exit(main())
