"""Reads a stack's state from a cluster: models and pods, logs, and what the gateways measured of the promises."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aimgpu.errors import ClusterFailed, InvalidInput, NotFoundInCluster, UnknownDeployment
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.resources import DEPLOYMENTS, PODS
from aimgpu.kubernetes.models.serving.applier import StackApplier
from aimgpu.kubernetes.models.serving.merged_scores import merge_scores
from aimgpu.kubernetes.models.serving.model_status import describe_models, served_name
from aimgpu.kubernetes.vocabulary.custom_resources import GPU_SHARES
from aimgpu.kubernetes.vocabulary.model_labels import PROGRAM, SERVED_MODEL, find_workload, label_value

GATEWAY_SELECTOR = "app.kubernetes.io/component=gateway,app.kubernetes.io/part-of=aim-gpu-sharing"
INTERNAL_PORT = 9401


async def find_installed_image(client: Client) -> str | None:
    """Of the chart's gateway: where this cluster gets the project's image from. None: no gateway, or not ours to see."""
    images = {str(one["image"]) for one in await _gateway_containers(client)}
    return images.pop() if len(images) == 1 else None


async def find_media_domains(client: Client) -> str:
    """The domains that the chart's gateway lets URLs in requests name, by comma; none where there is no one gateway."""
    variables = [{one["name"]: one.get("value") for one in each.get("env", ())} for each in await _gateway_containers(client)]
    return str(variables[0].get("AIMGPU_MEDIA_DOMAINS") or "") if len(variables) == 1 else ""


async def _gateway_containers(client: Client) -> list[Object]:
    try:
        gateways, _ = await client.list(DEPLOYMENTS, labels=GATEWAY_SELECTOR)
    except ClusterFailed:
        return []
    return [one["spec"]["template"]["spec"]["containers"][0] for one in gateways]


class ClusterView:
    """One namespace of models; gateways are looked for in all."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._applier = StackApplier(client, namespace)
        self.namespace = namespace

    async def read_status(self) -> dict[str, Any]:
        """As the daemon's status, as far as a cluster has it."""
        models = await self._applier.models()
        pods = [pod for label in (SERVED_MODEL, PROGRAM) for pod in await self._pods(label)]
        return {"namespace": self.namespace, "instances": describe_models(models, pods, await self._shares())}

    async def read_logs(self, model: str, *, lines: int, follow: bool) -> AsyncIterator[tuple[str, str]]:
        """Pod and line. Raises UnknownDeployment for a model that is not here, InvalidInput for one without a pod."""
        value = label_value(model)
        pods = [pod for label in (SERVED_MODEL, PROGRAM) for pod in await self._pods(f"{label}={value}")]
        pods = pods or list(await self._pod_named(model))
        if not pods:
            known = sorted(served_name(one) for one in await self._applier.models())
            if model in known:
                raise InvalidInput(f"{model} has no pod now", hint="It sleeps or waits; `aimgpu ps --on kubernetes` says why.")
            raise UnknownDeployment.of(model, known=known, where=f" in namespace {self.namespace}")
        if follow and len(pods) > 1:
            names = ", ".join(str(pod["metadata"]["name"]) for pod in pods)
            raise InvalidInput(f"{model} has {len(pods)} pods", hint=f"Follow one of them: {names}")
        for pod in pods:
            name = str(pod["metadata"]["name"])
            query = {"tailLines": str(lines), "follow": str(follow).lower(), "container": engine_container_of(pod)}
            found = False
            async for line in self._client.read_lines(PODS.path(self.namespace, name, "log"), query):
                found = True
                yield name, line
            if not found and not follow and _has_restarted(pod):  # it has printed nothing since
                async for line in self._client.read_lines(
                    PODS.path(self.namespace, name, "log"), {**query, "previous": "true"}
                ):
                    yield name, line

    async def gateways(self) -> list[Object]:
        """The pods that have an address, of all namespaces."""
        pods, _ = await self._client.list(PODS, labels=GATEWAY_SELECTOR)
        return [pod for pod in pods if (pod.get("status") or {}).get("podIP") and not pod["metadata"].get("deletionTimestamp")]

    async def read_scores(self, gateways: Sequence[Object] | None = None) -> Mapping[str, Any]:
        """What all gateways measured together. Raises ClusterFailed where none runs."""
        reports, problem = [], None
        for pod in await self.gateways() if gateways is None else gateways:
            path = PODS.path(pod["metadata"]["namespace"], f"{pod['metadata']['name']}:{INTERNAL_PORT}", "proxy/scores")
            try:
                reports.append(await self._client.request("GET", path))
            except ClusterFailed as error:  # one of several is just starting, or ending
                problem = error
        if not reports:
            why = f": {problem.message}" if problem else ""
            raise ClusterFailed(
                f"no gateway of AIM GPU Sharing answers in this cluster{why}",
                hint="Install the chart with gateway.enabled=true.",
            )
        return merge_scores(reports)

    async def read_activity(self, gateway: Object, after: int) -> Mapping[str, Any]:
        """The requests that this gateway finished after the one with this number."""
        place = gateway["metadata"]
        path = PODS.path(place["namespace"], f"{place['name']}:{INTERNAL_PORT}", "proxy/activity")
        return await self._client.request("GET", path, query={"after": str(after)})

    async def _pods(self, labels: str) -> list[Object]:
        return (await self._client.list(PODS, self.namespace, labels=labels))[0]

    async def _pod_named(self, name: str) -> Sequence[Object]:
        found = await self._client.find(PODS, name, self.namespace)
        return [found] if found is not None and find_workload(found) else []

    async def _shares(self) -> list[Object]:
        try:
            return (await self._client.list(GPU_SHARES, self.namespace))[0]
        except NotFoundInCluster:
            return []
        except ClusterFailed as error:
            if error.status == 403:  # noqa: PLR2004 - HTTP
                return []
            raise


def _has_restarted(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(each["name"] == engine_container_of(pod) and each.get("restartCount") for each in statuses)


def engine_container_of(pod: Object) -> str:
    """The name of the container that serves the model."""
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    return next((name for name in ("engine", "kserve-container") if name in names), names[0])
