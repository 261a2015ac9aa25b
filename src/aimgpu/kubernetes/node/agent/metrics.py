"""Metrics of the node's GPUs and grants."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from aimgpu.domain import Grant, Instance
from aimgpu.isolation.region import TenantUse
from aimgpu.kubernetes.node.agent.survey import Survey
from aimgpu.kubernetes.node.device_plugin.pod_replicas import TENANT_PREFIX
from aimgpu.monitoring.exposition import Exposition, Row
from aimgpu.placement.fit import ungranted_bytes

ReadTenants = Callable[[str], Mapping[str, TenantUse]]
_PERCENT = 100


def survey_rows(node: str, survey: Survey, grants: Sequence[Grant]) -> Iterator[Row]:
    granted: dict[str, list[Grant]] = {}
    for grant in grants:
        granted.setdefault(grant.partition_id, []).append(grant)
    usages = {usage.device_id: usage for usage in survey.usages}
    for device in survey.devices:
        gpu = (node, device.id)
        kind = (device.product, device.vendor.value, str(device.simulated).lower())
        yield "aim_gpu_up", gpu, 0 if device.id in survey.unhealthy else 1
        yield "aim_gpu_total_memory_bytes", (*gpu, *kind), device.memory_bytes
        yield "aim_gpu_partition_count", gpu, len(device.layout.partitions)
        yield "aim_gpu_layout", (*gpu, device.layout.name), 1
        usage = usages.get(device.id)
        if usage is not None and usage.utilization_percent is not None:
            yield "aim_gpu_utilization_ratio", gpu, usage.utilization_percent / _PERCENT
        for partition in device.layout.partitions:
            where, mine = (*gpu, partition.id), granted.get(partition.id, [])
            held = sum(grant.memory_bytes for grant in mine)
            yield "aim_gpu_partition_memory_bytes", where, partition.memory_bytes
            yield "aim_gpu_partition_memory_allocated_bytes", where, held
            yield "aim_gpu_partition_memory_available_bytes", where, max(0, ungranted_bytes(partition, mine, 0))
            yield "aim_gpu_partition_utilization", where, held / partition.memory_bytes
            if usage is not None and partition.id in usage.used_bytes_by_partition:
                yield "aim_gpu_partition_memory_measured_bytes", where, usage.used_bytes_by_partition[partition.id]


def grant_rows(node: str, instances: Sequence[Instance], read_tenants: ReadTenants) -> Iterator[Row]:
    """`model`: what is served, or else the claim or resource; `instance_id`: the claim and its request, or the replica."""
    grants = [grant for one in instances for grant in one.grants]
    models = {one.id: one.model for one in instances}
    tenants = {partition: read_tenants(partition) for partition in {grant.partition_id for grant in grants}}
    for grant in grants:
        request = grant.instance_id.rpartition(".")[2]
        is_replica = grant.instance_id.startswith(TENANT_PREFIX)
        instance = grant.instance_id if is_replica else f"{grant.deployment}.{request}"
        where = (node, grant.device_id, grant.partition_id, models[grant.instance_id] or grant.deployment, instance)
        yield "aim_model_memory_bytes", where, grant.memory_bytes
        yield "aim_model_enforcement_level", (*where, grant.level.value, grant.mechanism or "none"), 1
        use = tenants[grant.partition_id].get(grant.instance_id)
        if use is not None:
            yield "aim_model_memory_used_bytes", where, use.used_bytes
            yield "aim_model_allocations_refused", where, use.denied
            yield "aim_model_gate_wait_seconds", where, use.waited_seconds
            yield "aim_model_gate_overruns", where, use.overruns


def render(rows: Sequence[Row]) -> bytes:
    exposition = Exposition()
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    for found in by_name.values():
        exposition.add(found)
    return exposition.render()
