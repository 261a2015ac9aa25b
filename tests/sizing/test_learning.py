import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile
from aimgpu.control.sizing_inputs.deployment_sizer import DeploymentSizer
from aimgpu.control.sizing_inputs.learning import MemoryLearner
from aimgpu.control.sizing_inputs.measurements import MeasurementFile
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Device,
    DeviceUsage,
    Exactness,
    Footprint,
    ForeignProcess,
    Grant,
    Instance,
    InstanceState,
    Level,
    Priority,
    ProcessIdentity,
)
from aimgpu.errors import InvalidInput
from aimgpu.sizing import SizingRequest, built_in, estimate_footprint, read_rows
from aimgpu.sizing.correction import MeasuredKind, Measurement, from_json, kind_of, learn, to_json
from aimgpu.sizing.log_lines import read_log_lines
from aimgpu.units import GIB, MIB

KIND = MeasuredKind(engine="vllm", engine_version="0.19", family="qwen3", gpu="MI300X")


def _measured(ratio: float, term: str = "activations", at: int = 0, gpu: str = "MI300X") -> Measurement:
    return Measurement(
        model="Qwen/Qwen3-8B",
        engine="vllm",
        engine_version="0.19",
        family="qwen3",
        gpu=gpu,
        term=term,
        estimated_bytes=GIB,
        measured_bytes=round(ratio * GIB),
        at=at,
    )


def test_one_run_may_raise_an_estimate_but_not_shrink_it() -> None:
    assert learn([_measured(1.2)], KIND)["activations"].ppm == 1_200_000
    assert learn([_measured(0.7)], KIND)["activations"].ppm == 1_000_000
    assert learn([_measured(0.7)] * 3, KIND)["activations"].ppm == 700_000


def test_another_gpu_version_or_family_learns_nothing() -> None:
    assert learn([_measured(1.2, gpu="H200-141")], KIND) == {}
    assert learn([_measured(1.2)], MeasuredKind(engine="vllm", engine_version="0.20", family="qwen3", gpu="MI300X")) == {}


@given(st.lists(st.floats(0.0001, 1000), min_size=1, max_size=60))
def test_a_correction_stays_within_its_bounds(ratios: list[float]) -> None:
    found = learn([_measured(ratio, at=index) for index, ratio in enumerate(ratios)], KIND)
    assert all(500_000 <= correction.ppm <= 2_000_000 and correction.runs <= 32 for correction in found.values())


def test_a_correction_touches_estimates_only_and_can_be_taken_back() -> None:
    model = built_in().find("Qwen/Qwen3-8B")
    assert model is not None
    before = estimate_footprint(SizingRequest(model=model))
    corrections = learn([_measured(1.5), _measured(1.5, "weights"), _measured(1.5, "kv_cache")], KIND)
    after = estimate_footprint(SizingRequest(model=model, corrections=corrections))
    sizes = {term.name: term.memory_bytes for term in before.terms}
    for term in after.terms:
        if term.name == "activations":
            assert term.exactness is Exactness.MEASURED
            assert term.memory_bytes == -(-sizes[term.name] * 3 // 2)
            assert term.inputs["estimated_bytes"] == sizes[term.name]
        elif term.name != "startup":  # follows the activations
            assert term.memory_bytes == sizes[term.name]
    assert estimate_footprint(SizingRequest(model=model, corrections=learn([], KIND))) == before


def test_measurements_outlive_the_process_and_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "measurements.json"
    MeasurementFile(path).add([_measured(1.3), _measured(1.3, gpu="H200-141")])
    again = MeasurementFile(path)
    assert again.corrections(KIND)["activations"].ppm == 1_300_000
    assert again.forget(KIND) == 1
    assert again.corrections(KIND) == {}
    assert again.forget_model("Qwen/Qwen3-8B") == 1
    assert again.read() == ()
    assert [entry.name for entry in path.parent.iterdir()] == ["measurements.json"]


_ROW = '[{"model": "m", "engine": "e", "family": "f", "gpu": "g", "term": "t", "estimated_bytes": 1, "measured_bytes": %s}]'


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[7]", '[{"model": "x"}]', "[" * 5000, _ROW % "Infinity", _ROW % "-1", _ROW % '1, "at": 1e30', _ROW % "NaN"],
)
def test_a_damaged_file_is_refused_and_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "measurements.json"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        MeasurementFile(path).add([_measured(1.3)])
    assert path.read_text() == text


def test_measurements_read_back_the_same() -> None:
    rows = (_measured(1.3), _measured(0.9, at=7))
    assert from_json(json.loads(json.dumps(to_json(rows)))) == rows
    assert kind_of(rows[0]) == KIND


def test_what_cannot_have_been_measured_is_refused() -> None:
    with pytest.raises(InvalidInput):
        _measured(-1)


def test_vllm_logs_are_read_by_term() -> None:
    lines = [
        "INFO 06-01 model_runner.py:1115] Loading model weights took 14.9888 GiB",
        (
            "model weights take 14.99GiB; non_torch_memory takes 0.12GiB; PyTorch activation peak memory takes 1.19GiB; "
            "the rest of the memory reserved for KV Cache is 54.93GiB."
        ),
        "INFO gpu_model_runner.py: Graph capturing finished in 20 secs, took 0.53 GiB",
    ]
    assert read_log_lines("vllm", lines) == {
        "weights": round(14.99 * GIB),
        "engine": round(0.12 * GIB),
        "activations": round(1.19 * GIB),
        "kv_cache": round(54.93 * GIB),
        "graphs": round(0.53 * GIB),
    }


def test_vllm_that_was_told_its_cache_says_so_in_other_words() -> None:
    """As 0.32 words it where `--kv-cache-memory-bytes` is given, which the plan always does."""
    line = "Initial free memory 139.1 GiB, reserved 8.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config"
    assert read_log_lines("vllm", [line]) == {"kv_cache": 8 * GIB}


def test_llamacpp_buffers_of_the_gpu_are_added_and_those_of_the_host_are_not() -> None:
    lines = [
        "load_tensors:        CUDA0 model buffer size =     0.00 MiB",
        "load_tensors:   CPU_Mapped model buffer size =   281.81 MiB",
        "load_tensors:        ROCm0 model buffer size =  4403.49 MiB",
        "llama_kv_cache:      ROCm0 KV buffer size =  1024.00 MiB",
        "llama_context:      ROCm0 compute buffer size =   258.50 MiB",
        "llama_context:  ROCm_Host compute buffer size =    24.01 MiB",
        "x" * 100_000,
    ]
    assert read_log_lines("llamacpp", lines) == {
        "weights": round(4403.49 * MIB),
        "kv_cache": 1024 * MIB,
        "activations": round(258.5 * MIB),
    }


def test_the_dry_run_that_later_builds_make_first_is_not_counted() -> None:
    """It prints no weights and no cache, but state and compute buffers as large as the real ones."""
    lines = [
        "0.00.529 I load_tensors:        ROCm0 model buffer size =     0.00 MiB",
        "0.00.547 I llama_kv_cache:      ROCm0 KV buffer size =     0.00 MiB",
        "0.00.559 I llama_memory_recurrent:      ROCm0 RS buffer size =   149.62 MiB",
        "0.00.578 I sched_reserve:      ROCm0 compute buffer size =   400.28 MiB",
        "0.01.522 I load_tensors:        ROCm0 model buffer size =  6539.67 MiB",
        "0.04.364 I llama_kv_cache:      ROCm0 KV buffer size =  2176.00 MiB",
        "0.04.369 I llama_memory_recurrent:      ROCm0 RS buffer size =   149.62 MiB",
        "0.04.417 I sched_reserve:      ROCm0 compute buffer size =   410.28 MiB",
    ]
    found = read_log_lines("llamacpp", lines)
    assert {term: round(size / MIB, 2) for term, size in found.items()} == {
        "weights": 6539.67,
        "kv_cache": 2325.62,
        "activations": 410.28,
    }


def test_a_log_without_memory_tells_nothing() -> None:
    assert read_log_lines("vllm", ["hello", "took -1 GiB"]) == {}
    assert read_log_lines("transformers", ["CUDA0 model buffer size = 1.0 MiB"]) == {}


class _Usage:
    """A device that counts memory by process, as NVML and KFD do."""

    def __init__(self, *processes: ForeignProcess) -> None:
        self._processes = processes

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        return (
            DeviceUsage(
                device_id="gpu",
                used_bytes=None,
                used_bytes_by_partition={},
                utilization_percent=None,
                processes=self._processes,
            ),
        )


def _ready_instance() -> Instance:
    grant = Grant(
        id="g",
        instance_id="i",
        deployment="chat",
        node="here",
        device_id="gpu",
        partition_id="gpu/spx-0",
        memory_bytes=GIB,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )
    return Instance(
        id="i",
        deployment="chat",
        replica=0,
        model="Qwen/Qwen3-8B",
        engine="vllm",
        launcher="process",
        state=InstanceState.READY,
        process=ProcessIdentity(pid=os.getpid(), start_ticks=0, boot_id=""),
        grants=(grant,),
    )


LINES = ("PyTorch activation peak memory takes 1.00GiB;", "Model loading took 15.27 GiB")


def _footprint(**more: object) -> Footprint:
    model = built_in().find("Qwen/Qwen3-8B")
    assert model is not None
    return estimate_footprint(
        SizingRequest(model=model, engine_version="0.19", gpu="MI300X", **more)  # type: ignore[arg-type]  # test options
    )


def test_a_run_that_became_ready_teaches_its_estimated_terms(tmp_path: Path) -> None:
    file = MeasurementFile(tmp_path / "m.json")
    footprint = _footprint()
    other_terms = sum(term.memory_bytes for term in footprint.terms if term.name not in ("startup", "activations", "weights"))
    counted = other_terms + GIB + round(15.27 * GIB) + 700 * MIB
    usage = _Usage(
        ForeignProcess(pid=os.getpid(), name="engine", memory_bytes=counted),
        ForeignProcess(pid=1, name="other", memory_bytes=GIB),
    )
    MemoryLearner(measurements=file, usage=usage, clock=lambda: 7.0)(_ready_instance(), footprint, LINES)
    kept = {one.term: one for one in file.read()}
    assert set(kept) == {"activations", "startup"}  # the weights were exact
    assert kept["activations"].measured_bytes == GIB
    assert kept["startup"].measured_bytes == 700 * MIB
    assert kept["startup"].at == 7
    assert kind_of(kept["startup"]) == KIND


def test_a_start_that_died_teaches_what_it_missed(tmp_path: Path) -> None:
    file = MeasurementFile(tmp_path / "m.json")
    footprint = _footprint()
    MemoryLearner(measurements=file, usage=_Usage()).note_shortfall(_ready_instance(), footprint, 40 * MIB)
    (one,) = file.read()
    assert (one.term, one.measured_bytes) == ("startup", footprint.term_bytes("startup") + 40 * MIB)


def test_what_was_learned_is_not_learned_twice(tmp_path: Path) -> None:
    """A corrected estimate is compared by its formula, so the factor does not drift."""
    file = MeasurementFile(tmp_path / "m.json")
    learner = MemoryLearner(measurements=file, usage=_Usage())
    for _ in range(3):
        learner(_ready_instance(), _footprint(corrections=file.corrections(KIND)), LINES)
    assert len({one.estimated_bytes for one in file.read()}) == 1


def test_a_device_that_cannot_be_read_and_a_damaged_file_fail_no_instance(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("no json")
    MemoryLearner(measurements=MeasurementFile(path), usage=_Usage())(_ready_instance(), _footprint(), LINES)
    assert path.read_text() == "no json"


def test_the_sizer_knows_the_users_models_and_what_was_measured(tmp_path: Path, mi300x: Device) -> None:
    class _Devices:
        def read_devices(self) -> tuple[Device, ...]:
            return (mi300x,)

    catalogue = CatalogueFile(tmp_path / "catalogue.csv")
    catalogue.add(read_rows("id,parameters\nacme/model,7B\n"))
    file = MeasurementFile(tmp_path / "m.json")
    sizer = DeploymentSizer(catalogue=catalogue, measurements=file, devices=_Devices(), engines={})
    ask = Ask(name="chat", want=Auto())
    assert sizer(Deployment(name="chat", model="acme/model", ask=ask), "vllm", None, "amd").total_bytes > 13 * GIB
    deployment = Deployment(name="chat", model="Qwen/Qwen3-8B", ask=ask)
    before = sizer(deployment, "vllm", None, "amd")
    assert before.gpu == "MI300X"
    file.add([replace(_measured(1.5), engine_version=None)])
    after = sizer(deployment, "vllm", None, "amd")
    assert after.total_bytes > before.total_bytes
    (tmp_path / "m.json").write_text("no json")
    damaged = sizer(deployment, "vllm", None, "amd")
    assert damaged.total_bytes == before.total_bytes
    assert "could not be read" in damaged.notes[-1]
