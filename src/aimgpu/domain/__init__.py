"""The words of the system as frozen dataclasses and enums; no I/O.

A device has a layout, which gives partitions. An ask becomes a placement or a refusal; a placement becomes grants, the only
thing that is charged. A deployment is a model that should run, an instance is one running copy.
"""

from aimgpu.domain.ask import Ask, Auto, Fraction, IsolationRequirement, Memory, PartitionKind, Priority, Spread, Want, Whole
from aimgpu.domain.compute import GrantedCompute, granted_compute, granted_to
from aimgpu.domain.deployment import (
    PROGRAM,
    Adapter,
    Deployment,
    EngineOverrides,
    Instance,
    InstanceState,
    ProcessIdentity,
    RestartPolicy,
    RunEnd,
    SecretKind,
    SecretSource,
    ServerProgram,
    Sharing,
    SleepFootprint,
    UserProgram,
    WatchdogPolicy,
)
from aimgpu.domain.device import Device, Layout, Partition, Vendor
from aimgpu.domain.footprint import Exactness, Footprint, Growth, LargerService, Term
from aimgpu.domain.grant import LEAST_LEVEL, Grant, Level
from aimgpu.domain.objective import ServiceObjective
from aimgpu.domain.placement import Decision, DeviceReason, Placement, Refusal, Slot
from aimgpu.domain.queueing import ByClass, QueueSettings
from aimgpu.domain.slices import SliceProfile
from aimgpu.domain.usage import DeviceUsage, ForeignProcess

__all__ = [
    "LEAST_LEVEL",
    "PROGRAM",
    "Adapter",
    "Ask",
    "Auto",
    "ByClass",
    "Decision",
    "Deployment",
    "Device",
    "DeviceReason",
    "DeviceUsage",
    "EngineOverrides",
    "Exactness",
    "Footprint",
    "ForeignProcess",
    "Fraction",
    "Grant",
    "GrantedCompute",
    "Growth",
    "Instance",
    "InstanceState",
    "IsolationRequirement",
    "LargerService",
    "Layout",
    "Level",
    "Memory",
    "Partition",
    "PartitionKind",
    "Placement",
    "Priority",
    "ProcessIdentity",
    "QueueSettings",
    "Refusal",
    "RestartPolicy",
    "RunEnd",
    "SecretKind",
    "SecretSource",
    "ServerProgram",
    "ServiceObjective",
    "Sharing",
    "SleepFootprint",
    "SliceProfile",
    "Slot",
    "Spread",
    "Term",
    "UserProgram",
    "Vendor",
    "Want",
    "WatchdogPolicy",
    "Whole",
    "granted_compute",
    "granted_to",
]
