"""Brings a stack to a cluster and takes it away: server-side apply of what differs, and nothing else."""

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aimgpu.errors import ClusterFailed, InvalidInput, NotFoundInCluster, UnknownDeployment
from aimgpu.kubernetes.api.client import Client, Object, Resource
from aimgpu.kubernetes.api.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    JOBS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    NETWORK_POLICIES,
    RESOURCE_SLICES,
    SECRETS,
    SERVICES,
    VOLUME_CLAIMS,
)
from aimgpu.kubernetes.models.serving.engine_container import DOOR_MAP
from aimgpu.kubernetes.models.serving.engine_keys import ENGINE_KEYS, ensure_engine_keys
from aimgpu.kubernetes.models.serving.manifests import POLICY_NAME, RESOURCES, Manifest
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.names import DRIVER, WEBHOOKS
from aimgpu.kubernetes.vocabulary.namespaces import admits, explain_unadmitted

OURS = ",".join(f"{key}={value}" for key, value in labels.MANAGED.items())
_FORBIDDEN = 403
_UNPROCESSABLE = 422
_INSTALL = "helm install sharing deploy/helm/aim-gpu-sharing --namespace gpu-sharing --create-namespace"
MANAGER = "aimgpu"  # of fields that are applied
_ENGINES = ("Deployment", "InferenceService")
_WORKLOADS = (DEPLOYMENTS, INFERENCE_SERVICES, JOBS)
_UNSTABLE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid")


class ObjectChange(StrEnum):
    CREATED = "created"
    CONFIGURED = "configured"
    UNCHANGED = "unchanged"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedObject:
    kind: str
    name: str
    change: ObjectChange
    model: str | None = None


class StackApplier:
    """One namespace of one cluster. Everything that it writes has the label `app.kubernetes.io/managed-by: aimgpu`."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def check_cluster(self, *, inference_services: bool = False) -> None:
        """Raises where nothing of a stack could run: the namespace, our admission or KServe is missing."""
        namespace = await self._find(NAMESPACES, self.namespace)
        if namespace is None:
            raise InvalidInput(
                f"the cluster has no namespace {self.namespace!r}",
                hint=f"Make it (`kubectl create namespace {self.namespace}`), or name another with --namespace.",
                page_hint=f"Make it (`kubectl create namespace {self.namespace}`), or fill in another Namespace.",
            )
        webhooks = await self._find(MUTATING_WEBHOOKS, WEBHOOKS)
        if webhooks is None:
            raise ClusterFailed(
                "AIM GPU Sharing is not installed in this cluster, so no model would get a share of a GPU",
                hint=f"Install the chart: {_INSTALL}",
            )
        if namespace and webhooks and not admits(webhooks, namespace):
            raise ClusterFailed(
                f"the admission webhooks do not select namespace {self.namespace}, so no model would get a share of a GPU",
                hint=explain_unadmitted(webhooks, namespace),
            )
        if inference_services and not await self._client.serves("serving.kserve.io/v1beta1"):
            raise ClusterFailed(
                "this cluster has no InferenceServices: KServe is not installed",
                hint="Install KServe, or apply the models as Deployments, which is the default.",
            )

    async def find_vendor(self) -> str | None:
        """The vendor of the cluster's GPUs. None: they are mixed, simulated, unknown or not readable."""
        try:
            slices, _ = await self._client.list(RESOURCE_SLICES, fields=f"spec.driver={DRIVER}")
        except ClusterFailed:
            return None
        devices = [device for item in slices for device in item["spec"].get("devices") or ()]
        vendors = {_attribute(device, "vendor") for device in devices if not _attribute(device, "simulated")}
        return str(vendors.pop()) if len(vendors) == 1 else None

    async def apply(self, manifests: Sequence[Manifest], *, dry_run: bool = False) -> AsyncIterator[AppliedObject]:
        """One after another; what is as wanted is left alone. Raises ClusterFailed with what was refused and why."""
        found = {_label(one, labels.SERVED_MODEL) for one in manifests if one["kind"] in _ENGINES}
        engines = [name for name in found if name]
        if not dry_run and engines:
            try:
                await ensure_engine_keys(self._client, self.namespace, engines)
            except ClusterFailed as error:
                raise _explain(error, f"Secret {ENGINE_KEYS}", self.namespace) from error
        for manifest in manifests:
            resource, name = RESOURCES[manifest["kind"]], manifest["metadata"]["name"]
            try:
                async for other in self._replaced(manifest, dry_run=dry_run):
                    yield other
                before = await self._client.find(resource, name, self.namespace)
                _refuse_foreign(manifest, before, self.namespace)
                wanted = _asleep(manifest, before)
                after = await self._apply(resource, wanted, dry_run=True)
                change = _compare(before, after)
                if change is not ObjectChange.UNCHANGED and not dry_run:
                    await self._apply(resource, wanted)
            except ClusterFailed as error:
                if error.status == _UNPROCESSABLE and manifest["kind"] == "Job" and "immutable" in error.message:
                    raise _refuse_change(manifest, self.namespace) from error
                raise _explain(error, f"{manifest['kind']} {name}", self.namespace) from error
            yield _applied(manifest, change)

    async def _replaced(self, manifest: Manifest, *, dry_run: bool) -> AsyncIterator[AppliedObject]:
        """Ends the Job of a program that is now a Deployment, and the other way round."""
        program = _label(manifest, labels.PROGRAM)
        if program is None or manifest["kind"] == "Secret":
            return
        kind = "Deployment" if manifest["kind"] == "Job" else "Job"
        for one in await self._list(RESOURCES[kind]):
            if _label(one, labels.PROGRAM) == program:
                if not dry_run:
                    await self._end(RESOURCES[kind], one["metadata"]["name"])
                yield _applied({**one, "kind": kind}, ObjectChange.DELETED)

    async def prune(self, keep: Iterable[str], *, stack: str, dry_run: bool = False) -> AsyncIterator[AppliedObject]:
        """Remove the stack's models and programs that are not in `keep`; what they downloaded stays."""
        kept = {labels.label_value(name) for name in keep}
        async for found in self._delete(lambda name: name not in kept, stack=stack, dry_run=dry_run):
            yield found

    async def remove(
        self, names: Sequence[str], *, caches: bool = False, dry_run: bool = False, stack: str | None = None
    ) -> AsyncIterator[AppliedObject]:
        """These workloads, or all; with `caches` also what they downloaded. Raises UnknownDeployment for a missing one."""
        chosen = {labels.label_value(name) for name in names}
        known = {_workload(one) or "" for one in await self.models()}
        if missing := [name for name in names if labels.label_value(name) not in known]:
            raise UnknownDeployment.of(*missing, known=known, where=f" in namespace {self.namespace}")
        wanted = (lambda name: name in chosen) if names else (lambda _: True)
        async for found in self._delete(wanted, stack=stack, caches=caches, dry_run=dry_run):
            yield found
        if not names and stack is None and not dry_run:
            await self._client.delete(NETWORK_POLICIES, POLICY_NAME, self.namespace)
            await self._client.delete(SECRETS, ENGINE_KEYS, self.namespace)
            await self._client.delete(CONFIG_MAPS, DOOR_MAP, self.namespace)

    async def remove_all(self, also: str, *, caches: bool = False, dry_run: bool = False) -> AsyncIterator[AppliedObject]:
        """Every model, and the objects that the label selector `also` finds."""
        async for found in self.remove((), caches=caches, dry_run=dry_run):
            yield found
        for kind, resource in {
            "Deployment": DEPLOYMENTS,
            "Service": SERVICES,
            "ConfigMap": CONFIG_MAPS,
            "Secret": SECRETS,
        }.items():
            for one in (await self._client.list(resource, self.namespace, labels=also))[0]:
                if not dry_run:
                    await self._client.delete(resource, one["metadata"]["name"], self.namespace)
                yield _applied({**one, "kind": kind}, ObjectChange.DELETED)

    async def models(self) -> list[Object]:
        """The Deployments, InferenceServices and Jobs that were applied here."""
        found = [one for kind in _WORKLOADS for one in await self._list(kind)]
        return [one for one in found if _workload(one)]

    async def _find(self, resource: Resource, name: str) -> Object | None:
        """Empty where we are not allowed to look: applying a stack does not need that right."""
        try:
            return await self._client.find(resource, name)
        except ClusterFailed as error:
            if error.status == _FORBIDDEN:
                return {}
            raise

    async def _apply(self, resource: Resource, manifest: Manifest, *, dry_run: bool = False) -> Object:
        name = manifest["metadata"]["name"]
        return await self._client.patch(
            resource, name, manifest, self.namespace, kind="apply", manager=MANAGER, dry_run=dry_run
        )

    async def _delete(
        self, wanted: Callable[[str], bool], *, stack: str | None, caches: bool = False, dry_run: bool = False
    ) -> AsyncIterator[AppliedObject]:
        kinds = {kind: RESOURCES[kind] for kind in ("InferenceService", "Deployment", "Job", "Service", "Secret")}
        if caches:
            kinds["PersistentVolumeClaim"] = VOLUME_CLAIMS
        for kind, resource in kinds.items():
            for one in await self._list(resource, stack):
                workload = _workload(one)
                if workload is None or not wanted(workload):
                    continue
                name = one["metadata"]["name"]
                try:
                    if not dry_run:
                        await self._end(resource, name)
                except ClusterFailed as error:
                    raise _explain(error, f"{kind} {name}", self.namespace) from error
                yield _applied({**one, "kind": kind}, ObjectChange.DELETED)

    async def _end(self, resource: Resource, name: str) -> None:
        """A Job would leave its pods."""
        await self._client.delete(resource, name, self.namespace, propagation="Background" if resource is JOBS else None)

    async def _list(self, resource: Resource, stack: str | None = None) -> list[Object]:
        selector = OURS + (f",{labels.STACK}={stack}" if stack else "")
        try:
            return (await self._client.list(resource, self.namespace, labels=selector))[0]
        except NotFoundInCluster:  # KServe is not installed
            return []
        except ClusterFailed as error:
            if resource in (INFERENCE_SERVICES, JOBS) and error.status == _FORBIDDEN:
                return []
            raise _explain(error, resource.plural, self.namespace) from error


def _applied(manifest: Mapping[str, Any], change: ObjectChange) -> AppliedObject:
    return AppliedObject(kind=manifest["kind"], name=manifest["metadata"]["name"], change=change, model=_workload(manifest))


def _asleep(manifest: Manifest, before: Object | None) -> Manifest:
    """A model that the gateway scaled to zero stays so: the next request wakes it."""
    if manifest["kind"] != "Deployment" or before is None or labels.KEEP not in manifest["metadata"].get("annotations", ()):
        return manifest
    if (before.get("spec") or {}).get("replicas") != 0:
        return manifest
    return {**manifest, "spec": {**manifest["spec"], "replicas": 0}}


def _compare(before: Object | None, after: Object) -> ObjectChange:
    if before is None:
        return ObjectChange.CREATED
    return ObjectChange.UNCHANGED if _content(before) == _content(after) else ObjectChange.CONFIGURED


def _content(item: Object) -> Object:
    found = copy.deepcopy({key: value for key, value in item.items() if key != "status"})
    for name in _UNSTABLE:
        found["metadata"].pop(name, None)
    return found


def _refuse_foreign(manifest: Manifest, before: Object | None, namespace: str) -> None:
    if before is None or _label(before, "app.kubernetes.io/managed-by") == labels.MANAGED["app.kubernetes.io/managed-by"]:
        return
    raise InvalidInput(
        f"{manifest['kind']} {manifest['metadata']['name']} in namespace {namespace} was not made by aimgpu",
        hint="Give the model another name, or use another namespace.",
    )


def _refuse_change(manifest: Manifest, namespace: str) -> InvalidInput:
    name = manifest["metadata"]["annotations"].get(labels.NAME) or _workload(manifest)
    return InvalidInput(
        f"{name} was started as another Job, and Jobs cannot be changed",
        hint=f"`aimgpu down {name} --on kubernetes --namespace {namespace}` ends it; then apply it again.",
        page_hint="Remove it, then apply it again.",
    )


def _workload(item: Mapping[str, Any]) -> str | None:
    """The model or program that it belongs to."""
    found = labels.find_workload(item)
    return found[1] if found else None


def _label(item: Object, name: str) -> str | None:
    value = (item["metadata"].get("labels") or {}).get(name)
    return None if value is None else str(value)


def _attribute(device: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - an attribute has one of four types
    return next(iter(((device.get("attributes") or {}).get(name) or {}).values()), None)


def _explain(error: ClusterFailed, what: str, namespace: str) -> ClusterFailed:
    if error.status == _FORBIDDEN:
        hint = f"Ask for a role that may create, patch, list and delete it in namespace {namespace}."
        return ClusterFailed(f"{what}: {error.message}", hint=hint, status=error.status, reason=error.reason)
    return ClusterFailed(f"{what}: {error.message}", hint=error.hint, status=error.status, reason=error.reason)
