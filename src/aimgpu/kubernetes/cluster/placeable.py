"""Whether the cluster's GPUs can hold what manifests ask for, before anything is changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aimgpu.errors import ClusterFailed, Conflict, InvalidInput, NotFoundInCluster
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from aimgpu.kubernetes.cluster.admission.inventory import PublishedGpus
from aimgpu.kubernetes.cluster.admission.replicas import OfferedReplicas
from aimgpu.kubernetes.cluster.admission.review import Cluster, review_pod
from aimgpu.kubernetes.cluster.operator.pod_gpus import claims_of, limits_of
from aimgpu.kubernetes.cluster.operator.shares.indexes import ClaimIndex, DeviceIndex, Key, KnownGpus
from aimgpu.kubernetes.cluster.operator.shares.room import find_room
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_NODES
from aimgpu.kubernetes.vocabulary.model_labels import find_workload
from aimgpu.kubernetes.vocabulary.names import DRIVER, WHOLE_CLASS, WHOLE_RESOURCE
from aimgpu.sizing import built_in

_KINDS = {"Deployment": DEPLOYMENTS, "Job": JOBS, "InferenceService": INFERENCE_SERVICES}


async def refuse_unplaceable(client: Client, manifests: Sequence[Object], namespace: str) -> None:
    """Raises InvalidInput for what admission would refuse or no GPU of the cluster could hold, were it empty.

    Raises Conflict for another share of a model that runs, where no GPU has room for it now: its pod ends before the next one
    starts. What the caller may not see is not checked.
    """
    slices = await _read(client, RESOURCE_SLICES, fields=f"spec.driver={DRIVER}")
    if not any(item["spec"].get("devices") for item in slices or ()):
        return
    nodes, claims = await _read(client, GPU_NODES), await _read(client, RESOURCE_CLAIMS)
    cluster = Cluster(gpus=PublishedGpus(slices or ()), catalogue=built_in(), replicas=OfferedReplicas(nodes or ()))
    gpus = KnownGpus(claims=ClaimIndex(claims or ()), devices=DeviceIndex(slices or ()))
    for manifest in manifests:
        if manifest["kind"] not in _KINDS:
            continue
        name = manifest["metadata"]["name"]
        spec = _claim_spec(manifest, namespace, cluster)
        room = None if spec is None else find_room(spec, gpus)
        if spec is None or room is None:
            continue
        if not room.ever:
            raise InvalidInput(f"{name}: {room.text}", hint="Ask for less. Nothing was changed.")
        if claims is None or room.now:
            continue
        running = await _claims_of_pods(client, manifest, namespace)
        if not running or spec == await _spec_before(client, manifest, namespace, cluster):
            continue
        for own in running:
            room = find_room(spec, gpus, without=own)
            if room is not None and not room.now:
                raise Conflict(
                    f"{name} runs, and a pod with its new share would have no place: {room.text}",
                    hint="Ask for no more than would fit, or stop something first. Nothing was changed.",
                )


async def _read(client: Client, resource: Resource, *, fields: str = "") -> list[Object] | None:
    """None: not served, or not ours to see."""
    try:
        return (await client.list(resource, fields=fields))[0]
    except ClusterFailed:
        return None


def _claim_spec(manifest: Mapping[str, Any], namespace: str, cluster: Cluster) -> Mapping[str, Any] | None:
    """Of the claim that its pods will have; None: they will have none."""
    for pod in _pods(manifest):
        whole = limits_of(pod).get(WHOLE_RESOURCE)
        if whole:
            exactly = {"deviceClassName": WHOLE_CLASS, "count": whole}
            return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        try:
            template = review_pod(pod, namespace, cluster).template
        except InvalidInput as error:
            raise InvalidInput(f"{manifest['metadata']['name']}: {error.message}", hint=error.hint) from error
        if template is not None:
            found: Mapping[str, Any] = template["spec"]["spec"]
            return found
    return None


def _pods(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The pod that it makes, as far as it stands in it."""
    if manifest["kind"] in ("Deployment", "Job"):
        template = manifest["spec"]["template"]
        yield {"metadata": template.get("metadata") or {}, "spec": template["spec"]}
    else:
        metadata = {"annotations": manifest["metadata"].get("annotations") or {}}
        yield {"metadata": metadata, "spec": manifest["spec"]["predictor"]}


async def _claims_of_pods(client: Client, manifest: Mapping[str, Any], namespace: str) -> list[list[Key]]:
    """Of each pod of the model that runs or waits on a node."""
    label, value = find_workload(manifest) or ("", "")
    try:
        pods, _ = await client.list(PODS, namespace, labels=f"{label}={value}")
    except ClusterFailed:
        return []
    return [[(namespace, one.name) for one in claims_of(pod)] for pod in pods if (pod.get("spec") or {}).get("nodeName")]


async def _spec_before(
    client: Client, manifest: Mapping[str, Any], namespace: str, cluster: Cluster
) -> Mapping[str, Any] | None:
    try:
        before = await client.get(_KINDS[manifest["kind"]], manifest["metadata"]["name"], namespace)
        return _claim_spec({**before, "kind": manifest["kind"]}, namespace, cluster)
    except (NotFoundInCluster, InvalidInput):
        return None
