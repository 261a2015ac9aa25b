"""What a model of the stack file asks of a GPU, as annotations and limits of its pods. Pure."""

from dataclasses import dataclass, field
from typing import Any

from aimgpu.domain import Auto, Deployment, Fraction, IsolationRequirement, Memory, PartitionKind, Spread, Whole
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.vocabulary import annotations as keys
from aimgpu.kubernetes.vocabulary import names
from aimgpu.kubernetes.vocabulary.model_labels import CONCURRENCY, MODEL, PRIORITY
from aimgpu.units import MIB, PPM

_MODES = ("spx", "dpx", "tpx", "qpx", "cpx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    annotations: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)


def request_share(deployment: Deployment) -> ShareRequest:
    """Raises InvalidInput for what a cluster cannot give, rather than leaving it out."""
    ask = deployment.ask
    _refuse_unknown(deployment)
    found = {MODEL: deployment.model, PRIORITY: ask.priority.value}
    if ask.isolation is not IsolationRequirement.NONE:
        found[keys.ISOLATION] = ask.isolation.value
    if isinstance(ask.want, Whole):
        limits = {names.WHOLE_RESOURCE: str(ask.device_count)}
        return ShareRequest(annotations={MODEL: deployment.model}, limits=limits)
    found |= _want(deployment)
    if ask.compute_ppm is not None:
        found[keys.COMPUTE] = f"{-(-ask.compute_ppm * 100 // PPM)}%"
    if ask.devices > 1:
        found[keys.NUM_DEVICES] = str(ask.devices)
    return ShareRequest(annotations=found)


def node_affinity(deployment: Deployment) -> dict[str, Any]:
    """Of the products that the model may run on; empty: any."""
    ask = deployment.ask
    terms = [
        {"key": names.LABEL_PRODUCT, "operator": operator, "values": sorted(products)}
        for operator, products in (("In", ask.products), ("NotIn", ask.refused_products))
        if products
    ]
    if not terms:
        return {}
    selector = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}


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
        "place: {with}": ask.with_deployments,
        "place: {not_with}": ask.not_with_deployments,
        "place: {pinned}": ask.pinned,
        "place: {spread}": ask.spread is not Spread.PACK,
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
                hint="Remove it; `place: {products: [...]}` holds on a cluster too.",
            )
