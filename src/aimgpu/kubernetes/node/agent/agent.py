"""The node agent: one loop that looks at the GPUs and reports to the cluster, beside the servers that the kubelet calls."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from aimgpu.errors import AimGpuError, Conflict, NotFoundInCluster, OtherLedgerSchema
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.metrics_server import MetricsServer
from aimgpu.kubernetes.api.resources import NODES, RESOURCE_CLAIMS
from aimgpu.kubernetes.node.agent.conflicts import Offers, RivalWatch, find_conflicts, find_rival_sockets
from aimgpu.kubernetes.node.agent.gpu_node import (
    NodeReport,
    WantedLayout,
    apply_wanted,
    gpu_statuses,
    held_statuses,
    resource_statuses,
    wanted_layouts,
    write_gpu_node,
)
from aimgpu.kubernetes.node.agent.labels import label_changes, node_labels, plugin_sharing
from aimgpu.kubernetes.node.agent.metrics import grant_rows, render, survey_rows
from aimgpu.kubernetes.node.agent.node_objects import NodeObjects
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.agent.survey import Survey, Surveyor
from aimgpu.kubernetes.node.agent.tenant_watchdog import TenantWatchdog
from aimgpu.kubernetes.node.agent.wiring import check_hardware, make_hardware, make_interposer, make_isolator
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.device_plugin.followed_config import FollowedConfig
from aimgpu.kubernetes.node.device_plugin.plugins import DevicePlugins
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, list_resources, mixed_layouts
from aimgpu.kubernetes.node.dra_driver.checkpoint import Checkpoint, ClaimRecord, ClaimState
from aimgpu.kubernetes.node.dra_driver.claim_status import ObservedNode, device_statuses, write_refusal, write_status
from aimgpu.kubernetes.node.dra_driver.claims import DraClaim, read_claim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.dra_driver.publisher import Publisher, require_claims
from aimgpu.kubernetes.node.dra_driver.resource_slices import SliceSettings, build_slices
from aimgpu.kubernetes.node.dra_driver.service import DraService
from aimgpu.kubernetes.node.grants import NodeGrants
from aimgpu.kubernetes.node.kai.claims import KaiClaims
from aimgpu.kubernetes.node.kai.seats import build_seat_slices
from aimgpu.kubernetes.node.layouts import NodeLayouts
from aimgpu.kubernetes.vocabulary.names import CDI_KIND, CDI_REPLICA_KIND, LABEL_PLAN
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig, read_config
from aimgpu.ledger import Ledger, Owner
from aimgpu.procfs import read_boot_id

log = logging.getLogger(__name__)

_STALE_SECONDS = 60.0  # a claim that is gone from the API may still be used by containers that are ending
_RIVAL_ROUNDS = 3  # between looks for other programs that offer the GPUs
_REPUBLISH_SECONDS = 300.0  # slices are compared with the API server's this often


class Agent:
    """Call `run`; it ends when it is cancelled. Raises LedgerOwned where another agent runs on this node."""

    def __init__(self, options: Options, client: Client) -> None:
        self._options = options
        self._client = client
        self._owner = Owner.acquire(options.state)
        self._ledger = _open_ledger(options)
        self.hardware = make_hardware(options)
        self._interposer = make_interposer(options)
        self._isolator = make_isolator(options, self._interposer)
        self._watchdog = TenantWatchdog(interposer=self._interposer, ledger=self._ledger)
        self._grants = NodeGrants(hardware=self.hardware, ledger=self._ledger, isolator=self._isolator, node=options.node)
        self._layouts = NodeLayouts(hardware=self.hardware, ledger=self._ledger, allowed=options.repartition)
        self._preparation = Preparation(
            hardware=self.hardware,
            grants=self._grants,
            layouts=self._layouts,
            checkpoint=Checkpoint(self._ledger),
            specs=SpecFolder(CDI_KIND, options.cdi),
            boot_id=read_boot_id(),
        )
        self._surveyor = Surveyor(hardware=self.hardware, isolator=self._isolator, layouts=self._layouts, sysfs=options.sysfs)
        self._plugins = self._make_plugins()
        # Without a plugin too: replicas may be held from before, when there was one.
        self._collector = self._plugins or self._device_plugins(SharingConfig())
        self._configured = options.device_plugin_config is None  # else from the first configuration that can be used
        self._followed: FollowedConfig | None = None
        if options.device_plugin_config:
            self._followed = FollowedConfig(client, options.namespace, options.device_plugin_config)
        self._metrics = MetricsServer(options.metrics_port, self._render_metrics)
        self._wake = asyncio.Event()
        self._publisher = Publisher(client=client, node=options.node)
        self._objects = NodeObjects(client, options.node, wake=self._wake.set, saw_slice=self._saw_slice)
        self._service = DraService(
            client=client,
            preparation=self._preparation,
            node=options.node,
            kubelet=options.kubelet,
            complete=self._complete_claim if options.kai else None,
            refused=lambda claim, error, text: write_refusal(client, claim, options.node, error, text),
            changed=self._wake.set,
        )
        self._single_device: bool | None = None  # as published
        self._gone_since: dict[str, float] = {}
        self._look_for_stale = 0.0
        self._told: dict[str, object] = {}  # statuses as last written
        self._mixed: dict[str, str] = {}  # vendors that the device plugin leaves out
        self._rivals = RivalWatch(kubelet=options.kubelet)
        self.rounds = 0
        self.survey: Survey | None = None

    async def run(self) -> None:
        check_hardware(self.hardware)
        if self._options.dra:
            await require_claims(self._client)
        node = await self._client.get(NODES, self._options.node)
        self._publisher.node_uid = node["metadata"]["uid"]
        if self._options.dra:
            await self._look_at_server()
        background = [asyncio.create_task(self._objects.run())]
        try:
            if self._followed is not None and self._plugins is not None:
                background.append(asyncio.create_task(self._followed.watch(self._wake.set)))
                await self._followed.listed()
                await self._choose_config(self._followed, self._plugins)
            await self._refuse_conflicts()
            await self._adopt_unrecorded()
            await asyncio.to_thread(self._preparation.recover)
            if self._options.metrics_port:
                await self._metrics.start()
            if self._options.dra:
                await self._refresh()
                await self._service.start()
            await self._loop(background)
        finally:
            for task in background:
                task.cancel()
            await self._metrics.stop()
            await self._service.stop()
            if self._plugins is not None:
                await self._plugins.stop()
            self._ledger.close()
            self._owner.release()

    async def _look_at_server(self) -> None:
        self._publisher.features = replace(self._publisher.features, version=await self._client.version())
        if self._lacks():
            self._publisher.report()
        await self._look_at_classes()
        self._single_device = await self._publisher.single_device()

    async def _look_at_classes(self) -> None:
        if self._options.dra and not self._options.kai:
            await self._publisher.look_at_classes()

    def _lacks(self) -> tuple[str, ...]:
        """Features of the server that shares need; KAI-Scheduler needs none of them."""
        return self._publisher.features.missing() if self._options.dra and not self._options.kai else ()

    def held(self) -> tuple[ClaimRecord, ...]:
        return self._preparation.prepared()

    async def _complete_claim(self, found: Object, claim: DraClaim) -> DraClaim:
        """Of a pod that KAI-Scheduler placed. What its reservation pod was charged by our own device plugin goes first."""
        if self._plugins is not None:
            await self._plugins.collect()
        return await KaiClaims(client=self._client, read_devices=self.hardware.read_devices).complete(found, claim)

    async def _adopt_unrecorded(self) -> None:
        """A ledger that was lost while pods run is rebuilt from their CDI files and claims.

        Raises Conflict where it cannot be: an empty ledger would let their files be deleted and their room be given away.
        """
        for uid, label in (await asyncio.to_thread(self._preparation.unrecorded)).items():
            namespace, _, name = label.partition("/")
            try:
                if not label:
                    raise Conflict(f"the CDI file of claim {uid} was written by another build and does not name the claim")
                found = await self._client.find(RESOURCE_CLAIMS, name, namespace)
                if found is None or found["metadata"]["uid"] != uid or not (found.get("status") or {}).get("reservedFor"):
                    continue  # no pod has it any more
                claim = read_claim(found, uid, self._options.node)
                if self._options.kai:
                    claim = await self._complete_claim(found, claim)
                await asyncio.to_thread(self._preparation.adopt, claim)
            except AimGpuError as error:
                raise Conflict(
                    f"the ledger in {self._options.state} does not know claim {label or uid}, which was prepared on this node, "
                    f"and cannot be rebuilt: {error.message}",
                    hint=f"Give the agent its former state folder back, or drain {self._options.node}: its pods keep running.",
                ) from error

    async def _refuse_conflicts(self) -> None:
        if self._options.kai:
            return  # the vendor's device plugin gives whole GPUs to KAI-Scheduler, and nothing is offered here
        own = {resource.name for resource in self._resources(Survey.of(self.hardware.read_devices()))}
        devices = self.hardware.read_devices()
        conflicts = find_conflicts(await self._offers(), devices, own)
        conflicts += find_rival_sockets(self._options.kubelet, devices) if own else []
        if conflicts:
            texts = "; ".join(rival.text for rival in conflicts)
            raise Conflict(
                f"the GPUs of {self._options.node} are offered by another program: {texts}",
                hint="Remove it from this node (by its node selector), or do not run this agent here.",
            )

    async def _loop(self, background: Sequence["asyncio.Task[None]"]) -> None:
        clock = asyncio.get_running_loop().time
        republish = clock() + _REPUBLISH_SECONDS
        while True:
            for task in background:
                if task.done():  # they run for ever: without one, what it follows would stay as it is
                    task.result()
            if clock() > republish:
                self._publisher.forget()
                republish = clock() + _REPUBLISH_SECONDS
                await self._look_at_classes()
            try:
                await self._refresh()
                await self._write_statuses()
                await self._collect_stale(clock())
            except AimGpuError as error:
                log.warning("agent.refresh_failed", extra={"data": {"reason": error.message}})
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: until Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(self._options.interval_seconds):
                    await self._wake.wait()
            self._wake.clear()

    async def _refresh(self) -> None:
        """The GpuNode last: a layout that it shows is published, so that kube-scheduler can know it."""
        gpu_node, failures = await self._apply_plan()
        survey = await asyncio.to_thread(self._look)
        await self._look_for_rivals(survey)
        survey = survey.withholding(self._rivals.vendors)
        self.survey = survey
        if self._options.dra:
            await self._publish(survey)
            await self._service.report_health(
                {
                    name: survey.unhealthy.get(gpu.device.id)
                    for gpu in survey.candidates
                    for candidate in gpu.candidates
                    for name in (candidate.name, candidate.shared_name)
                }
            )
        if self._plugins is not None:
            if self._followed is not None:
                await self._choose_config(self._followed, self._plugins)
            self._report_mixed_layouts(survey, self._plugins.config)
            await self._plugins.update(self._resources(survey), survey.devices)
        await self._collector.collect()
        if self._options.labels:
            await self._label(survey)
        if gpu_node is not None:
            await self._report(gpu_node, survey, failures)

    async def _look_for_rivals(self, survey: Survey) -> None:
        """One that comes later: its GPUs are given to no further pod; those that have a share keep it."""
        self.rounds += 1
        if self.rounds % _RIVAL_ROUNDS == 0 and not self._options.kai:
            own = {resource.name for resource in self._resources(survey)}
            self._rivals.look(await self._offers(), survey.devices, own)

    async def _offers(self) -> Offers:
        return Offers(node=await self._objects.node(), drivers=await self._objects.drivers())

    def _saw_slice(self, name: str, spec: Object | None) -> None:
        if self._publisher.saw(name, spec):
            self._wake.set()

    async def _apply_plan(self) -> tuple[Object | None, Mapping[str, str]]:
        """Do what a PartitionPlan wants of this node: the GpuNode as it was then, and what could not be done, by GPU."""
        gpu_node = await self._objects.gpu_node(self._publisher.node_uid)
        if gpu_node is None:
            return None, {}
        node = await self._objects.node()
        self._layouts.planned = LABEL_PLAN in (node["metadata"].get("labels") or {})
        return gpu_node, await asyncio.to_thread(self._apply_wanted, wanted_layouts(gpu_node))

    async def _report(self, gpu_node: Object, survey: Survey, failures: Mapping[str, str]) -> None:
        held = self._collector.held
        found = NodeReport(
            gpus=gpu_statuses(survey.devices, survey.unhealthy, self._ledger.grants()),
            failures=failures,
            lacks=self._lacks(),
            fixed=self.hardware.limits.reasons(),
            resources=self._resource_statuses(survey),
            held=None if held is None else held_statuses(held),
            rivals=[rival.text for rival in self._rivals.found],
            unoffered=sorted(self._mixed.values()),
        )
        self._objects.wrote(gpu_node, await write_gpu_node(self._client, gpu_node, found))

    def _resource_statuses(self, survey: Survey) -> list[dict[str, Any]]:
        if self._plugins is None:
            return []
        return resource_statuses(self._resources(survey), survey.devices, self._plugins.config)

    def _apply_wanted(self, wanted: Sequence[WantedLayout]) -> Mapping[str, str]:
        with self._preparation.turn:
            return apply_wanted(wanted, self.hardware, self._layouts)

    def _render_metrics(self) -> bytes | None:
        if self.survey is None:
            return None
        grants = self._ledger.grants()
        rows = [
            *survey_rows(self._options.node, self.survey, grants),
            *grant_rows(self._options.node, self._ledger.instances(), self._interposer.read_tenants),
        ]
        return render(rows)

    async def _choose_config(self, followed: FollowedConfig, plugins: DevicePlugins) -> None:
        node = await self._objects.node()
        chosen = followed.choose(node["metadata"].get("labels") or {})
        self._configured = chosen is not None
        if chosen is not None:
            plugins.config = chosen

    def _make_plugins(self) -> DevicePlugins | None:
        path = self._options.device_plugin
        if path is None and not self._options.device_plugin_config:
            return None
        return self._device_plugins(SharingConfig() if path is None else read_config(path))

    def _device_plugins(self, config: SharingConfig) -> DevicePlugins:
        return DevicePlugins(
            kubelet=self._options.kubelet,
            config=config,
            grants=self._grants,
            specs=SpecFolder(CDI_REPLICA_KIND, self._options.cdi),
            turn=self._preparation.turn,
        )

    def _resources(self, survey: Survey) -> tuple[NodeResource, ...]:
        if self._plugins is None or not self._configured:
            return ()
        numa = {name: state.numa_node for name, state in survey.states.items()}
        unusable = {*survey.unhealthy, *survey.withheld}
        return list_resources(survey.devices, self._plugins.config, unhealthy=unusable, numa=numa)

    def _report_mixed_layouts(self, survey: Survey, config: SharingConfig) -> None:
        mixed = {vendor.value: reason for vendor, reason in mixed_layouts(survey.devices, config.strategy).items()}
        for vendor, reason in mixed.items():
            if self._mixed.get(vendor) != reason:
                log.warning("plugin.not_offered", extra={"data": {"vendor": vendor, "reason": reason}})
        self._mixed = mixed

    def _look(self) -> Survey:
        with self._preparation.turn:
            records = self._preparation.prepared()
            pods = frozenset(pod for record in records for pod in record.pods)
            self._layouts.restore_idle()
            survey = self._surveyor.look(pods)
            if not all(device.simulated for device in survey.devices):
                self._watchdog.look(records, survey.usages)
            return survey

    async def _publish(self, survey: Survey) -> None:
        while True:
            self._single_device = await self._choose_form()
            settings = SliceSettings(
                node=self._options.node,
                default_share_ppm=self._options.default_share_ppm,
                single_device=self._single_device,
                features=self._publisher.features,
            )
            if self._options.kai:
                slices = build_seat_slices(survey.devices, self._options.node)
            else:
                slices = build_slices(survey.candidates, survey.states, settings)
            if await self._publisher.publish(slices):
                return

    async def _choose_form(self) -> bool:
        """Whether a GPU is one device. Not changed under claims: they do not count against devices of other names."""
        if self._options.single_device is not None:
            return self._options.single_device
        fitting, published = not self._publisher.features.counts_shares, self._single_device
        if published in (None, fitting):
            return fitting
        if await asyncio.to_thread(self._preparation.prepared):
            return bool(published)
        log.info("slices.form_changed", extra={"data": {"single_device": fitting}})
        return fitting

    async def _label(self, survey: Survey) -> None:
        node = await self._objects.node()
        sharing = plugin_sharing(self._resources(survey), self._plugins.config) if self._plugins else {}
        changes = label_changes(node["metadata"].get("labels") or {}, node_labels(survey.devices, sharing))
        if changes:
            body = {"metadata": {"labels": changes}}
            self._objects.wrote(node, await self._client.patch(NODES, self._options.node, body))

    async def _write_statuses(self) -> None:
        """Of claims that were prepared or whose GPU changed its health since."""
        if not self._publisher.features.device_status:
            return
        survey = self.survey
        unhealthy = survey.unhealthy if survey else {}
        known = await asyncio.to_thread(self._preparation.prepared)
        # One that is being prepared has no devices yet: an empty status would take back the reason of a refusal.
        records = [record for record in known if record.state is ClaimState.PREPARED]
        grants = await asyncio.to_thread(self._ledger.grants)
        node = ObservedNode(devices=survey.devices if survey else (), unhealthy=unhealthy, now=datetime.now(UTC))
        for record in records:
            held = [grant for grant in grants if grant.instance_id in record.tenants]
            facts = ([(grant.id, grant.level, unhealthy.get(grant.device_id)) for grant in held], record.devices)
            if facts != self._told.get(record.uid):
                if not await write_status(self._client, record, device_statuses(record, held, node)):
                    self._publisher.lacks_device_status()
                    return
                self._told[record.uid] = facts
        present = {record.uid for record in records}
        self._told = {uid: facts for uid, facts in self._told.items() if uid in present}

    async def _collect_stale(self, now: float) -> None:
        """Release claims that were deleted while the kubelet or this agent was down."""
        if now < self._look_for_stale:
            return
        self._look_for_stale = now + _STALE_SECONDS / 2
        for record in await asyncio.to_thread(self._preparation.prepared):
            if not await self._is_gone(record):
                self._gone_since.pop(record.uid, None)
            elif now - self._gone_since.setdefault(record.uid, now) >= _STALE_SECONDS:
                log.warning("claim.stale", extra={"data": {"claim": record.label, "uid": record.uid}})
                await asyncio.to_thread(self._preparation.unprepare, record.uid)
                self._gone_since.pop(record.uid, None)

    async def _is_gone(self, record: ClaimRecord) -> bool:
        try:
            found = await self._client.get(RESOURCE_CLAIMS, record.name, record.namespace)
        except NotFoundInCluster:
            return True
        return bool(found["metadata"]["uid"] != record.uid)


def _open_ledger(options: Options) -> Ledger:
    """Raises OtherLedgerSchema with what to do on a node. A corrupt one is set aside; what runs is adopted again."""
    path = options.state / "ledger.db"
    try:
        ledger = Ledger.open(path)
    except OtherLedgerSchema as error:
        hint = f"Run the build that wrote it, or rename {path} on {options.node}: the ledger is then rebuilt from what runs."
        raise OtherLedgerSchema(error.message, hint=hint) from error
    if ledger.set_aside is not None:
        log.warning("ledger.set_aside", extra={"data": {"file": str(ledger.set_aside)}})
    return ledger
