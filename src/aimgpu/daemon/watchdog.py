"""The daemon's watchdog: looks every few seconds at what the driver measures, and does what the deployment's policy says."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from aimgpu.control.controller import Controller
from aimgpu.daemon.supervisor import log_event
from aimgpu.domain import DeviceUsage, IsolationRequirement, WatchdogPolicy
from aimgpu.errors import AimGpuError
from aimgpu.hardware.protocols import Hardware, HelperProcesses
from aimgpu.isolation.boundaries import EngineFlags
from aimgpu.isolation.contexts import charge_contexts, read_counted
from aimgpu.isolation.interposer import Interposer
from aimgpu.isolation.watchdog import Judgement, Violation, Watchdog, Watched, watch_instance
from aimgpu.ledger import Ledger

log = logging.getLogger(__name__)

WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSources:
    """What the watchdog measures with, and where it records what it found."""

    interposer: Interposer
    hardware: Hardware
    ledger: Ledger
    helpers: HelperProcesses


async def watch(controller: Controller, sources: WatchSources, reconciled: asyncio.Event) -> None:
    """Ends at once where all devices are simulated: there is nothing to measure."""
    await reconciled.wait()
    if all(device.simulated for device in controller.devices()):
        return
    keeper = InstanceWatchdog(controller, sources)
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        try:
            await asyncio.to_thread(keeper.look)
        except (AimGpuError, OSError) as error:
            log.error("watchdog.failed", extra={"data": {"error": str(error)}})  # noqa: TRY400 - the reason is in it


def held_otherwise(mechanisms: Sequence[str]) -> bool:
    """Whether something stronger than the interposer gives the level."""
    return bool(mechanisms) and mechanisms[0] != Interposer.name


class InstanceWatchdog:
    """Connects the watchdog with the controller and the ledger."""

    def __init__(self, controller: Controller, sources: WatchSources) -> None:
        self._controller = controller
        self._interposer = sources.interposer
        self._sources = sources
        self._dog = Watchdog(self.read_usage, self.read_watched, self.act, sources.interposer.regions, sources.helpers.pids)

    def look(self) -> tuple[Judgement, ...]:
        verdicts = self._dog.look()
        for verdict in verdicts:
            if verdict.finding is Violation.UNHELD and verdict.instance_id is not None and verdict.level is not None:
                self._sources.ledger.lower_level(verdict.instance_id, verdict.level, EngineFlags.name)
        return verdicts

    def read_usage(self) -> tuple[DeviceUsage, ...]:
        """What the driver measures; processes that hold more beside their allocations than was charged are charged it."""
        held = {grant.partition_id: grant.device_id for one in self._controller.instances() for grant in one.grants}
        found = [(self._interposer.find_region(partition_id), device_id) for partition_id, device_id in held.items()]
        counted = [(region, device_id, read_counted(region)) for region, device_id in found if region is not None]
        usages = tuple(self._sources.hardware.read_usage())
        for region, device_id, before in counted:
            charge_contexts(region, before, [usage for usage in usages if usage.device_id == device_id])
        return usages

    def read_watched(self) -> Collection[Watched]:
        wanted = {deployment.name: deployment for deployment in self._controller.deployments()}
        regions = self._interposer.regions()
        found = []
        for instance in self._controller.instances():
            if instance.process is None:
                continue
            seen = watch_instance(instance.id, instance.process.pid, instance.grants, regions)
            # Also where its region is gone or broken: a process that is in none is not held.
            if any(Interposer.name in grant.mechanisms for grant in instance.grants):
                seen = replace(seen, interposed=True)
            # Where something stronger holds the memory, a missing library costs turns, not the level.
            if any(held_otherwise(grant.mechanisms) for grant in instance.grants):
                seen = replace(seen, interposed=False)
            deployment = wanted.get(instance.deployment)
            if deployment is not None:
                demanded = deployment.ask.isolation in (IsolationRequirement.ENFORCED, IsolationRequirement.HARDWARE)
                seen = replace(seen, demanded=demanded, policy=deployment.watchdog)
            found.append(seen)
        return found

    def act(self, instance_id: str, policy: WatchdogPolicy) -> None:
        self._controller.stop_instance(instance_id, restart=policy is WatchdogPolicy.RESTART, emit=log_event)
