import json
from pathlib import Path

import pytest
import yaml

from aimgpu.cli.main import run_command
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.engines.models import store
from aimgpu.sizing.correction import Measurement
from aimgpu.units import GIB
from aimgpu.wiring import find_device


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run_command([*arguments, "--json"]) == 0
    value: dict[str, object] = json.loads(capsys.readouterr().out)
    return value


def test_size_of_a_grant_says_what_it_serves_and_how_often_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["size", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "H200-141", "--memory"]
    assert run_command([*arguments, "60GiB"]) == 0
    out = capsys.readouterr().out
    assert "Serves 256 requests at once, a KV cache of " in out
    assert "2 copies side by side" in out
    assert run_command([*arguments, "200GiB"]) != 0
    assert "200GiB is more than one H200-141 has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "model", "advice"),
    [
        ("vllm", "Qwen/Qwen2.5-7B-Instruct", None),
        ("llamacpp", "Qwen/Qwen2.5-7B-Instruct-GGUF", None),
        ("ollama", "hf.co/Qwen/Qwen2.5-7B-Instruct-GGUF", None),
        ("llamacpp", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "raise context or concurrency, or ask for 2"),
        ("vllm", "BAAI/bge-m3", "vllm has no use for it; ask for 2"),  # an encoder has no KV cache
    ],
)
def test_what_a_grant_leaves_unused_is_shown_by_size_and_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str, model: str, advice: str | None
) -> None:
    sizing = ["size", model, "--gpu", "H200-141", "--engine", engine, "--memory", "60GiB"]
    assert run_command(sizing) == 0
    out = capsys.readouterr().out
    assert ("of 60GiB unused" in out) == (advice is not None)
    assert (advice or "") in out
    service = _json(capsys, *sizing)["service"]
    assert isinstance(service, dict)
    assert service["kv_cache_bytes"] >= 0
    stack = tmp_path / "stack.yaml"
    entry = {"model": model, "engine": engine, "launcher": "docker", "gpu": {"memory": "60GiB"}}
    stack.write_text(json.dumps({"models": {"m": entry}}))
    planning = ["plan", "-f", str(stack), "--gpu", "H200-141"]
    assert run_command(planning) == 0
    planned = capsys.readouterr().out
    assert "m-0: " in planned
    assert (advice or "") in planned
    placements = _json(capsys, *planning)["placements"]
    assert isinstance(placements, list)
    (placement,) = placements
    assert placement["service"]["unused_bytes"] == service["unused_bytes"]
    assert placement["service"]["kv_cache_bytes"] == service["kv_cache_bytes"]


def test_size_and_plan_show_the_slots_and_the_context_that_a_grant_is_good_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = "Qwen/Qwen2.5-7B-Instruct"
    options = ["--gpu", "H200-141", "--engine", "llamacpp", "--precision", "q4_k_m", "--memory", "20GiB"]
    assert run_command(["size", model, *options]) == 0
    out = capsys.readouterr().out
    serves = "16 requests at once of 16,384 tokens each, a KV cache of 14GiB"
    assert "context 16384, 16 requests at once\n" in out
    assert f"Serves {serves}." in out
    assert "--ctx-size 262144 --parallel 16" in out
    assert run_command(["size", model, *options, "--context", "4096", "--concurrency", "2"]) == 0
    assert "context 4096, 2 requests at once\n" in capsys.readouterr().out
    stack = tmp_path / "stack.yaml"
    entry = {"model": f"{model}-GGUF:Q4_K_M", "engine": "llamacpp", "gpu": {"memory": "20GiB"}}
    stack.write_text(json.dumps({"models": {"m": entry}}))
    assert run_command(["plan", "-f", str(stack), "--gpu", "H200-141"]) == 0
    assert f"m-0: {serves}\n" in capsys.readouterr().out


def test_on_a_simulated_gpu_of_this_machine_a_plan_gives_nothing_away_and_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stack = tmp_path / "stack.yaml"
    entry = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "llamacpp", "gpu": {"fraction": 0.25}}
    stack.write_text(json.dumps({"gpus": {"simulated": "MI300X"}, "models": {"m": entry}}))
    assert run_command(["plan", "-f", str(stack)]) == 0
    out = capsys.readouterr().out
    assert "m-0: 1 request at once of 8,192 tokens, a KV cache of 180MiB\n" in out
    assert "GiB of 48GiB unused: it runs in host memory here; ask for 1." in out


def test_size_prints_the_fields_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    answer = _json(
        capsys, "size", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "MI300X", "--context", "8192", "--concurrency", "8"
    )
    assert answer.keys() >= {"total_bytes", "terms", "flags", "exactness", "fits"}
    terms, flags, fits = answer["terms"], answer["flags"], answer["fits"]
    assert isinstance(terms, list)
    assert isinstance(flags, dict)
    assert isinstance(fits, dict)
    assert sum(term["memory_bytes"] for term in terms) == answer["total_bytes"]
    assert [term["name"] for term in terms] == [
        "weights",
        "kv_cache",
        "activations",
        "graphs",
        "engine",
        "context",
        "startup",
    ]
    assert all(term["formula"] and term["exactness"] in ("exact", "estimated", "measured") for term in terms)
    assert flags["--max-num-seqs"] == "8"
    assert fits["whole"] is True
    assert fits["product"] == "MI300X"


def test_size_shows_a_waterfall_what_fits_and_what_would_be_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "mi300x"]) == 0
    text = capsys.readouterr().out
    for word in (
        "weights",
        "kv_cache",
        "total",
        "Fits on one MI300X (simulated)",
        "partition cpx",
        "weights in int4",
        "--max-model-len",
    ):
        assert word in text


def test_size_says_on_how_many_devices_a_large_model_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["size", "deepseek-ai/DeepSeek-V3", "--gpu", "MI300X"]) == 0
    text = capsys.readouterr().out
    assert "Does not fit on one MI300X" in text
    assert "It would on 4" in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["size", "no/such-model"], 2, "--parameters"),
        (["size", "unsloth/Llama-3.2-30B-Vision"], 2, "11B and 90B"),
        (["size", "Qwen/Qwen3-8B", "--precision", "fp17"], 2, "int4"),
        (["size", "Qwen/Qwen3-8B", "--gpu", "GTX9"], 2, "MI300X"),
        (["size", "Qwen/Qwen3-8B", "--context", "0"], 2, "from 1 to"),
        (["size", "./absent.gguf"], 2, "does not exist"),
        (["catalogue", "remove", "no/such"], 4, "list --mine"),
        (["catalogue", "show", "no/such"], 2, "catalogue list"),
    ],
)
def test_a_wrong_wish_says_what_to_give(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert run_command(arguments) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


def test_a_packaged_model_is_sized_by_its_short_name_before_it_is_fetched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_installed_path", lambda _packaged: None)
    whole, short = (_json(capsys, "size", name)["total_bytes"] for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"))
    assert short == whole
    stack = tmp_path / "stack.yaml"
    stack.write_text("models: {chat: {model: smollm2}}")
    assert _json(capsys, "plan", "--file", str(stack), "--gpu", "MI300X")["placements"]
    assert run_command(["size", "smollm2", "--engine", "ollama"]) != 0  # its tag of this name is another model
    assert "nothing is known" in capsys.readouterr().err
    assert run_command(["catalogue", "add", "smollm2", "--parameters", "7B"]) == 0  # the user's own comes first
    capsys.readouterr()
    assert int(str(_json(capsys, "size", "smollm2")["total_bytes"])) > 13 * GIB


def test_a_given_parameter_count_is_used_and_said_to_be_a_fallback(capsys: pytest.CaptureFixture[str]) -> None:
    answer = _json(capsys, "size", "acme/new", "--parameters", "7B")
    assert "fallback" in str(answer["notes"])
    assert int(str(answer["total_bytes"])) > 13 * GIB


def test_a_local_gguf_is_exact_in_its_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_gguf: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf)
    answer = _json(capsys, "size", str(path), "--context", "512")
    assert answer["engine"] == "llamacpp"  # without --engine: what serves such a file
    terms = answer["terms"]
    assert isinstance(terms, list)
    assert (terms[0]["memory_bytes"], terms[0]["exactness"]) == (139520, "exact")


def test_models_are_added_imported_shown_and_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _json(capsys, "catalogue", "add", "acme/one", "--parameters", "7B") == {"added": "acme/one"}
    file = tmp_path / "models.csv"
    file.write_text("# ours\nmodel_id,parameters,memory_gb\nacme/two,1.5B,4.0\nacme/three,70B,160\n")
    assert _json(capsys, "catalogue", "import", str(file)) == {"added": ["acme/two", "acme/three"]}
    listed = _json(capsys, "catalogue", "list", "acme")["models"]
    assert isinstance(listed, list)
    assert [model["id"] for model in listed] == ["acme/one", "acme/two", "acme/three"]
    assert _json(capsys, "catalogue", "show", "ACME/Two")["parameters"] == 1_500_000_000
    assert int(str(_json(capsys, "size", "acme/two")["total_bytes"])) > 3_000_000_000
    assert _json(capsys, "catalogue", "remove", "acme/one") == {"removed": "acme/one"}
    mine = _json(capsys, "catalogue", "list", "--mine")["models"]
    assert isinstance(mine, list)
    assert [model["id"] for model in mine] == ["acme/two", "acme/three"]


def test_listed_memory_is_kept_and_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "models.csv"
    file.write_text("id,parameters,precision,memory_gb,mem_int4_gb\nacme/two,1.5B,fp16,14.7,3.3\nacme/eight,8B,int8,30.25,\n")
    assert run_command(["catalogue", "import", str(file)]) == 0
    capsys.readouterr()
    assert run_command(["catalogue", "add", "acme/hand", "--parameters", "7B", "--set", "memory_gb=33.1"]) == 0
    capsys.readouterr()
    assert _json(capsys, "catalogue", "show", "acme/two")["memory_bytes"] == {"fp16": 14_700_000_000, "int4": 3_300_000_000}
    sized = {
        ("acme/two", "fp16"): 14_700_000_000,
        ("acme/two", "bf16"): 14_700_000_000,
        ("acme/eight", "int8"): 30_250_000_000,
        ("acme/hand", "fp16"): 33_100_000_000,
    }
    for (model, precision), memory_bytes in sized.items():
        answer = _json(capsys, "size", model, "--precision", precision, "--engine", "transformers", "--context", "512")
        assert answer["total_bytes"] == memory_bytes
        assert "and are used" in str(answer["notes"])
    larger = _json(capsys, "size", "acme/two", "--precision", "int4", "--context", "32768", "--concurrency", "16")
    assert int(str(larger["total_bytes"])) > 3_300_000_000
    assert "is more, and is used" in str(larger["notes"])


@pytest.mark.parametrize(
    ("memory", "why"), [("9", "under its raw weights"), ("lots", "not a number"), ("1e30", "more than 1000000")]
)
def test_listed_memory_that_cannot_be_used_is_refused(capsys: pytest.CaptureFixture[str], memory: str, why: str) -> None:
    assert run_command(["catalogue", "add", "acme/seven", "--parameters", "7B", "--set", f"memory_gb={memory}"]) == 2
    assert why in capsys.readouterr().err


def test_a_file_of_a_spreadsheet_with_comments_anywhere_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "models.csv"
    file.write_text('\ufeff# a "b"\r\nid,parameters,source\r\n\r\n  # more\r\nacme/one,7B,"me, myself"\r\n', newline="")
    assert _json(capsys, "catalogue", "import", str(file)) == {"added": ["acme/one"]}
    assert _json(capsys, "catalogue", "show", "acme/one")["source"] == "catalogue: me, myself"


def test_a_known_model_cannot_be_listed_with_its_active_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "models.csv"
    file.write_text("id,parameters,memory_gb\ndeepseek-ai/DeepSeek-V3,37B,105\n")
    assert run_command(["catalogue", "import", str(file)]) == 2
    assert "684.5B" in capsys.readouterr().err
    assert run_command(["catalogue", "add", "mistralai/Mistral-Large", "--parameters", "70B"]) == 2
    assert "122.6B" in capsys.readouterr().err


def test_an_import_with_one_wrong_row_changes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "models.csv"
    file.write_text("id,parameters,memory_gb\nacme/good,1B,4\nacme/bad,70B,80\n")
    assert run_command(["catalogue", "import", str(file)]) == 2
    assert "line 3" in capsys.readouterr().err
    assert _json(capsys, "catalogue", "list", "--mine") == {"models": []}


def test_a_model_added_from_its_files_has_their_shape(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_gguf: bytes
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf)
    assert run_command(["catalogue", "add", "acme/tiny", "--path", str(path)]) == 0
    capsys.readouterr()
    shape = _json(capsys, "catalogue", "show", "acme/tiny")["architecture"]
    assert isinstance(shape, dict)
    assert (shape["layers"], shape["kv_heads"]) == (2, 2)


def test_profiles_are_written_in_both_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "profiles"
    answer = _json(capsys, "profiles", "generate", "--gpu", "MI300X", "--out", str(out), "--model", "Qwen/Qwen3-32B")
    assert answer["profiles"] == 3
    assert json.loads((out / "Qwen_Qwen3-32B-fp16.json").read_text())["variant_id"] == "Qwen/Qwen3-32B-fp16"
    content = yaml.safe_load((out / "aim" / "Qwen" / "Qwen3-32B" / "vllm-mi300x-fp16-tp1-latency.yaml").read_text())
    assert content["metadata"]["gpu"] == "MI300X"
    assert content["engine_args"]["dtype"] == "float16"


def test_amds_format_alone_is_refused_where_it_knows_no_such_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["profiles", "generate", "--gpu", "H200", "--format", "aim", "--out", str(tmp_path)]) == 2
    assert "does not know the GPU H200-141" in capsys.readouterr().err
    both = _json(capsys, "profiles", "generate", "--gpu", "H200", "--model", "Qwen/Qwen3-8B", "--out", str(tmp_path))
    assert (both["files"], both["left_out_of_aim"]) == (3, 3)


def test_all_profiles_of_a_gpu_are_at_least_114(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = _json(capsys, "profiles", "generate", "--gpu", "MI355X", "--out", str(tmp_path / "all"), "--format", "json")
    assert int(str(answer["profiles"])) >= 114
    assert len(list((tmp_path / "all").glob("*.json"))) == answer["profiles"]


def test_what_was_measured_is_shown_beside_the_estimate_and_can_be_forgotten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = Measurement(
        model="Qwen/Qwen3-8B",
        engine="vllm",
        engine_version=None,
        family="qwen3",
        gpu="MI300X",
        term="activations",
        estimated_bytes=GIB,
        measured_bytes=3 * GIB // 2,
    )
    MeasurementFile(tmp_path / "home" / "measurements.json").add([one])
    arguments = ("size", "Qwen/Qwen3-8B", "--gpu", "MI300X")
    assert run_command(list(arguments)) == 0
    assert "measured in 1 runs, estimated" in capsys.readouterr().out
    corrected = int(str(_json(capsys, *arguments)["total_bytes"]))
    assert run_command(["measurements", "list"]) == 0
    assert "x 1.50" in capsys.readouterr().out
    assert _json(capsys, "measurements", "forget", "Qwen/Qwen3-8B") == {"forgotten": 1}
    assert int(str(_json(capsys, *arguments)["total_bytes"])) < corrected


@pytest.mark.parametrize(
    ("part", "memory_bytes", "units"),
    [
        ("MI300X", 206_141_652_992, 304),
        ("MI325X", 274_861_129_728, 304),
        ("MI350X", 309_220_868_096, 256),
        ("AMD Instinct MI355X", 309_220_868_096, 256),
    ],
)
def test_a_gpu_has_its_makers_figures(part: str, memory_bytes: int, units: int) -> None:
    device = find_device(part)
    assert (device.memory_bytes, device.compute_units) == (memory_bytes, units)
