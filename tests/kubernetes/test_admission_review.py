"""Pods before and after admission, without a cluster."""

import base64
import copy
import json
import re
from typing import Any

import pytest

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.cluster.admission.inventory import PublishedGpus
from aimgpu.kubernetes.cluster.admission.review import Cluster, answer, review_pod, review_service
from aimgpu.kubernetes.cluster.admission.webhook_configurations import mutating_configuration, validating_configuration
from aimgpu.sizing import built_in

QWEN = "Qwen/Qwen2.5-7B-Instruct"


def device(product: str, memory: str, **attributes: object) -> dict[str, Any]:
    given = {"type": "shared", "productName": product, "current": True, "partitioned": False, **attributes}
    kinds = {str: "string", bool: "bool"}
    return {
        "name": product.lower(),
        "attributes": {name: {kinds[type(value)]: value} for name, value in given.items()},
        "capacity": {"memory": {"value": memory}},
    }


def cluster_of(*devices: dict[str, Any]) -> Cluster:
    return Cluster(gpus=PublishedGpus([slice_of(*devices)]), catalogue=built_in())


def slice_of(*devices: dict[str, Any], name: str = "n1") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"driver": "gpu.aim.amd.com", "devices": list(devices)}}


MI300X = device("MI300X", "192Gi", computeMode="SPX", memoryMode="NPS1")
SEAT = device("H200-141", "140Gi", type="seat")
H200 = device("H200-141", "140Gi")
CPX = device("MI300X", "24Gi", computeMode="CPX", memoryMode="NPS1", partitioned=True, current=False)


def pod(*words: str, **annotations: str) -> dict[str, Any]:
    main: dict[str, Any] = {"name": "main", "image": "some/image"}
    if words:
        main["args"] = list(words)
    keys = {name.replace("__", "/").replace("_", "-"): value for name, value in annotations.items()}
    return {"metadata": {"annotations": keys}, "spec": {"containers": [main, {"name": "side"}]}}


def apply(item: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """The few JSON patch operations that admission writes."""
    result = copy.deepcopy(item)
    for each in patch:
        assert each["op"] == "add"
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]]
        target: Any = result
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if isinstance(target, list):
            assert last == "-"
            target.append(each["value"])
        else:
            target[last] = each["value"]
    return result


def exactly(template: dict[str, Any] | None) -> dict[str, Any]:
    assert template is not None
    found: dict[str, Any] = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    return found


def test_a_fraction_becomes_that_part_of_the_memory_of_the_gpu() -> None:
    admitted = review_pod(pod(gpu_fraction="0.5"), "default", cluster_of(MI300X))
    request = exactly(admitted.template)
    assert request["deviceClassName"] == "shared.gpu.aim.amd.com"
    assert request["capacity"] == {"requests": {"memory": "96Gi"}}


def test_of_several_products_the_fraction_is_taken_of_whichever_is_free() -> None:
    template = review_pod(pod(gpu_fraction="0.25"), "default", cluster_of(MI300X, H200)).template
    assert template is not None
    choices = template["spec"]["spec"]["devices"]["requests"][0]["firstAvailable"]
    assert [choice["capacity"]["requests"]["memory"] for choice in choices] == ["35Gi", "48Gi"]
    assert all("productName" in choice["selectors"][0]["cel"]["expression"] for choice in choices)


def test_without_a_gpu_in_the_cluster_a_fraction_is_refused_and_memory_is_not() -> None:
    with pytest.raises(InvalidInput, match="no GPU that can be shared"):
        review_pod(pod(gpu_fraction="0.5"), "default", cluster_of())
    assert exactly(review_pod(pod(gpu_memory="1000"), "default", cluster_of()).template)["capacity"]


def test_the_container_gets_the_claim_and_a_second_pass_changes_nothing() -> None:
    item = pod(gpu_memory="4096", gpu_fraction_container_name="side", aim_amd_com__qos_priority="high")
    item["metadata"]["annotations"]["aim.amd.com/qos-priority"] = item["metadata"]["annotations"].pop(
        "aim-amd-com/qos-priority"
    )
    cluster = cluster_of(MI300X)
    admitted = review_pod(item, "default", cluster)
    changed = apply(item, admitted.patch)
    assert admitted.template is not None
    name = admitted.template["metadata"]["name"]
    assert changed["spec"]["resourceClaims"] == [{"name": "aim-gpu", "resourceClaimTemplateName": name}]
    assert changed["spec"]["containers"][1]["resources"]["claims"] == [{"name": "aim-gpu"}]
    assert "resources" not in changed["spec"]["containers"][0]
    opaque = admitted.template["spec"]["spec"]["devices"]["config"][0]["opaque"]
    assert opaque["parameters"]["priority"] == "high"
    assert review_pod(changed, "default", cluster).patch == []


def test_other_claims_and_limits_of_the_pod_are_kept() -> None:
    item = pod(gpu_memory="4096")
    item["spec"]["resourceClaims"] = [{"name": "nic", "resourceClaimName": "fast"}]
    item["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "2"}, "claims": [{"name": "nic"}]}
    changed = apply(item, review_pod(item, "default", cluster_of()).patch)
    assert [claim["name"] for claim in changed["spec"]["resourceClaims"]] == ["nic", "aim-gpu"]
    resources = changed["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "2"}, "claims": [{"name": "nic"}, {"name": "aim-gpu"}]}


def test_equal_requests_share_a_template_and_different_ones_do_not() -> None:
    def name(memory: str) -> str:
        template = review_pod(pod(gpu_memory=memory), "default", cluster_of()).template
        assert template is not None
        return str(template["metadata"]["name"])

    assert name("4096") == name("4096") != name("4097")


def test_sharing_alone_is_sized_from_the_model() -> None:
    item = pod("serve", QWEN, "--max-model-len=8192")
    item["metadata"]["annotations"]["aim.amd.com/gpu-sharing"] = "true"
    admitted = review_pod(item, "default", cluster_of(H200))
    memory = exactly(admitted.template)["capacity"]["requests"]["memory"]
    assert memory.endswith("Mi")
    assert 14_000 < int(memory.removesuffix("Mi")) < 24_000  # 7.6 B parameters of 16 bits, cache and overhead


@pytest.mark.parametrize(
    "describe",
    [
        lambda item: item["spec"]["containers"][0].update(args=["--model", QWEN]),
        lambda item: item["spec"]["containers"][0].update(args=[f"--model={QWEN}"]),
        lambda item: item["spec"]["containers"][0].update(command=["vllm", "serve", QWEN]),
        lambda item: item["spec"]["containers"][0].update(env=[{"name": "MODEL_ID", "value": QWEN}]),
        lambda item: item["spec"].update(
            initContainers=[{"name": "storage-initializer", "args": [f"hf://{QWEN}", "/mnt/models"]}]
        ),
        lambda item: item["metadata"]["annotations"].update(
            {"internal.serving.kserve.io/storage-initializer-sourceuri": f"hf://{QWEN}"}
        ),
        lambda item: item["metadata"]["annotations"].update({"aim.amd.com/model": QWEN}),
    ],
)
def test_the_model_is_found_wherever_engines_and_kserve_name_it(describe: Any) -> None:
    item = pod()
    item["metadata"]["annotations"]["aim.amd.com/gpu-sharing"] = "true"
    describe(item)
    assert exactly(review_pod(item, "default", cluster_of()).template)["capacity"]["requests"]["memory"]


@pytest.mark.parametrize(
    ("words", "reason"), [((), "does not say which model"), (("--model", "acme/none"), "nothing is known")]
)
def test_a_model_that_cannot_be_sized_is_refused(words: tuple[str, ...], reason: str) -> None:
    item = pod(*words)
    item["metadata"]["annotations"]["aim.amd.com/gpu-sharing"] = "true"
    with pytest.raises(InvalidInput, match=reason):
        review_pod(item, "default", cluster_of())


def test_vllm_is_kept_inside_its_share_and_the_surplus_goes_to_its_cache() -> None:
    def cache_bytes(memory: str) -> int:
        item = pod("vllm", "serve", QWEN, "--max-model-len=4096", gpu_memory=memory)
        changed = apply(item, review_pod(item, "default", cluster_of()).patch)
        words = changed["spec"]["containers"][0]["args"]
        assert sum(word.startswith("--max-model-len") for word in words) == 1  # the user's own
        return int(next(word for word in words if word.startswith("--kv-cache-memory-bytes=")).partition("=")[2])

    assert 0 < cache_bytes("24576") < cache_bytes("49152") < 49152 << 20


def test_an_engine_that_takes_eight_requests_at_once_is_sized_for_eight_unless_the_annotation_says_otherwise() -> None:
    def memory(*words: str, **more: str) -> str:
        asked = pod("serve", QWEN, "--max-model-len=8192", *words)
        asked["metadata"]["annotations"] = {"aim.amd.com/gpu-sharing": "true", **more}
        found = exactly(review_pod(asked, "ns", cluster_of(MI300X)).template)
        return str(found["capacity"]["requests"]["memory"])

    assert memory("--max-num-seqs=8") == memory(**{"aim.amd.com/concurrency": "8"}) != memory()
    assert memory("--max-num-seqs=8", **{"aim.amd.com/concurrency": "1"}) < memory("--max-num-seqs=8")


def test_a_part_of_the_gpu_that_vllm_is_given_beside_a_share_has_no_effect_or_is_refused() -> None:
    words = ("serve", QWEN, "--gpu-memory-utilization=0.5")
    held = review_pod(pod(*words, gpu_memory="60000"), "ns", cluster_of(MI300X))
    arguments = apply(pod(*words, gpu_memory="60000"), held.patch)["spec"]["containers"][0]["args"]
    assert any(word.startswith("--kv-cache-memory-bytes=") for word in arguments)
    assert "has no effect" in held.warnings[0]
    for unknown in ("serve", "/models/mine"):
        with pytest.raises(InvalidInput, match="a part of the GPU and not of its share"):
            review_pod(pod("serve", unknown, words[2], gpu_memory="60000"), "ns", cluster_of(MI300X))
    own = pod("serve", "/models/mine", words[2], "--kv-cache-memory-bytes=1000000000", gpu_memory="60000")
    assert review_pod(own, "ns", cluster_of(MI300X)).patch


def test_a_claim_names_the_model_that_its_pods_serve() -> None:
    asked = pod("serve", QWEN, gpu_memory="60000")
    found = review_pod(asked, "ns", cluster_of(MI300X)).template or {}
    assert found["spec"]["metadata"]["annotations"] == {"aim.amd.com/model": QWEN}
    asked["metadata"]["labels"] = {"aim.amd.com/served-model": "chat"}
    named = review_pod(asked, "ns", cluster_of(MI300X)).template or {}
    assert named["spec"]["metadata"]["annotations"] == {"aim.amd.com/model": "chat"}
    assert named["metadata"]["name"] != found["metadata"]["name"]


def test_a_share_that_is_too_small_for_the_model_is_warned_of() -> None:
    admitted = review_pod(pod("vllm", "serve", QWEN, gpu_memory="4096"), "default", cluster_of())
    (warning,) = admitted.warnings
    needed, given = (int(found) for found in re.findall(r"(\d+) MiB", warning))
    assert (given, 14_000 < needed < 40_000) == (4096, True)
    assert warning == f"{QWEN} needs about {needed} MiB; this share has 4096 MiB and will not start"


@pytest.mark.parametrize("last", ["--model", "--max-model-len", "--max-num-seqs"])
def test_a_command_that_ends_with_a_flag_is_no_crash(last: str) -> None:
    item = pod("vllm", "serve", last)
    item["metadata"]["annotations"] = {"aim.amd.com/gpu-sharing": "true"}
    with pytest.raises(InvalidInput, match="does not say which model"):
        review_pod(item, "ns", cluster_of(MI300X))


def test_a_partition_and_a_share_inside_one() -> None:
    alone = pod()
    alone["metadata"]["annotations"] = {"aim.amd.com/compute-mode": "CPX"}
    request = exactly(review_pod(alone, "default", cluster_of(MI300X, CPX)).template)
    assert request["deviceClassName"] == "partition.gpu.aim.amd.com"
    inside = pod(gpu_fraction="0.5")
    inside["metadata"]["annotations"]["aim.amd.com/compute-mode"] = "CPX"
    request = exactly(review_pod(inside, "default", cluster_of(MI300X, CPX)).template)
    assert request["deviceClassName"] == "shared-partition.gpu.aim.amd.com"
    assert request["capacity"]["requests"]["memory"] == "12Gi"


def test_several_gpus_are_different_gpus() -> None:
    template = review_pod(pod(gpu_memory="1024", gpu_fraction_num_devices="2"), "default", cluster_of()).template
    assert template is not None
    devices = template["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"]["count"] == 2
    assert devices["constraints"] == [{"requests": ["gpu"], "distinctAttribute": "gpu.aim.amd.com/gpu"}]


def test_gpus_of_two_sizes_may_be_on_one_node_where_several_are_asked_for() -> None:
    asked = pod(gpu_fraction="0.5", gpu_fraction_num_devices="2")
    template = review_pod(asked, "ns", cluster_of(MI300X, H200)).template
    assert template is not None
    devices = template["spec"]["spec"]["devices"]
    assert [one["name"] for one in devices["requests"]] == ["gpu-0", "gpu-1"]
    for one in devices["requests"]:
        assert [each["capacity"]["requests"]["memory"] for each in one["firstAvailable"]] == ["70Gi", "96Gi"]
        assert not any("count" in each for each in one["firstAvailable"])
    assert devices["constraints"] == [{"requests": ["gpu-0", "gpu-1"], "distinctAttribute": "gpu.aim.amd.com/gpu"}]
    (config,) = devices["config"]
    assert config["requests"] == ["gpu-0", "gpu-1"]
    assert config["opaque"]["parameters"]["limits"] == "claim"


def test_pods_that_kai_places_get_a_seat_where_something_enforces_and_are_checked_everywhere() -> None:
    item = pod(gpu_fraction="0.5")
    item["spec"]["schedulerName"] = "kai-scheduler"
    unenforced = review_pod(item, "default", cluster_of(H200))
    assert unenforced.patch == []
    assert "enforces nothing" in unenforced.warnings[0]
    seated = review_pod(item, "default", cluster_of(SEAT))
    assert seated.template is not None
    (request,) = seated.template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "kai.gpu.aim.amd.com"}
    patched = apply(item, seated.patch)
    assert review_pod(patched, "default", cluster_of(SEAT)).patch == []
    item["metadata"]["annotations"]["gpu-fraction"] = "2"
    with pytest.raises(InvalidInput):
        review_pod(item, "default", cluster_of())


def test_kai_is_given_the_size_that_was_found_from_the_model() -> None:
    item = pod("--model=" + QWEN, "--max-model-len=4096", aim_amd_com__gpu_sharing="true")
    item["metadata"]["annotations"] = {"aim.amd.com/gpu-sharing": "true"}
    item["spec"]["schedulerName"] = "kai-scheduler"
    once = apply(item, review_pod(item, "default", cluster_of(SEAT)).patch)
    assert int(once["metadata"]["annotations"]["gpu-memory"]) > 15_000
    assert any(word.startswith("--kv-cache-memory-bytes=") for word in once["spec"]["containers"][0]["args"])
    assert review_pod(once, "default", cluster_of(SEAT)).patch == []


def test_arguments_of_a_script_reach_the_engine_or_the_pod_is_warned() -> None:
    """The templates of LLMInferenceServices start vLLM from a shell script, with arguments in a variable."""
    item = pod(gpu_memory="40000")
    main = item["spec"]["containers"][0]
    main["command"] = ["/bin/bash", "-c", "exec vllm serve /mnt/models ${VLLM_ADDITIONAL_ARGS} $@", "--"]
    main["env"] = [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--max-model-len 4096 --max-num-seqs=2"}]
    item["metadata"]["annotations"]["aim.amd.com/model"] = QWEN
    words = apply(item, review_pod(item, "default", cluster_of()).patch)["spec"]["containers"][0]["args"]
    assert [word.partition("=")[0] for word in words] == ["--kv-cache-memory-bytes"]
    main["command"][2] = "exec vllm serve /mnt/models"
    warned = review_pod(item, "default", cluster_of())
    assert "takes no arguments" in warned.warnings[0]
    assert not any(each["path"].endswith("/args") for each in warned.patch)


def test_an_inference_service_with_bad_values_is_refused_when_it_is_made() -> None:
    service: dict[str, Any] = {
        "metadata": {"annotations": {"gpu-fraction": "1.5"}},
        "spec": {"predictor": {"model": {"modelFormat": {"name": "huggingface"}, "storageUri": f"hf://{QWEN}"}}},
    }
    with pytest.raises(InvalidInput, match="gpu-fraction"):
        review_service(service, cluster_of())
    service["metadata"]["annotations"] = {"aim.amd.com/gpu-sharing": "true"}
    assert review_service(service, cluster_of()) == ()
    service["spec"]["predictor"]["model"]["storageUri"] = "hf://acme/none"
    with pytest.raises(InvalidInput, match="acme/none"):
        review_service(service, cluster_of())


def test_an_answer_carries_the_patch_or_the_reason() -> None:
    good = answer("1", lambda: review_pod(pod(gpu_memory="1"), "default", cluster_of()))["response"]
    assert good["allowed"]
    assert json.loads(base64.b64decode(good["patch"]))[0]["path"] == "/spec/resourceClaims"
    bad = answer("2", lambda: review_pod(pod(gpu_memory="x"), "default", cluster_of()))["response"]
    assert not bad["allowed"]
    assert bad["status"]["code"] == 422
    assert "positive whole number of MiB" in bad["status"]["message"]


def test_no_pod_without_our_annotations_depends_on_the_server() -> None:
    for configuration in (mutating_configuration("ns", "svc"), validating_configuration("ns", "svc")):
        for webhook in configuration["webhooks"]:
            assert "annotations" in webhook["matchConditions"][0]["expression"]
            if webhook["name"] == "placement.aim.amd.com":  # pods with claims and limits too: none waits for an answer
                assert webhook["failurePolicy"] == "Ignore"
            assert webhook["sideEffects"] == "NoneOnDryRun"
            assert webhook["timeoutSeconds"] <= 10


def test_what_a_fraction_is_of_follows_the_published_gpus() -> None:
    cluster = cluster_of(MI300X)

    def products() -> set[str]:
        template = review_pod(pod(gpu_fraction="0.5"), "ns", cluster).template
        return {name for name in ("MI300X", "H200-141") if name in json.dumps(template)}

    assert products() == {"MI300X"}
    cluster.gpus.put(slice_of(H200, name="n2"))
    assert products() == {"MI300X", "H200-141"}
    cluster.gpus.put(slice_of(H200, name="n1"))
    assert products() == {"H200-141"}
    cluster.gpus.put(slice_of(MI300X, name="n2"))
    cluster.gpus.remove(slice_of(name="n1"))
    assert products() == {"MI300X"}
