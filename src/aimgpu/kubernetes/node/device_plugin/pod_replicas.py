"""Which pods hold which replicas, by the kubelet's list of running pods: no call of the device plugin API names a pod."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from aimgpu.domain import Grant, Instance, InstanceState
from aimgpu.kubernetes.node.kubelet_api import pod_resources_v1_pb2 as pb

TENANT_PREFIX = "replica."  # of tenants, before the first replica that they were given
_MOST_ANSWER_BYTES = 16 << 20
_LIST_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUser:
    """A container that has devices of one extended resource; or a pod that has none of any, as resource ""."""

    namespace: str
    pod: str
    resource: str
    devices: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReplica:
    namespace: str
    pod: str
    resource: str
    grant: Grant


async def read_users(kubelet: Path) -> tuple[ReplicaUser, ...] | None:
    """Of any plugin's devices. None: the kubelet did not answer."""
    options = [("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", _MOST_ANSWER_BYTES)]
    async with grpc.aio.insecure_channel(f"unix://{kubelet / 'pod-resources' / 'kubelet.sock'}", options=options) as channel:
        ask = channel.unary_unary(
            "/v1.PodResourcesLister/List",
            request_serializer=pb.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pb.ListPodResourcesResponse.FromString,
        )
        try:
            answer = await ask(pb.ListPodResourcesRequest(), timeout=_LIST_SECONDS)
        except grpc.aio.AioRpcError:
            return None
    return tuple(
        ReplicaUser(namespace=pod.namespace, pod=pod.name, resource=resource, devices=frozenset(devices))
        for pod in answer.pod_resources
        for resource, devices in [each for container in pod.containers for each in _by_resource(container.devices).items()]
        or [("", set[str]())]
    )


def match_grants(
    users: Sequence[ReplicaUser], instances: Iterable[Instance], before: Sequence[HeldReplica] = ()
) -> tuple[HeldReplica, ...]:
    """What each of these pods has been given, in a fixed order: the kubelet lists them in any. Pure.

    A replica whose resource was renamed can be given to another pod while the former still runs: it counts for the pod that
    got it under the name of the grant. A kubelet that has just started lists few pods, or forgot what they have: one that is
    not listed with it keeps what it had `before` until that is given back or listed for another.
    """
    tenants = {instance.id: instance for instance in instances if instance.state is InstanceState.READY}
    found = []
    for user in users:
        for tenant in (tenants.get(f"{TENANT_PREFIX}{device}") for device in user.devices):
            if tenant is not None and tenant.deployment == user.resource:
                found += [
                    HeldReplica(namespace=user.namespace, pod=user.pod, resource=user.resource, grant=grant)
                    for grant in tenant.grants
                ]
    listed = {(user.namespace, user.pod, user.resource) for user in users}
    matched = {one.grant.id for one in found}
    left = {grant.id: grant for tenant in tenants.values() for grant in tenant.grants if grant.id not in matched}
    missing = (one for one in before if (one.namespace, one.pod, one.resource) not in listed)
    found += [replace(one, grant=left[one.grant.id]) for one in missing if one.grant.id in left]
    return tuple(sorted(found, key=lambda one: (one.namespace, one.pod, one.resource, one.grant.partition_id, one.grant.id)))


def _by_resource(devices: Sequence[pb.ContainerDevices]) -> dict[str, set[str]]:
    """The kubelet lists the devices of one resource one by one."""
    found: dict[str, set[str]] = {}
    for each in devices:
        found.setdefault(each.resource_name, set()).update(each.device_ids)
    return found
