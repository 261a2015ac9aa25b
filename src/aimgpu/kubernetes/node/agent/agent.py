"""The node agent: one loop that looks at the GPUs and reports to the cluster, beside the servers that the kubelet calls."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from aimgpu.errors import AimGpuError, Conflict, OtherLedgerSchema
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.api.metrics_server import MetricsServer
from aimgpu.kubernetes.api.resources import NODES
from aimgpu.kubernetes.node.agent.claim_upkeep import ClaimUpkeep
from aimgpu.kubernetes.node.agent.conflicts import RivalWatch, SeenOffers, find_conflicts, find_rival_sockets
from aimgpu.kubernetes.node.agent.gpu_node import (
    NodeReport,
    WantedLayout,
    apply_wanted,
    gpu_statuses,
    wanted_layouts,
    write_gpu_node,
)
from aimgpu.kubernetes.node.agent.labels import label_changes, node_labels
from aimgpu.kubernetes.node.agent.metrics import grant_rows, render, survey_rows
from aimgpu.kubernetes.node.agent.node_objects import NodeObjects
from aimgpu.kubernetes.node.agent.offers import OfferParts, OfferReport, make_offers
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.agent.survey import Survey, Surveyor
from aimgpu.kubernetes.node.agent.tenant_watchdog import TenantWatchdog
from aimgpu.kubernetes.node.agent.wiring import check_hardware, make_hardware, make_interposer, make_isolator
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.dra_driver.checkpoint import Checkpoint, ClaimRecord
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.dra_driver.publisher import Publisher
from aimgpu.kubernetes.node.grants import NodeGrants
from aimgpu.kubernetes.node.layouts import NodeLayouts
from aimgpu.kubernetes.vocabulary.names import CDI_KIND, LABEL_PLAN
from aimgpu.ledger import Ledger, Owner
from aimgpu.procfs import read_boot_id

log = logging.getLogger(__name__)

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
        self._metrics = MetricsServer(options.metrics_port, self._render_metrics)
        self._wake = asyncio.Event()
        self._publisher = Publisher(client=client, node=options.node)
        self._objects = NodeObjects(client, options.node, wake=self._wake.set, saw_slice=self._saw_slice)
        self._offers = make_offers(
            OfferParts(
                options=options,
                client=client,
                hardware=self.hardware,
                grants=self._grants,
                preparation=self._preparation,
                publisher=self._publisher,
                objects=self._objects,
                wake=self._wake.set,
            )
        )
        self._claims = ClaimUpkeep(
            options=options,
            client=client,
            preparation=self._preparation,
            ledger=self._ledger,
            publisher=self._publisher,
            complete=self._offers.complete,
        )
        self._rivals = RivalWatch(kubelet=options.kubelet)
        self.rounds = 0
        self.survey: Survey | None = None

    async def run(self) -> None:
        check_hardware(self.hardware)
        node = await self._client.get(NODES, self._options.node)
        self._publisher.node_uid = node["metadata"]["uid"]
        background: list[asyncio.Future[None]] = []
        try:
            for offer in self._offers.made:
                background += await offer.start()
            background.append(asyncio.ensure_future(self._objects.run()))
            await self._refuse_conflicts()
            await self._claims.adopt_unrecorded()
            await asyncio.to_thread(self._preparation.recover)
            if self._options.metrics_port:
                await self._metrics.start()
            for offer in self._offers.made:
                await offer.serve(self._refresh)
            await self._loop(background)
        finally:
            for task in background:
                task.cancel()
            await self._metrics.stop()
            for offer in self._offers.made:
                await offer.stop()
            self._ledger.close()
            self._owner.release()

    def held(self) -> tuple[ClaimRecord, ...]:
        return self._preparation.prepared()

    async def _refuse_conflicts(self) -> None:
        if not self._offers.alone:
            return
        devices = self.hardware.read_devices()
        own = set(self._offers.report(Survey.of(devices)).names)
        conflicts = find_conflicts(await self._offered(), devices, own)
        conflicts += find_rival_sockets(self._options.kubelet, devices) if own else []
        if conflicts:
            texts = "; ".join(rival.text for rival in conflicts)
            raise Conflict(
                f"the GPUs of {self._options.node} are offered by another program: {texts}",
                hint="Remove it from this node (by its node selector), or do not run this agent here.",
            )

    async def _loop(self, background: Sequence["asyncio.Future[None]"]) -> None:
        clock, this = asyncio.get_running_loop().time, asyncio.current_task()
        republish = clock() + _REPUBLISH_SECONDS
        while True:
            for task in background:
                if task.done():  # they run for ever: without one, what it follows would stay as it is
                    task.result()
            if clock() > republish:
                republish = clock() + _REPUBLISH_SECONDS
                for offer in self._offers.made:
                    await offer.renew()
            try:
                await self._refresh()
                await self._claims.write_statuses(self.survey)
                await self._claims.release_stale(clock())
            except AimGpuError as error:
                log.warning("agent.refresh_failed", extra={"data": {"reason": error.message}})
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: until Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(self._options.interval_seconds):
                    await self._wake.wait()
            self._wake.clear()
            if this is not None and this.cancelling():
                # gRPC reports its own error for a call that fails at the moment in which it is cancelled.
                raise asyncio.CancelledError

    async def _refresh(self) -> None:
        """The GpuNode last: a layout that it shows is published, so that kube-scheduler can know it."""
        gpu_node, failures = await self._apply_plan()
        survey = await asyncio.to_thread(self._look)
        await self._look_for_rivals(survey)
        survey = survey.withholding(self._rivals.vendors)
        self.survey = survey
        for offer in self._offers.made:
            await offer.publish(survey)
        reported = self._offers.report(survey)
        if self._options.labels:
            await self._label(survey, reported)
        if gpu_node is not None:
            await self._report(gpu_node, survey, failures, reported)

    async def _look_for_rivals(self, survey: Survey) -> None:
        """One that comes later: its GPUs are given to no further pod; those that have a share keep it."""
        self.rounds += 1
        if self.rounds % _RIVAL_ROUNDS == 0 and self._offers.alone:
            own = set(self._offers.report(survey).names)
            self._rivals.look(await self._offered(), survey.devices, own)

    async def _offered(self) -> SeenOffers:
        return SeenOffers(node=await self._objects.node(), drivers=await self._objects.drivers())

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

    async def _report(self, gpu_node: Object, survey: Survey, failures: Mapping[str, str], reported: OfferReport) -> None:
        found = NodeReport(
            gpus=gpu_statuses(survey.devices, survey.unhealthy, self._ledger.grants()),
            failures=failures,
            lacks=reported.lacks,
            fixed=self.hardware.limits.reasons(),
            resources=reported.resources,
            held=reported.held,
            rivals=[rival.text for rival in self._rivals.found],
            unoffered=reported.unoffered,
        )
        self._objects.wrote(gpu_node, await write_gpu_node(self._client, gpu_node, found))

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

    def _look(self) -> Survey:
        with self._preparation.turn:
            records = self._preparation.prepared()
            pods = frozenset(pod for record in records for pod in record.pods)
            self._layouts.restore_idle()
            survey = self._surveyor.look(pods)
            if not all(device.simulated for device in survey.devices):
                self._watchdog.look(records, survey.usages)
            return survey

    async def _label(self, survey: Survey, reported: OfferReport) -> None:
        node = await self._objects.node()
        changes = label_changes(node["metadata"].get("labels") or {}, node_labels(survey.devices, reported.sharing))
        if changes:
            body = {"metadata": {"labels": changes}}
            self._objects.wrote(node, await self._client.patch(NODES, self._options.node, body))


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
