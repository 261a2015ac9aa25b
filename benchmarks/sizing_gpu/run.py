"""Own truth: models of several shapes with random weights in transformers on a real GPU, measured and compared with the sizing.

    PYTHONPATH=src python3 -m benchmarks.sizing_gpu.run [--out FILE] [--only MODEL ...]
    PYTHONPATH=src python3 -m benchmarks.sizing_gpu.run --estimate-again

Needs a GPU, torch and transformers; no network, no checkpoints, none of the project's dependencies. Every case makes the
model from its catalogue shape, generates, and reads the peak of torch's allocator; the device context is what the driver says
is used before and after torch touched the device. Takes about three minutes on an H200. Measured rows stay in the file until
they are measured again; `--estimate-again` needs no GPU and sets today's estimates beside them.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from aimgpu.sizing import Architecture, ModelFacts, built_in
from benchmarks.sizing_gpu.rows import Row, estimated, figures_of, merged

_RESULT = Path(__file__).parents[1] / "results" / "sizing_gpu.json"
_SECONDS = 240  # no new model after this
_CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "mistral": "MistralConfig",
    "granite": "GraniteConfig",
    "gemma2": "Gemma2Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "gpt_oss": "GptOssConfig",
}
# Grouped and full heads, tied and untied, narrow and wide feed-forwards, windows, experts, small and large vocabularies.
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
    "google/gemma-2-2b-it",
    "Qwen/Qwen3-30B-A3B",
    "openai/gpt-oss-20b",
)
_CASES = ((1, 64, 1), (4096, 32, 1), (16384, 16, 1), (2048, 16, 8))  # prompt, answer, batch
_LONG_CASES = ((30001, 16, 1), (32768, 16, 1))  # the mask of a window is the widest there; rows of 30001 are not aligned
_CASES_OF = {
    "google/gemma-3-1b-it": (*_CASES, *_LONG_CASES),
    "openai/gpt-oss-20b": ((1, 64, 1), (2048, 16, 1), (8192, 16, 1)),  # every head's scores are written out
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    torch: Any
    transformers: Any
    gpu: str
    context_bytes: int | None  # None: no tool told what the driver counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=_RESULT)
    parser.add_argument("--only", nargs="*", default=_MODELS)
    parser.add_argument("--estimate-again", action="store_true")
    given = parser.parse_args()
    old: Row = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    result = _estimate_again(old) if given.estimate_again else _measured(old, given.only)
    for path in (given.out, *([Path(os.environ["OUT"]) / "sizing_gpu.json"] if os.environ.get("OUT") else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))
    return 0


def _estimate_again(old: Row) -> Row:
    rows = [estimated(row, old["versions"]["transformers"], old["machine"]) for row in old["rows"]]
    return old | {"estimated": _now(), "figures": figures_of(rows, old["figures"]["context_bytes"]), "rows": rows}


def _measured(old: Row, models: Iterable[str]) -> Row:
    """Rows of an earlier run stay where machine and versions are the same."""
    begin = time.monotonic()
    machine = _start()
    new: list[Row] = []
    for name in models:
        if time.monotonic() - begin > _SECONDS:
            print(f"out of time before {name}")
            break
        new += _measure_model(machine, name)
    result = _result(machine, new)
    if any(old.get(name) != result[name] for name in ("machine", "versions")):
        return result
    return _result(machine, merged(old["rows"], new))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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


def _measure_model(machine: Machine, name: str) -> list[Row]:
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
    if hasattr(make_config(), "sliding_window"):
        values["sliding_window"] = shape.sliding_window or None  # said even where there is none: some families' default is one
    if shape.experts:
        values |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_used,
            "moe_intermediate_size": shape.expert_intermediate_size,
        }
    torch = machine.torch
    # Transformers loads a checkpoint into one block that it took before; so do we, else every matrix is rounded up alone.
    block = torch.empty(shape_bytes, dtype=torch.uint8, device="cuda")
    del block
    with torch.device("cuda"):
        model = machine.transformers.AutoModelForCausalLM.from_config(make_config(**values), dtype=torch.bfloat16)
    return model.eval()


def _measure_cases(machine: Machine, model: Any, facts: ModelFacts) -> Iterator[Row]:  # noqa: ANN401 -- as above
    torch = machine.torch
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for prompt, answer, batch in _CASES_OF.get(facts.name, _CASES):
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
        row = {
            "model": facts.name,
            "prompt": prompt,
            "answer": answer,
            "batch": batch,
            "window": getattr(model.config, "sliding_window", None),
            "parameters_built": parameters,
            "measured_bytes": torch.cuda.max_memory_allocated(),
        }
        yield estimated(row, machine.transformers.__version__, machine.gpu)


def _result(machine: Machine, rows: list[Row]) -> Row:
    return {
        "command": "PYTHONPATH=src python3 -m benchmarks.sizing_gpu.run",
        "date": _now(),
        "machine": f"{machine.gpu}, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": machine.torch.__version__,
            "transformers": machine.transformers.__version__,
        },
        "figures": figures_of(rows, machine.context_bytes),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
