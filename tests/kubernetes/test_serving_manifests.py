"""A stack file as objects of a cluster: shares, images, promises; and what a cluster cannot do is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.cli.commands.cluster.serving import manifest_text
from aimgpu.control.stack.slo import read_objective
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.control.stack.yaml_nodes import parse_yaml
from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.models.serving.engine_container import ServingImages
from aimgpu.kubernetes.models.serving.manifests import RenderOptions, render_stack
from aimgpu.kubernetes.models.serving.merged_scores import merge_scores
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.model_labels import label_value, object_name

IMAGES = ServingImages(own="registry/aimgpu:1", vendor="amd")


def render(model: str, **options: Any) -> dict[str, dict[str, Any]]:
    stack = parse_stack(f"models: {{chat: {{model: org/model, {model}}}}}", base_directory=Path("/nowhere"))
    return {one["kind"]: one for one in render_stack(stack.deployments, RenderOptions(images=IMAGES, **options))}


@pytest.mark.parametrize(
    ("gpu", "annotations"),
    [
        ("auto", {"aim.amd.com/gpu-sharing": "true"}),
        ("{memory: 24GiB}", {"gpu-memory": "24576"}),
        ("{memory: 1.5MiB}", {"gpu-memory": "2"}),
        ("{fraction: 0.25}", {"gpu-fraction": "0.25"}),
        ("{memory: 8GiB, devices: 2}", {"gpu-memory": "8192", "gpu-fraction-num-devices": "2"}),
        ("{partition: cpx}", {"aim.amd.com/compute-mode": "CPX"}),
        ("{fraction: 0.5, compute: 30%}", {"gpu-fraction": "0.5", "aim.amd.com/compute": "30%"}),
    ],
)
def test_what_a_model_wants_becomes_the_annotations_that_admission_reads(gpu: str, annotations: dict[str, str]) -> None:
    found = render(f"gpu: {gpu}, engine: vllm, isolation: enforced")["Deployment"]["spec"]["template"]["metadata"][
        "annotations"
    ]
    assert annotations.items() <= found.items()
    assert found["aim.amd.com/isolation"] == "enforced"


@pytest.mark.parametrize(("engine", "variable"), [("vllm", "VLLM_API_KEY"), ("llamacpp", "LLAMA_API_KEY"), ("ollama", None)])
@pytest.mark.parametrize("kserve", [True, False])
def test_an_engine_asks_for_the_key_of_its_model(engine: str, variable: str | None, *, kserve: bool) -> None:
    found = render(f"gpu: auto, engine: {engine}, env: {{VLLM_API_KEY: mine, PYTHONPATH: mine}}", as_inference_services=kserve)
    pod = found["InferenceService"]["spec"]["predictor"] if kserve else found["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    wanted = {"name": variable, "valueFrom": {"secretKeyRef": {"name": "aim-gpu-engine-keys", "key": "chat"}}}
    last = {one["name"]: one for one in container["env"]}
    assert last.get(str(variable)) == (wanted if variable else None)
    assert ("aimgpu_vllm_door.AskKey" in container.get("args", ())) == (engine == "vllm")
    if engine == "vllm":
        (door,) = (one for one in container["volumeMounts"] if one["name"] == "door")
        assert last["PYTHONPATH"] == {"name": "PYTHONPATH", "value": door["mountPath"]}
        assert {"name": "door", "configMap": {"name": found["ConfigMap"]["metadata"]["name"]}} in pod["volumes"]
        assert list(found["ConfigMap"]["data"]) == ["aimgpu_vllm_door.py"]


def test_whole_gpus_are_an_extended_resource() -> None:
    pod = render("gpu: {whole: 2}, engine: vllm")["Deployment"]["spec"]["template"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"aim.amd.com/gpu": "2"}
    assert "--tensor-parallel-size" in pod["spec"]["containers"][0]["args"]
    assert not any(key.startswith("gpu-") for key in pod["metadata"]["annotations"])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpu: {partition: 1g.18gb}", "cannot be asked for on a cluster"),
        ("gpu: {devices: 2}", "cannot size a model over 2 GPUs"),
        ("place: {pinned: true}", "no meaning on a cluster"),
        ("place: {partition: gpu0/cpx-0}", "no meaning on a cluster"),
        ("engine: llamacpp, args: {threads: 2}", "takes no `args:`"),
        ("env: {TOKEN: {from_variable: NOT_SET_ANYWHERE}}", "has no variable NOT_SET_ANYWHERE"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(model: str, reason: str) -> None:
    with pytest.raises(AimGpuError, match=reason):
        render(model)


def test_company_is_affinity_between_pods_and_spreading_is_soft() -> None:
    rules = "place: {products: [MI300X], with: [embed], not_with: [batch, night/ly], spread: true}"
    pod = render(rules)["Deployment"]["spec"]["template"]["spec"]
    required, node = "requiredDuringSchedulingIgnoredDuringExecution", "kubernetes.io/hostname"

    def models(*values: str) -> dict[str, Any]:
        return {"matchExpressions": [{"key": "aim.amd.com/served-model", "operator": "In", "values": list(values)}]}

    assert pod["affinity"]["podAffinity"] == {required: [{"labelSelector": models("embed"), "topologyKey": node}]}
    (apart,) = pod["affinity"]["podAntiAffinity"][required]
    assert apart == {"labelSelector": models("batch", object_name("night/ly")), "topologyKey": node}
    assert pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    (spread,) = pod["topologySpreadConstraints"]
    assert (spread["whenUnsatisfiable"], spread["labelSelector"]) == ("ScheduleAnyway", models("chat"))


def test_a_file_of_this_machine_is_refused() -> None:
    stack = parse_stack("models: {chat: {model: ./mine.gguf}}", base_directory=Path("/nowhere"))
    with pytest.raises(AimGpuError, match="pods do not see"):
        render_stack(stack.deployments, RenderOptions(images=IMAGES))


@pytest.mark.parametrize("engine", ["vllm", "ollama"])
def test_an_image_is_chosen_by_the_vendor(engine: str) -> None:
    assert "rocm" in render(f"engine: {engine}")["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"]


@pytest.mark.parametrize("engine", ["vllm", "ollama", "llamacpp"])
@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_the_image_of_the_stack_file_is_that_of_the_container(engine: str, kind: str) -> None:
    found = render(f"engine: {engine}, image: registry/mine:2", as_inference_services=kind == "InferenceService")
    assert '"image": "registry/mine:2"' in json.dumps(found[kind])


def test_an_image_of_vllm_is_asked_for_where_the_vendor_is_not_known() -> None:
    with pytest.raises(AimGpuError, match="cannot be determined"):
        render_stack(
            parse_stack("models: {chat: {model: a/b, engine: vllm}}").deployments, RenderOptions(images=ServingImages(own="x"))
        )


def test_vllm_fetches_from_the_domains_that_the_gateway_lets_requests_name_and_from_no_other() -> None:
    def words(domains: str, model: str) -> list[str]:
        images = ServingImages(own="x", vendor="amd", media_domains=domains)
        stack = parse_stack(f"models: {{chat: {model}}}")
        (found,) = (one for one in render_stack(stack.deployments, RenderOptions(images=images)) if one["kind"] == "Deployment")
        return list(found["spec"]["template"]["spec"]["containers"][0]["args"])

    def after(found: list[str]) -> list[str]:
        return found[found.index("--allowed-media-domains") + 1 :][:2]

    assert after(words("a.example,b.example", "{model: a/b, engine: vllm}")) == ["a.example", "b.example"]
    assert after(words("", "{model: a/b, engine: vllm}"))[0] == "none.invalid"
    assert "--allowed-media-domains" not in words("a.example", "{model: a/b, engine: vllm, image: registry/old:1}")


def test_values_of_secrets_stand_in_a_secret_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_very_secret")
    found = render("env: {HF_TOKEN: {from_variable: MY_TOKEN}, LEVEL: debug}")
    environment = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "LEVEL", "value": "debug"} in environment
    assert {one["name"]: one for one in environment}["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": found["Secret"]["metadata"]["name"],
        "key": "HF_TOKEN",
    }
    assert "hf_very_secret" not in json.dumps({kind: one for kind, one in found.items() if kind != "Secret"})


def test_promises_are_written_as_the_stack_file_has_them() -> None:
    text = "{ttft_p95: 500ms, tpot_p95: 2.5ms, throughput: 200tok/s, availability: 99.5%, classes: {low: {latency_p95: 60s}}}"
    written = render(f"slo: {text}, keep: 10m")["Deployment"]["metadata"]["annotations"]
    assert read_objective(parse_yaml(written[labels.SLO], "annotation")) == read_objective(parse_yaml(text, "stack"))
    assert written[labels.KEEP] == "600s"


def test_only_the_gateway_of_the_release_may_call_engines() -> None:
    """Labels of pods are for everybody to set, and a namespace's name is not."""
    for options, expected in (({}, "gpu-sharing"), ({"gateway_namespace": "serving"}, "serving")):
        ((rule,),) = ([one["from"] for one in render("engine: vllm", **options)["NetworkPolicy"]["spec"]["ingress"]],)
        (sender,) = rule
        assert sender["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": expected}}
        assert sender["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def test_an_inference_service_has_the_same_container_and_no_keep() -> None:
    found = render("engine: vllm, gpu: {fraction: 0.5}", as_inference_services=True)
    assert set(found) == {"NetworkPolicy", "ConfigMap", "InferenceService"}
    service = found["InferenceService"]
    assert service["metadata"]["annotations"]["gpu-fraction"] == "0.5"
    assert service["spec"]["predictor"]["containers"][0]["command"][:2] == ["vllm", "serve"]
    with pytest.raises(AimGpuError, match="KServe scales"):
        render("keep: 10m", as_inference_services=True)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True), st.from_regex(r"[A-Za-z0-9._-]{1,63}", fullmatch=True)
)
def test_names_of_objects_are_legal_and_differ_where_models_do(one: str, other: str) -> None:
    name = object_name(one)
    assert len(name) <= 52
    assert name[0].isalpha()
    assert name.replace("-", "a").isalnum()
    assert name == name.lower().strip("-")
    assert one == other or object_name(one) != object_name(other)
    assert label_value(one)[-1].isalnum()


def report(requests: int, attainment: float | None, p95: float) -> dict[str, Any]:
    window = {
        "seconds": 300.0,
        "covered_seconds": 300.0,
        "requests": requests,
        "failures": 0,
        "requests_per_second": requests / 300,
        "output_tokens_per_second": None,
        "percentiles": {"ttft": {"p95_seconds": p95}},
    }
    burns = {"budget_left": attainment, "fast_burn": None, "slow_burn": None}
    target = {"name": "ttft_p95", "judged": requests, "attainment": attainment, **burns}
    scores = {"targets": [target], "windows": [window]}
    model = {"waiting": {"high": 1}, "recalls": 0, "in_flight": 2, "slots": 4, "classes": {"high": dict(scores)}, **scores}
    return {
        "models": {"chat": model},
        "pressure": {},
        "queue": {"per_gpu": 4, "most_queued": {"high": 10}, "running": {"gpu0": 1}},
    }


def test_scores_of_two_gateways_are_one() -> None:
    merged = merge_scores([report(300, 1.0, 0.2), report(100, 0.8, 0.5)])
    chat = merged["models"]["chat"]
    assert chat["targets"][0]["attainment"] == pytest.approx(0.95)
    assert chat["targets"][0]["judged"] == 400
    assert chat["classes"]["high"]["windows"][0]["requests"] == 400
    assert chat["windows"][0]["percentiles"]["ttft"]["p95_seconds"] == 0.5
    assert (chat["slots"], chat["waiting"]["high"], merged["queue"]["running"]) == (8, 2, {"gpu0": 2})
    assert (merged["queue"]["per_gpu"], merged["queue"]["most_queued"]) == (8, {"high": 20})
    assert merge_scores([report(0, None, 0.1), report(10, 0.9, 0.1)])["models"]["chat"]["targets"][0]["attainment"] == 0.9


def render_program(program: str, models: str = "", **options: Any) -> dict[str, dict[str, Any]]:
    text = f"models: {{{models}}}\nprograms: {{train: {{{program}}}}}"
    stack = parse_stack(text, base_directory=Path("/nowhere"))
    options = {"images": IMAGES, "folder": "/nowhere", **options}
    return {one["kind"]: one for one in render_stack(stack.deployments, RenderOptions(**options))}


TRAIN = "command: [python, train.py], image: registry/train:1"


@pytest.mark.parametrize(
    ("restart", "kind", "fields", "policy"),
    [
        ("never", "Job", {"parallelism": 3, "completions": 3, "backoffLimit": 0}, "Never"),
        ("on-failure", "Job", {"parallelism": 3, "completions": 3, "backoffLimit": 6}, "OnFailure"),
        ("always", "Deployment", {"replicas": 3}, None),
    ],
)
@pytest.mark.parametrize("kserve", [True, False])
def test_a_program_is_a_job_or_where_it_never_ends_a_deployment(
    restart: str, kind: str, fields: dict[str, int], policy: str | None, *, kserve: bool
) -> None:
    asked = f"{TRAIN}, gpu: {{memory: 8GiB}}, replicas: 3, restart: {restart}"
    found = render_program(asked, as_inference_services=kserve, cache="5Gi")
    assert set(found) == {kind}  # no Service, claim or NetworkPolicy
    spec = found[kind]["spec"]
    assert fields.items() <= spec.items()
    assert spec["template"]["spec"].get("restartPolicy") == policy
    for place in (found[kind], spec["template"]):
        assert place["metadata"]["labels"].items() >= {"aim.amd.com/program": "train", **labels.MANAGED}.items()
        assert labels.SERVED_MODEL not in place["metadata"]["labels"]  # by which gateways find what they serve and scale
    assert found[kind]["metadata"]["labels"][labels.STACK] == "default"


@pytest.mark.parametrize(
    "share",
    [
        "gpu: {memory: 24GiB}, compute: 30%, priority: low, isolation: enforced",
        "gpu: {fraction: 0.25, devices: 2}, priority: high",
        "gpu: {partition: cpx}",
        "gpu: {whole: 2}, host: {cpu: 2, memory: 4GiB}",
        "gpu: {memory: 1GiB}, place: {products: [MI300X], with: [chat]}",
    ],
)
def test_a_program_asks_for_a_share_as_a_model_does(share: str) -> None:
    program = render_program(f"{TRAIN}, {share}", "chat: {model: a/b}")["Job"]["spec"]["template"]
    model = render(f"engine: vllm, {share}")["Deployment"]["spec"]["template"]
    wanted = {key: value for key, value in model["metadata"]["annotations"].items() if key != labels.MODEL}
    assert program["metadata"]["annotations"] == wanted
    assert program["spec"]["containers"][0].get("resources") == model["spec"]["containers"][0].get("resources")
    assert program["spec"].get("affinity") == model["spec"].get("affinity")


def test_a_program_gets_its_words_and_variables_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very secret")
    words = "command: [sh, -c, 'echo $$ $(HOME)'], image: registry/train:1, gpu: {memory: 1GiB}"
    found = render_program(f"{words}, env: {{PRICE: '$$5', TOKEN: {{from_variable: MY_TOKEN}}}}")
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/train:1"
    assert container["command"] == ["sh", "-c", "echo $$$$ $$(HOME)"]  # Kubernetes reads $$ as $
    plain, secret = container["env"]
    assert plain == {"name": "PRICE", "value": "$$$$5"}
    assert secret["valueFrom"]["secretKeyRef"] == {"name": found["Secret"]["metadata"]["name"], "key": "TOKEN"}
    assert found["Secret"]["metadata"]["labels"][labels.PROGRAM] == "train"
    assert "very secret" not in json.dumps(found["Job"])


@pytest.mark.parametrize(
    ("program", "models", "reason"),
    [
        ("command: [a]", "", "needs an image"),
        (f"{TRAIN}, directory: ./project", "", "'directory'"),
        (f"{TRAIN}, after: [chat]", "chat: {model: a/b}", "'after'"),
        (f"{TRAIN}, preemptible: true", "", "'preemptible'"),
        (f"{TRAIN}, sharing: fair", "", "'sharing'"),
        (TRAIN, "chat: {model: a/b, place: {not_with: [train]}}", "names train, a program"),
    ],
)
def test_what_a_program_cannot_have_on_a_cluster_is_refused_by_name(program: str, models: str, reason: str) -> None:
    with pytest.raises(AimGpuError, match=reason) as refused:
        render_program(f"{program}, gpu: {{memory: 1GiB}}", models)
    assert refused.value.hint


def test_manifests_are_shown_without_references_from_one_place_to_another() -> None:
    probe = {"httpGet": {"path": "/health"}}
    shown = manifest_text([{"startupProbe": probe, "readinessProbe": probe}])
    assert shown.count("/health") == 2
    assert "&" not in shown
