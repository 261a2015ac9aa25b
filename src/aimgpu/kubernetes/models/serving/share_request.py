"""What a model of the stack file asks of a GPU, as annotations and limits of its pods. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aimgpu.domain import Auto, Deployment, Fraction, IsolationRequirement, Memory, PartitionKind, Spread, Whole
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary import annotations as keys
from aimgpu.kubernetes.vocabulary import names
from aimgpu.kubernetes.vocabulary.model_labels import CONCURRENCY, MODEL, PRIORITY, PROGRAM, SERVED_MODEL, label_value
from aimgpu.units import MIB, PPM

_REQUIRED, _NODE = "requiredDuringSchedulingIgnoredDuringExecution", "kubernetes.io/hostname"
_MODES = ("spx", "dpx", "tpx", "qpx", "cpx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    annotations: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)


def request_share(deployment: Deployment) -> ShareRequest:
    """Raises InvalidInput for what a cluster cannot give, rather than leaving it out."""
    ask = deployment.ask
    _refuse_unknown(deployment)
    model = {MODEL: deployment.model} if deployment.overrides.program is None else {}
    found = {**model, PRIORITY: ask.priority.value}
    if ask.isolation is not IsolationRequirement.NONE:
        found[keys.ISOLATION] = ask.isolation.value
    if isinstance(ask.want, Whole):
        limits = {names.WHOLE_RESOURCE: str(ask.device_count)}
        return ShareRequest(annotations=model, limits=limits)
    found |= _want(deployment)
    if ask.compute_ppm is not None:
        found[keys.COMPUTE] = f"{-(-ask.compute_ppm * 100 // PPM)}%"
    if ask.devices > 1:
        found[keys.NUM_DEVICES] = str(ask.devices)
    return ShareRequest(annotations=found)


def pod_rules(deployment: Deployment) -> dict[str, Any]:
    """Where its pods may run, as parts of a pod's spec: products, and nodes with or without other models."""
    ask, affinity = deployment.ask, dict[str, Any]()
    terms = [
        {"key": names.LABEL_PRODUCT, "operator": operator, "values": sorted(products)}
        for operator, products in (("In", ask.products), ("NotIn", ask.refused_products))
        if products
    ]
    if terms:
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": terms}]}}
    if ask.with_deployments:
        beside = [{"labelSelector": _pods_of([name]), "topologyKey": _NODE} for name in sorted(ask.with_deployments)]
        affinity["podAffinity"] = {_REQUIRED: beside}
    if ask.not_with_deployments:
        apart = {"labelSelector": _pods_of(sorted(ask.not_with_deployments)), "topologyKey": _NODE}
        affinity["podAntiAffinity"] = {_REQUIRED: [apart]}
    rules: dict[str, Any] = {"affinity": affinity} if affinity else {}
    if ask.spread is Spread.SPREAD:
        soft = {"maxSkew": 1, "topologyKey": _NODE, "whenUnsatisfiable": "ScheduleAnyway"}
        rules["topologySpreadConstraints"] = [{**soft, "labelSelector": _pods_of([deployment.name], label_of(deployment))}]
    return rules


def label_of(deployment: Deployment) -> str:
    """Of the label that its objects and pods have."""
    return SERVED_MODEL if deployment.overrides.program is None else PROGRAM


def _pods_of(names: Sequence[str], label: str = SERVED_MODEL) -> dict[str, Any]:
    return {"matchExpressions": [{"key": label, "operator": "In", "values": [label_value(name) for name in names]}]}


def _want(deployment: Deployment) -> dict[str, str]:
    want = deployment.ask.want
    if isinstance(want, Auto):
        if deployment.ask.devices > 1:
            raise InvalidInput(
                f"{deployment.name}: a cluster cannot size a model over {deployment.ask.devices} GPUs by itself",
                hint="Say how much of each: gpu: {memory: 24GiB, devices: 2}.",
            )
        wanted = deployment.concurrency
        return {keys.SHARING: "true"} | ({CONCURRENCY: str(wanted)} if wanted is not None else {})
    if isinstance(want, Memory):
        return {keys.MEMORY: str(-(-want.memory_bytes // MIB))}
    if isinstance(want, Fraction):
        if want.ppm >= PPM:
            raise InvalidInput(f"{deployment.name}: a fraction of 1 is a whole GPU", hint="Write gpu: {whole: 1}.")
        return {keys.FRACTION: f"{want.ppm / PPM:.6f}".rstrip("0")}
    return _partition(deployment.name, want) if isinstance(want, PartitionKind) else {}


def _partition(name: str, want: PartitionKind) -> dict[str, str]:
    if want.kind not in _MODES:
        raise InvalidInput(
            f"{name}: the partition {want.kind!r} cannot be asked for on a cluster",
            hint=f"Partitions by mode can: {', '.join(_MODES)}. For MIG use gpu: {{memory: ...}} with isolation: hardware.",
        )
    return {keys.COMPUTE_MODE: want.kind.upper()}


def _refuse_unknown(deployment: Deployment) -> None:
    ask = deployment.ask
    refused = {
        "place: {vendor, not_vendor}": ask.vendor or ask.refused_vendor,
        "place: {partition}": ask.partition_id,
        "place: {pinned}": ask.pinned,
    }
    if deployment.aliases or deployment.default:
        raise InvalidInput(
            f"{deployment.name}: 'aliases' and 'default' have no meaning on a cluster",
            hint="Remove them. Names without a namespace come from the chart's `gateway.shortNames`.",
        )
    for key, given in refused.items():
        if given:
            raise InvalidInput(
                f"{deployment.name}: '{key}' has no meaning on a cluster, where kube-scheduler places",
                hint="Remove it; products, with, not_with and spread hold on a cluster too.",
            )
