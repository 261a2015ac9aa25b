import json
from dataclasses import replace

import pytest
from tests.products import divided_products

from aimgpu.domain import Device, Vendor
from aimgpu.errors import InvalidInput
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.sizing import ModelFacts, SizingRequest, built_in
from aimgpu.sizing.profiles import PRECISIONS, Profile, aim_profile_id, make_profile, to_aim, to_json
from aimgpu.sizing.weights import weight_bytes

FIELDS = {
    "model_id",
    "variant_id",
    "version",
    "parameters",
    "precision",
    "memory_requirement_gb",
    "recommended_partition_gb",
    "gpu_sharing",
    "resource_requirements",
    "metadata",
}
SHARING = {
    "enabled",
    "memory_limit_gb",
    "partition_id",
    "qos_priority",
    "compute_mode",
    "memory_mode",
    "partition_count",
    "partition_size_gb",
}


def _profile(name: str, precision: str, device: Device, **more: object) -> Profile:
    facts = built_in().find(name)
    assert facts is not None
    return make_profile(SizingRequest(model=facts, precision=precision, **more), device)  # type: ignore[arg-type]  # test options


def test_every_model_of_the_catalogue_has_three_profiles_that_never_lie(mi300x: Device) -> None:
    made = [
        make_profile(SizingRequest(model=row.facts, precision=precision, concurrency=8), mi300x)
        for row in built_in().rows
        for precision in PRECISIONS
    ]
    assert len(made) >= 114
    assert len({profile.file_name for profile in made}) == len(made)
    for profile in made:
        content = json.loads(json.dumps(to_json(profile)))
        recommended, needed = content["recommended_partition_gb"], content["memory_requirement_gb"]
        if recommended is None:
            assert content["fit"].startswith("does not fit")
            assert not content["gpu_sharing"]["enabled"]
            assert profile.devices is None or profile.devices > 1
        else:
            assert needed <= recommended <= mi300x.memory_bytes / 1e9
            assert needed * 1e9 >= profile.footprint.total_bytes


@pytest.mark.parametrize("part", [part.name for part in divided_products()])
def test_no_profile_of_any_gpu_is_under_the_weights_or_over_the_device(part: str) -> None:
    device = SimulatedHardware([(part, 1)]).read_devices()[0]
    for row in built_in().rows:
        for precision in PRECISIONS:
            profile = make_profile(SizingRequest(model=row.facts, precision=precision, concurrency=8), device)
            content = to_json(profile)
            needed, recommended = content["memory_requirement_gb"], content["recommended_partition_gb"]
            assert isinstance(needed, float)
            assert needed * 1e9 >= weight_bytes(row.facts, precision)
            if isinstance(recommended, float):
                assert needed <= recommended <= device.memory_bytes / 1e9
            else:
                assert str(content["fit"]).startswith("does not fit")


def test_a_profile_has_the_fields_that_readers_look_for(mi300x: Device) -> None:
    profile = _profile("Qwen/Qwen2.5-7B-Instruct", "int4", mi300x)
    content = to_json(profile)
    assert content.keys() >= FIELDS
    sharing, metadata = content["gpu_sharing"], content["metadata"]
    assert isinstance(sharing, dict)
    assert isinstance(metadata, dict)
    assert sharing.keys() == SHARING
    assert sharing["compute_mode"] == "CPX"
    assert sharing["partition_count"] == 8
    assert content["variant_id"] == "Qwen/Qwen2.5-7B-Instruct-int4"
    assert content["version"] == "1.0.0-int4"
    assert content["parameters"] == "7.616B"
    assert metadata["partition_config"]["kind"] == "cpx"
    assert profile.file_name == "Qwen_Qwen2.5-7B-Instruct-int4.json"


def test_a_tag_with_a_colon_becomes_a_file_name(mi300x: Device) -> None:
    facts = ModelFacts(name="acme/model:latest", source="test", parameters=10**9, precision="fp16")
    assert make_profile(SizingRequest(model=facts, precision="fp16"), mi300x).file_name == "acme_model_latest-fp16.json"


def test_a_model_too_large_for_one_device_says_how_many_it_takes(mi300x: Device) -> None:
    content = to_json(_profile("meta-llama/Llama-3.1-405B-Instruct", "fp16", mi300x))
    assert content["fit"] == "does not fit on one MI300X; fits on 8"
    assert content["recommended_partition_gb"] is None
    needed = content["memory_requirement_gb"]
    assert isinstance(needed, float)
    assert needed > 811  # all devices together


@pytest.mark.parametrize(("name", "precision", "gpus"), [("Qwen/Qwen3-32B", "fp16", 1), ("deepseek-ai/DeepSeek-V3", "fp8", 4)])
def test_an_aim_profile_has_the_shape_of_amds_schema(mi300x: Device, name: str, precision: str, gpus: int) -> None:
    profile = _profile(name, precision, mi300x)
    content = to_aim(profile)
    assert set(content) == {"aim_id", "model_id", "metadata", "engine_args", "env_vars"}
    metadata, arguments, variables = content["metadata"], content["engine_args"], content["env_vars"]
    assert isinstance(metadata, dict)
    assert isinstance(arguments, dict)
    assert isinstance(variables, dict)
    assert metadata["engine"] == "vllm"
    assert metadata["gpu_count"] == gpus
    assert metadata["metric"] in ("latency", "throughput")
    assert isinstance(metadata["manual_selection_only"], bool)
    assert metadata["type"] in ("optimized", "unoptimized", "general", "preview")
    assert set(metadata) == {"engine", "gpu", "gpu_count", "manual_selection_only", "metric", "precision", "type"}
    assert not any(key.startswith("-") for key in arguments)
    assert arguments["tensor-parallel-size"] == gpus
    assert isinstance(arguments["max-num-seqs"], int)
    assert isinstance(arguments["gpu-memory-utilization"], float)
    assert all(value is None or isinstance(value, int | float) or " " not in value for value in arguments.values())
    assert all(isinstance(value, str) for value in variables.values())
    assert aim_profile_id(profile) == f"vllm-mi300x-{precision}-tp{gpus}-latency"


def test_what_amds_format_cannot_say_is_refused(mi300x: Device) -> None:
    with pytest.raises(InvalidInput, match="does not know the GPU H200"):
        to_aim(_profile("Qwen/Qwen3-8B", "fp16", replace(mi300x, product="H200-141", vendor=Vendor.NVIDIA)))
    with pytest.raises(InvalidInput, match="does not know nf4"):
        to_aim(_profile("Qwen/Qwen3-8B", "nf4", mi300x))
