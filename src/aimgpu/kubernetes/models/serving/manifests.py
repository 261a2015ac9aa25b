"""The objects of a stack: what runs each model or program, the Service of a model, and a Secret for values by reference."""

import base64
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aimgpu.control.stack.slo import PROMISES
from aimgpu.control.stack.stack_text import write_fields
from aimgpu.domain import Deployment, Priority, RestartPolicy, ServiceObjective, UserProgram
from aimgpu.engines.overrides import read_secret
from aimgpu.engines.vllm import door
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.api.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    JOBS,
    NETWORK_POLICIES,
    SECRETS,
    SERVICES,
    VOLUME_CLAIMS,
)
from aimgpu.kubernetes.models.serving.engine_container import DOOR_MAP, PORT, ServingImages, engine_container, secret_name
from aimgpu.kubernetes.models.serving.program_container import job_fields, program_container, refuse_unseen_neighbours
from aimgpu.kubernetes.models.serving.share_request import label_of, pod_rules, request_share
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.units import format_duration_ms, format_ppm

RESOURCES = {
    "ConfigMap": CONFIG_MAPS,
    "Deployment": DEPLOYMENTS,
    "Job": JOBS,
    "Service": SERVICES,
    "Secret": SECRETS,
    "PersistentVolumeClaim": VOLUME_CLAIMS,
    "NetworkPolicy": NETWORK_POLICIES,
    "InferenceService": INFERENCE_SERVICES,
}
# How pods are replaced: a second copy beside the first would need its share of a GPU twice.
OLD_FIRST = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
POLICY_NAME = "aim-gpu-models"
DEFAULT_ENGINE = "llamacpp"  # of models that name none
USUAL_NAMESPACE = "gpu-sharing"  # where the documentation installs the chart
_GATEWAY = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "aim-gpu-sharing"}

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    images: ServingImages
    stack: str = "default"
    as_inference_services: bool = False
    engine: str = DEFAULT_ENGINE
    cache: str | None = None  # size of a claim that keeps downloaded models, such as "50Gi"; None: they go with the pod
    cache_class: str | None = None
    pull_secrets: tuple[str, ...] = field(default=())
    gateway_namespace: str = USUAL_NAMESPACE  # of the release whose gateway may call the engines
    folder: str | None = None  # of the stack file: where a program runs that names no directory


def render_stack(deployments: Sequence[Deployment], options: RenderOptions) -> list[Manifest]:
    """In the order in which they are applied. Raises InvalidInput for what a cluster cannot do."""
    refuse_unseen_neighbours(deployments)
    found = [_policy(options)] if any(one.overrides.program is None for one in deployments) else []
    if any((deployment.engine or options.engine) == "vllm" for deployment in deployments):
        found.append(_door(options))
    for deployment in deployments:
        found += render_model(deployment, options)
    return found


def render_model(deployment: Deployment, options: RenderOptions) -> list[Manifest]:
    """What one model or program consists of."""
    found = []
    if deployment.overrides.secrets:
        values = {one.name: base64.b64encode(read_secret(one).encode()).decode() for one in deployment.overrides.secrets}
        found.append(_object("v1", "Secret", secret_name(deployment.name), deployment, options, data=values))
    if (program := deployment.overrides.program) is not None:
        return [*found, _program(deployment, program, options)]
    if options.cache:
        found.append(_cache_claim(deployment, options))
    if options.as_inference_services:
        return [*found, _inference_service(deployment, options)]
    return [*found, _deployment(deployment, options), _service(deployment, options)]


def serving_annotations(deployment: Deployment, engine: str) -> dict[str, str]:
    """What the gateway reads: names, bounds and promises."""
    found = {
        **({labels.MODEL: deployment.model} if deployment.overrides.program is None else {}),
        labels.ENGINE: engine,
        labels.REPLICAS: str(deployment.replicas),
        labels.PRIORITY: deployment.ask.priority.value,
    }
    if labels.label_value(deployment.name) != deployment.name:
        found[labels.NAME] = deployment.name
    if deployment.concurrency is not None:
        found[labels.CONCURRENCY] = str(deployment.concurrency)
    if deployment.context_tokens is not None:
        found[labels.CONTEXT] = str(deployment.context_tokens)
    if deployment.keep_seconds is not None:
        found[labels.KEEP] = f"{deployment.keep_seconds}s"
    if deployment.objective is not None:
        found[labels.SLO] = json.dumps(write_objective(deployment.objective))
    return found


def write_objective(objective: ServiceObjective) -> dict[str, Any]:
    """As `slo:` is written in a stack file."""
    found: dict[str, Any] = {}
    for key in PROMISES[:-2]:
        if (milliseconds := getattr(objective, f"{key}_ms")) is not None:
            found[key] = format_duration_ms(milliseconds)
    if objective.tokens_per_second is not None:
        found["throughput"] = f"{objective.tokens_per_second}tok/s"
    if objective.availability_ppm is not None:
        found["availability"] = format_ppm(objective.availability_ppm)
    own = {one.value: write_objective(promises) for one in Priority if (promises := objective.own_of(one)) is not None}
    return found | ({"classes": own} if own else {})


def _pod(deployment: Deployment, options: RenderOptions) -> tuple[dict[str, str], Manifest]:
    """Annotations and spec of its pods."""
    engine = deployment.engine or options.engine
    annotations, spec = _shared_pod(deployment, engine_container(deployment, engine, options.images), options)
    models: Manifest = {"name": "models", "emptyDir": {}}
    if options.cache:
        models = {"name": "models", "persistentVolumeClaim": {"claimName": cache_name(deployment.name)}}
    spec["volumes"] = [models, {"name": "tmp", "emptyDir": {}}]
    if engine == "vllm":
        spec["volumes"].append({"name": "door", "configMap": {"name": DOOR_MAP}})
    return annotations, spec


def _shared_pod(deployment: Deployment, container: Manifest, options: RenderOptions) -> tuple[dict[str, str], Manifest]:
    """With the share of a GPU, the rights and the place that the stack file gives it."""
    share = request_share(deployment)
    resources: Manifest = {"limits": share.limits} if share.limits else {}
    requests = {}
    if deployment.ask.cpu_millis:
        requests["cpu"] = f"{deployment.ask.cpu_millis}m"
    if deployment.ask.host_memory_bytes:
        requests["memory"] = str(deployment.ask.host_memory_bytes)
    if requests:
        resources["requests"] = requests
    if resources:
        container["resources"] = resources
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"  # why it ended is then in the pod's status
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec: Manifest = {
        "automountServiceAccountToken": False,  # it has no business with the API server
        "containers": [container],
        **pod_rules(deployment),
    }
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    return share.annotations, spec


def cache_name(model: str) -> str:
    """Of the claim that keeps what was downloaded for a model."""
    return f"{labels.object_name(model)}-models"


def _deployment(deployment: Deployment, options: RenderOptions) -> Manifest:
    return _deployment_of(deployment, *_pod(deployment, options), options)


def _program(deployment: Deployment, program: UserProgram, options: RenderOptions) -> Manifest:
    """A Job, or a Deployment where it is always started again."""
    container = program_container(deployment, program, options.images, options.folder)
    annotations, pod = _shared_pod(deployment, container, options)
    if program.restart is RestartPolicy.ALWAYS:
        return _deployment_of(deployment, annotations, pod, options)
    fields, pod["restartPolicy"] = job_fields(deployment.replicas, program.restart)
    spec = {**fields, "template": _template(deployment, annotations, pod)}
    return _object("batch/v1", "Job", labels.object_name(deployment.name), deployment, options, spec=spec)


def _template(deployment: Deployment, annotations: dict[str, str], pod: Manifest) -> Manifest:
    mark = {label_of(deployment): labels.label_value(deployment.name)}
    return {"metadata": {"labels": {**mark, **labels.MANAGED}, "annotations": annotations}, "spec": pod}


def _deployment_of(deployment: Deployment, annotations: dict[str, str], pod: Manifest, options: RenderOptions) -> Manifest:
    spec = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": {label_of(deployment): labels.label_value(deployment.name)}},
        "strategy": copy.deepcopy(OLD_FIRST),
        "template": _template(deployment, annotations, pod),
    }
    return _object("apps/v1", "Deployment", labels.object_name(deployment.name), deployment, options, spec=spec)


def _service(deployment: Deployment, options: RenderOptions) -> Manifest:
    selector = {labels.SERVED_MODEL: labels.label_value(deployment.name)}
    spec = {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    return _object("v1", "Service", labels.object_name(deployment.name), deployment, options, spec=spec)


def _inference_service(deployment: Deployment, options: RenderOptions) -> Manifest:
    if deployment.keep_seconds is not None:
        raise InvalidInput(
            f"{deployment.name}: KServe scales an InferenceService itself, so `keep` cannot be kept",
            hint="Remove `keep`, or apply it as a Deployment.",
        )
    annotations, pod = _pod(deployment, options)
    pod["containers"][0]["name"] = "kserve-container"
    predictor = {**pod, "minReplicas": deployment.replicas, "maxReplicas": deployment.replicas}
    name = labels.object_name(deployment.name)
    found = _object("serving.kserve.io/v1beta1", "InferenceService", name, deployment, options, spec={"predictor": predictor})
    found["metadata"]["annotations"] |= {**annotations, "serving.kserve.io/deploymentMode": "Standard"}
    return found


def _cache_claim(deployment: Deployment, options: RenderOptions) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.cache}}}
    if options.cache_class:
        spec["storageClassName"] = options.cache_class
    found = _object("v1", "PersistentVolumeClaim", cache_name(deployment.name), deployment, options, spec=spec)
    found["metadata"]["labels"][labels.CACHE] = "true"
    return found


def _policy(options: RenderOptions) -> Manifest:
    """A NetworkPolicy beside the engines' keys: only the gateway of the release may call engines."""
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": options.gateway_namespace}}
    gateway = {"namespaceSelector": namespace, "podSelector": {"matchLabels": _GATEWAY}}
    spec = {
        "podSelector": {"matchExpressions": [{"key": labels.SERVED_MODEL, "operator": "Exists"}]},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [gateway], "ports": [{"port": PORT, "protocol": "TCP"}]}],
    }
    metadata = {"name": POLICY_NAME, "labels": {**labels.MANAGED, labels.STACK: options.stack}}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _door(options: RenderOptions) -> Manifest:
    metadata = {"name": DOOR_MAP, "labels": {**labels.MANAGED, labels.STACK: options.stack}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {f"{door.MODULE}.py": door.read_module()}}


def _object(version: str, kind: str, name: str, deployment: Deployment, options: RenderOptions, **content: object) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "labels": {**labels.MANAGED, labels.STACK: options.stack, label_of(deployment): labels.label_value(deployment.name)},
    }
    if kind in ("Deployment", "InferenceService", "Job"):
        metadata["annotations"] = serving_annotations(deployment, deployment.engine or options.engine)
    if kind in ("Deployment", "InferenceService") and deployment.overrides.program is None:
        metadata["annotations"][labels.ENTRY] = json.dumps(write_fields(deployment))
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
