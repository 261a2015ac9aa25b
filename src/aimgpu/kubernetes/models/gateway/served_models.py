"""Routes from the objects of a cluster. Pure: Deployments, EndpointSlices and GpuShares in, models with backends out."""

import datetime as dt
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aimgpu.control.stack.slo import read_objective
from aimgpu.control.stack.yaml_nodes import parse_yaml
from aimgpu.domain import Priority, ServiceObjective
from aimgpu.errors import AimGpuError, InvalidInput
from aimgpu.gateway.routes import Arrival, Backend, ModelCard, ServedModel
from aimgpu.kubernetes.api.client import Object
from aimgpu.kubernetes.api.foreign_objects import leaving_out, read_count
from aimgpu.kubernetes.models.serving.model_status import served_name
from aimgpu.kubernetes.vocabulary import model_labels as labels
from aimgpu.kubernetes.vocabulary.annotations import SLO_PREFIX
from aimgpu.units import parse_duration_ms

log = logging.getLogger(__name__)

# Requests at once of an engine whose Deployment names no number, by engine.
_USUAL_SLOTS = {"vllm": 64, "llamacpp": 1, "ollama": 1}
_CACHE_FIELDS = {"vllm": "cache_salt", "llamacpp": "cache_prompt"}
ANY_NAMESPACE = "*"
_RETRY_SECONDS = 10.0
_LONGEST_OBJECTIVE = 4096

ModelKey = tuple[str, str]  # namespace, and the label's value


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """Which of how many gateways this one is."""

    index: int = 0
    count: int = 1

    def of(self, slots: int, number: int) -> int:
        """Slots of the backend with this number that are ours. Neighbours start elsewhere, so that remainders spread."""
        base, rest = divmod(slots, self.count)
        return base + int((self.index + number) % self.count < rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """A Deployment that serves a model, as the gateway understands it."""

    key: ModelKey
    name: str
    object_name: str
    uid: str
    created: int
    replicas: int  # now
    wanted_replicas: int  # while it is awake
    keep_seconds: float | None
    engine: str | None
    model: str
    slots: int
    context_tokens: int | None
    priority: Priority
    objective: ServiceObjective | None
    takes_priority: bool
    problem: str | None  # why its pods cannot be made
    no_room: str | None = None  # why its pods are on no node

    @property
    def sleeps(self) -> bool:
        return self.replicas == 0 and self.keep_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDevice:
    """The GPU that a pod shares."""

    id: str
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Everything that routes are made from."""

    models: Sequence[ClusterModel] = ()
    slices: Sequence[Object] = ()
    devices: Mapping[tuple[str, str], PodDevice] = field(default_factory=dict)  # by namespace and pod
    share: ReplicaShare = field(default_factory=ReplicaShare)
    start_seconds: Mapping[ModelKey, float] = field(default_factory=dict)  # what a start took
    starting_since: Mapping[ModelKey, float] = field(default_factory=dict)  # by the steady clock
    problem_since: Mapping[ModelKey, float] = field(default_factory=dict)
    short_names: Sequence[str] = (
        ANY_NAMESPACE,
    )  # namespaces whose models are found without theirs, the first before the others
    rankers: frozenset[str] = frozenset()  # instances that rank documents
    engine_keys: Mapping[ModelKey, str] = field(default_factory=dict)  # absent: its engine asks for none
    now: float = 0.0  # by the steady clock; for what is tried again


def read_model(deployment: Object) -> ClusterModel:
    """Values that make no sense are logged and taken as absent: one wrong annotation must not take a model away."""
    metadata, spec = deployment["metadata"], deployment.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    pod_annotations = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    found = {**pod_annotations, **annotations}
    engine = found.get(labels.ENGINE)
    replicas = 1 if spec.get("replicas") is None else int(spec["replicas"])
    ours = labels.MANAGED.items() <= (metadata.get("labels") or {}).items()
    return ClusterModel(
        key=model_key(deployment),
        name=served_name(deployment),
        object_name=str(metadata["name"]),
        uid=str(metadata.get("uid") or ""),
        created=_seconds(metadata.get("creationTimestamp")),
        replicas=replicas,
        wanted_replicas=_count(found, labels.REPLICAS) or max(replicas, 1),
        keep_seconds=_keep(found),
        engine=engine,
        model=str(found.get(labels.MODEL) or served_name(deployment)),
        slots=_count(found, labels.CONCURRENCY) or _USUAL_SLOTS.get(str(engine), 1),
        context_tokens=_count(found, labels.CONTEXT),
        priority=_priority(found),
        objective=_objective(found),
        takes_priority=engine == "vllm" and ours,  # vLLM refuses the field unless it was started for it, as ours are
        problem=_problem(deployment),
    )


def model_key(item: Object) -> ModelKey:
    """Of a Deployment, an EndpointSlice or a Lease."""
    return str(item["metadata"]["namespace"]), str((item["metadata"].get("labels") or {}).get(labels.SERVED_MODEL))


def make_routes(state: ClusterState) -> list[tuple[ServedModel, ClusterModel]]:
    """Each with what it was made from.

    `namespace/name` always finds a model. A short name is given by the administrator's list of namespaces, in its order. Age
    decides nothing, so nobody can take a name over. "*" stands for all others, and gives a name that only one of them has.
    """
    by_key: dict[ModelKey, list[Object]] = {}
    for item in state.slices:
        by_key.setdefault(model_key(item), []).append(item)
    whole: dict[str, ClusterModel] = {}
    for model in sorted(state.models, key=lambda one: one.key):
        whole.setdefault(f"{model.key[0]}/{model.name}", model)
    short = _short_names(whole.values(), state.short_names)
    routes = []
    for name, model in whole.items():
        given = short.get(model.name) is model
        with leaving_out({"metadata": {"namespace": model.key[0], "name": model.object_name}}):
            served = _served(model.name if given else name, model, by_key.get(model.key, ()), state)
            routes.append((replace(served, aliases=(name,)) if given else served, model))
    return routes


def _short_names(models: Iterable[ClusterModel], namespaces: Sequence[str]) -> dict[str, ClusterModel]:
    having: dict[str, dict[str, ClusterModel]] = {}
    for model in models:
        having.setdefault(model.name, {})[model.key[0]] = model
    found = {}
    for name, places in having.items():
        listed = [place for place in namespaces if place in places]
        if not listed and ANY_NAMESPACE in namespaces and len(places) == 1:
            listed = list(places)
        if listed:
            found[name] = places[listed[0]]
    return found


def _served(name: str, model: ClusterModel, slices: Iterable[Object], state: ClusterState) -> ServedModel:
    backends = _backends(model, slices, state)
    stopped = model.replicas == 0
    return ServedModel(
        name=name,
        model=model.model,
        state="ready" if backends else "sleeping" if stopped else "loading",
        reason=None if backends else model.no_room or model.problem,
        simulated=any(state.devices[place].simulated for place in state.devices if _serves(backends, place)),
        backends=backends,
        created=model.created,
        priority=model.priority,
        objective=model.objective,
        card=ModelCard(
            engine=model.engine,
            context_tokens=model.context_tokens,
            ranks=any(backend.instance_id in state.rankers for backend in backends),
        ),
        arrival=None if backends or (stopped and not model.sleeps) else _arrival(model, state),
    )


def _serves(backends: Iterable[Backend], place: tuple[str, str]) -> bool:
    return any(backend.instance_id == "/".join(place) for backend in backends)


def _backends(model: ClusterModel, slices: Iterable[Object], state: ClusterState) -> tuple[Backend, ...]:
    found = sorted({endpoint for item in slices for endpoint in _endpoints(item)})
    shares = [state.share.of(model.slots, number) for number in range(len(found))]
    if found and not any(shares):
        shares[state.share.index % len(found)] = 1  # fewer slots than gateways: each may have one request under way
    return tuple(
        Backend(
            instance_id=f"{model.key[0]}/{pod}",
            url=url,
            api_key=state.engine_keys.get(model.key, ""),
            slots=slots,
            device_id=state.devices[place].id if (place := (model.key[0], pod)) in state.devices else None,
            takes_priority=model.takes_priority,
            cache_field=_CACHE_FIELDS.get(str(model.engine)),
        )
        for (pod, url), slots in zip(found, shares, strict=True)
        if slots
    )


def _endpoints(item: Object) -> Iterable[tuple[str, str]]:
    """Names and addresses of the pods that are ready."""
    ports = [each["port"] for each in item.get("ports") or () if each.get("port")]
    if not ports or item.get("addressType") not in ("IPv4", "IPv6"):
        return
    for endpoint in item.get("endpoints") or ():
        if (endpoint.get("conditions") or {}).get("ready") is False:
            continue
        address = endpoint["addresses"][0]
        pod = (endpoint.get("targetRef") or {}).get("name") or address
        yield str(pod), f"http://[{address}]:{ports[0]}" if ":" in address else f"http://{address}:{ports[0]}"


def _arrival(model: ClusterModel, state: ClusterState) -> Arrival:
    arrival_slots = max(1, math.ceil(model.slots * model.wanted_replicas / state.share.count))
    problem = model.no_room or model.problem
    return Arrival(
        slots=arrival_slots,
        seconds=state.start_seconds.get(model.key),
        since=state.starting_since.get(model.key),
        problem=problem,
        problem_since=state.problem_since.get(model.key, 0.0),
        retry_at=state.now + _RETRY_SECONDS if problem else None,
        no_room=model.no_room is not None,
    )


def _problem(deployment: Object) -> str | None:
    for each in (deployment.get("status") or {}).get("conditions") or ():
        failed = each.get("type") == "ReplicaFailure" and each.get("status") == "True"
        late = each.get("type") == "Progressing" and each.get("status") == "False"
        if failed or late:
            return str(each.get("message") or each.get("reason"))
    return None


def _keep(annotations: Mapping[str, str]) -> float | None:
    text = annotations.get(labels.KEEP)
    if text in (None, "always"):
        return None
    try:
        return parse_duration_ms(str(text)) / 1000
    except AimGpuError as error:
        _ignore(labels.KEEP, error)
        return None


def _priority(annotations: Mapping[str, str]) -> Priority:
    try:
        return Priority(annotations.get(labels.PRIORITY) or "medium")
    except ValueError as error:
        _ignore(labels.PRIORITY, error)
        return Priority.MEDIUM


def _objective(annotations: Mapping[str, str]) -> ServiceObjective | None:
    """As one annotation, or as one annotation for each promise."""
    single = {
        key.removeprefix(SLO_PREFIX).replace("-", "_"): value
        for key, value in annotations.items()
        if key.startswith(SLO_PREFIX)
    }
    text = annotations.get(labels.SLO) or (json.dumps(single) if single else None)
    if text is None:
        return None
    try:
        if len(text) > _LONGEST_OBJECTIVE:
            raise InvalidInput(f"it is longer than {_LONGEST_OBJECTIVE} characters")
        return read_objective(parse_yaml(text, labels.SLO))
    except AimGpuError as error:
        _ignore(labels.SLO, error)
        return None


def _count(annotations: Mapping[str, str], key: str) -> int | None:
    return read_count(annotations.get(key))


def _ignore(key: str, error: Exception) -> None:
    log.warning("model.annotation_ignored", extra={"data": {"annotation": key, "reason": str(error)}})


def _seconds(text: object) -> int:
    return int(dt.datetime.fromisoformat(str(text)).timestamp()) if text else 0


def devices_of(shares: Iterable[Object]) -> dict[tuple[str, str], PodDevice]:
    """Which GPU each pod shares, by GpuShares: requests of models on one GPU are weighed against each other."""
    found: dict[tuple[str, str], PodDevice] = {}
    for share in shares:
        with leaving_out(share):
            for replica in (share.get("status") or {}).get("replicas") or ():
                if replica.get("pod") and replica.get("gpu"):
                    device = PodDevice(
                        id=f"{replica.get('node', '')}/{replica['gpu']}", simulated=bool(replica.get("simulated"))
                    )
                    found[str(share["metadata"]["namespace"]), str(replica["pod"])] = device
    return found
