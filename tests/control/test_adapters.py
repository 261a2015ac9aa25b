"""Adapters in a stack file and on disk: their names, what they take, and which fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.programs import tiny_llama

from aimgpu.control.sizing_inputs.adapter_files import read_adapters
from aimgpu.control.sizing_inputs.sizing_basis import SizingBasis
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.control.stack.stack_text import write_stack
from aimgpu.domain import Deployment, Footprint, Instance, InstanceState, Priority, ServiceObjective
from aimgpu.engines.llamacpp.arguments import server_arguments
from aimgpu.engines.protocols import LaunchRequest, LocalModel
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.errors import InvalidInput, InvalidStackFile

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
HIDDEN = 4096


def stack(adapters: Any, folder: Path, **fields: Any) -> Deployment:
    text = json.dumps({"models": {"chat": {"model": MODEL, "adapters": adapters, **fields}}})
    (found,) = parse_stack(text, base_directory=folder).deployments
    return found


def write_folder(folder: Path, rank: int = 8, *, width: int = HIDDEN, layer: int = 0, **config: Any) -> Path:
    """An adapter as PEFT saves it."""
    folder.mkdir()
    given = {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_bytes(orjson.dumps(given))
    name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": (rank, width), f"{name}.lora_B.weight": (width, rank)}
    head: dict[str, Any] = {}
    at = 0
    for tensor, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        head[tensor] = {"dtype": "F16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = orjson.dumps(head)
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return folder


def launch(deployment: Deployment, footprint: Footprint, folder: Path) -> LaunchRequest:
    instance = Instance(
        id="chat-0", deployment="chat", replica=0, model="m", engine="x", launcher="process", state=InstanceState.LOADING
    )
    return LaunchRequest(
        instance=instance,
        model_path=None,
        footprint=footprint,
        environment={},
        device_nodes=(),
        run_directory=folder / "run",
        api_key="k",
        overrides=deployment.overrides,
    )


def test_each_has_a_name_a_class_and_a_promise_of_its_own(tmp_path: Path) -> None:
    tone = {"path": "/a/tone", "name": "polite", "priority": "high", "slo": {"ttft_p95": "1s"}}
    chat = stack({"sql": "./a/sql", "tone": tone}, tmp_path)
    sql, polite = chat.overrides.adapters
    assert (sql.name, sql.path, sql.priority, sql.objective) == ("chat:sql", str(tmp_path / "a/sql"), None, None)
    assert (polite.name, polite.path, polite.priority) == ("polite", "/a/tone", Priority.HIGH)
    assert polite.objective == ServiceObjective(ttft_p95_ms=1000)
    assert parse_stack(write_stack([chat])).deployments == (chat,)


@pytest.mark.parametrize(
    ("adapters", "fields"),
    [
        ({}, {}),
        ({"sql": {"name": "x"}}, {}),
        ({"a b": "./x"}, {}),
        ({"sql": "./x,y"}, {}),
        ({"sql": {"path": "./x", "name": "chat"}}, {}),
        ({"sql": {"path": "./x", "name": "x"}, "tone": {"path": "./y", "name": "x"}}, {}),
        ({"sql": "./x"}, {"aliases": ["chat:sql"]}),
        ({"sql": "./x"}, {"engine": "command", "command": "run {port}", "gpu": {"memory": "1GiB"}}),
    ],
)
def test_what_callers_could_not_tell_apart_is_refused(adapters: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidStackFile):
        stack(adapters, tmp_path, **fields)


def test_vllm_is_given_room_for_all_of_them_at_the_largest_rank(tmp_path: Path) -> None:
    write_folder(tmp_path / "sql", rank=4)
    write_folder(tmp_path / "tone", rank=12)
    chat = stack({"sql": "./sql", "tone": "./tone"}, tmp_path)
    basis = SizingBasis(versions={"vllm": "0.26.0"})
    plain = basis.size(replace(chat, overrides=replace(chat.overrides, adapters=())), "vllm", None, None)
    sized = basis.size(chat, "vllm", None, None)
    # 32 layers, rank 16, two adapters, 16 bits: A of q, k, v, o, gate, up (4096 in) and down (14336 in), and all Bs.
    inputs, outputs = 6 * 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert sized.term_bytes("adapters") == 2 * 32 * 16 * 2 * (inputs + outputs)
    assert sized.total_bytes - plain.total_bytes >= sized.term_bytes("adapters")
    command = VllmEngine(program="no-vllm").command(launch(chat, sized, tmp_path))
    line = " ".join(command.argv)
    assert "--enable-lora --" in line
    assert "--max-loras 2" in line
    assert "--max-lora-rank 16" in line
    modules = command.argv[command.argv.index("--lora-modules") + 1 :]
    names = {"chat:sql": f"{tmp_path}/sql", "chat:tone": f"{tmp_path}/tone"}
    assert [json.loads(one) for one in modules] == [{"name": name, "path": path} for name, path in names.items()]


def test_llama_server_loads_them_without_effect(tmp_path: Path) -> None:
    weights, adapter = tiny_llama.make_weights(), tiny_llama.make_adapter(1)
    model = tiny_llama.write_model(tmp_path / "base.gguf", weights)
    tiny_llama.write_adapter(tmp_path / "sql.gguf", adapter)
    chat = replace(stack({"sql": "./sql.gguf"}, tmp_path), model=str(model))
    sized = SizingBasis().size(chat, "llamacpp", LocalModel(name="base", path=model, format="gguf"), None)
    assert sized.term_bytes("adapters") == sum(one.nbytes for one in adapter.values())
    line = " ".join(server_arguments(launch(chat, sized, tmp_path), model, 1))
    assert f"--lora {tmp_path}/sql.gguf --lora-init-without-apply" in line


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"width": 2048}, "made for a width of 2048, and the model's is 4096"),
        ({"layer": 40}, "changes layer 40 of a model with 32"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"rank": 513}, "no LoRA adapter"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(config: dict[str, Any], shown: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "sql", **config)
    with pytest.raises(InvalidInput, match=shown):
        SizingBasis().size(stack({"sql": "./sql"}, tmp_path), "vllm", None, None)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "ollama"])
@pytest.mark.parametrize("content", [None, b"", b"GGUF" + b"\xff" * 100, b"{}"])
def test_a_damaged_file_is_refused_in_words(engine: str, content: bytes | None, tmp_path: Path) -> None:
    place = tmp_path / "sql"
    if engine == "vllm" and content is not None:
        place.mkdir()
        (place / "adapter_config.json").write_bytes(content)
    elif content is not None:
        place.write_bytes(content)
    chat = stack({"sql": "./sql"}, tmp_path)
    facts = SizingBasis().catalogue().find(MODEL)
    assert facts is not None
    with pytest.raises(InvalidInput):
        read_adapters(chat, engine, facts, None)
