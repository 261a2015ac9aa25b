"""The ways in which a node's GPUs are given to pods: the DRA driver, seats for KAI-Scheduler, the device plugin."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aimgpu.domain import Vendor
from aimgpu.hardware.protocols import Hardware
from aimgpu.kubernetes.api.client import Client, Object
from aimgpu.kubernetes.node.agent.gpu_node import held_statuses, resource_statuses
from aimgpu.kubernetes.node.agent.labels import PluginSharing, plugin_sharing
from aimgpu.kubernetes.node.agent.node_objects import NodeObjects
from aimgpu.kubernetes.node.agent.options import Options
from aimgpu.kubernetes.node.agent.survey import Survey
from aimgpu.kubernetes.node.cdi import SpecFolder
from aimgpu.kubernetes.node.device_plugin.followed_config import FollowedConfig
from aimgpu.kubernetes.node.device_plugin.plugins import DevicePlugins
from aimgpu.kubernetes.node.device_plugin.resources import NodeResource, list_resources, mixed_layouts
from aimgpu.kubernetes.node.dra_driver.claim_status import write_refusal
from aimgpu.kubernetes.node.dra_driver.claims import DraClaim
from aimgpu.kubernetes.node.dra_driver.preparation import Preparation
from aimgpu.kubernetes.node.dra_driver.publisher import Publisher, require_claims
from aimgpu.kubernetes.node.dra_driver.resource_slices import SliceSettings, build_slices
from aimgpu.kubernetes.node.dra_driver.service import DraService
from aimgpu.kubernetes.node.grants import NodeGrants
from aimgpu.kubernetes.node.kai.claims import KaiClaims
from aimgpu.kubernetes.node.kai.seats import build_seat_slices
from aimgpu.kubernetes.vocabulary.names import CDI_REPLICA_KIND
from aimgpu.kubernetes.vocabulary.sharing_config import SharingConfig, read_config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferReport:
    """What the labels and the GpuNode say of an offer."""

    lacks: Sequence[str] = ()  # features of the server, with what is not done for want of them
    resources: Sequence[Mapping[str, Any]] = ()  # that the device plugin offers
    held: Sequence[Mapping[str, Any]] | None = None  # replicas, by pods; None: not known now
    unoffered: Sequence[str] = ()  # why some GPUs are not offered
    sharing: Mapping[Vendor, PluginSharing] = field(default_factory=dict)
    names: frozenset[str] = frozenset()  # extended resources that are offered

    def joined(self, other: "OfferReport") -> "OfferReport":
        """Of both."""
        return OfferReport(
            lacks=(*self.lacks, *other.lacks),
            resources=(*self.resources, *other.resources),
            held=self.held if other.held is None else other.held,
            unoffered=(*self.unoffered, *other.unoffered),
            sharing={**self.sharing, **other.sharing},
            names=self.names | other.names,
        )


Complete = Callable[[Object, DraClaim], Awaitable[DraClaim]]


async def as_it_is(_found: Object, claim: DraClaim) -> DraClaim:
    """A claim that says everything itself."""
    return claim


class GpuOffer(Protocol):
    """Called in this order, `publish` and `report` in every round; a round comes at once where `wake` was called.

    `alone`: nobody else may offer the same GPUs.
    """

    alone: bool

    async def start(self) -> Sequence["asyncio.Future[None]"]:
        """Read from the server what the offer depends on; returns what then runs for ever. Raises where it cannot be made."""

    async def serve(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Be there for the kubelet. `look`: one round, for what must be published before."""

    async def publish(self, survey: Survey) -> None:
        """Offer what was found, and nothing beside it."""

    def report(self, survey: Survey) -> OfferReport:
        """Of what was published."""

    async def renew(self) -> None:
        """Now and then: look again at what others may have changed on the server."""

    async def stop(self) -> None:
        """Be there for the kubelet no more; what pods have stays."""


class DraOffer:
    """ResourceSlices, and the driver that the kubelet asks to prepare claims."""

    alone = True

    def __init__(
        self, options: Options, client: Client, preparation: Preparation, publisher: Publisher, wake: Callable[[], None]
    ) -> None:
        self._options = options
        self._client = client
        self._preparation = preparation
        self._publisher = publisher
        self._single_device: bool | None = None  # as published
        self._service = DraService(
            client=client,
            preparation=preparation,
            node=options.node,
            kubelet=options.kubelet,
            complete=self.complete,
            refused=lambda claim, error, text: write_refusal(client, claim, options.node, error, text),
            changed=wake,
        )

    async def complete(self, found: Object, claim: DraClaim) -> DraClaim:
        """With what the claim does not say itself."""
        return await as_it_is(found, claim)

    async def start(self) -> Sequence["asyncio.Future[None]"]:
        await require_claims(self._client)
        self._publisher.features = replace(self._publisher.features, version=await self._client.version())
        if self._lacks():
            self._publisher.report()
        await self.renew()
        self._single_device = await self._publisher.single_device()
        return ()

    async def serve(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await look()
        await self._service.start()

    async def publish(self, survey: Survey) -> None:
        while not await self._publisher.publish(await self._slices(survey)):
            pass  # the server took not all: they are made again, without what it lacks
        health: dict[str, str | None] = {}
        for gpu in survey.candidates:
            for candidate in gpu.candidates:
                health |= dict.fromkeys((candidate.name, candidate.shared_name), survey.unhealthy.get(gpu.device.id))
        await self._service.report_health(health)

    def report(self, _survey: Survey) -> OfferReport:
        return OfferReport(lacks=self._lacks())

    async def renew(self) -> None:
        self._publisher.forget()
        await self._publisher.look_at_classes()

    async def stop(self) -> None:
        await self._service.stop()

    def _lacks(self) -> tuple[str, ...]:
        return self._publisher.features.missing()

    async def _slices(self, survey: Survey) -> list[dict[str, Any]]:
        self._single_device = await self._choose_form()
        settings = SliceSettings(
            node=self._options.node,
            default_share_ppm=self._options.default_share_ppm,
            single_device=self._single_device,
            features=self._publisher.features,
        )
        return build_slices(survey.candidates, survey.states, settings)

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


class KaiOffer(DraOffer):
    """Seats: KAI-Scheduler places pods, and their claims bring them to this node. It needs no feature of shares.

    The vendor's device plugin gives whole GPUs to KAI-Scheduler beside it.
    """

    alone = False

    def __init__(  # noqa: PLR0913 - what it is made of
        self,
        options: Options,
        client: Client,
        preparation: Preparation,
        publisher: Publisher,
        wake: Callable[[], None],
        *,
        hardware: Hardware,
        plugins: DevicePlugins,
    ) -> None:
        super().__init__(options, client, preparation, publisher, wake)
        self._hardware = hardware
        self._plugins = plugins

    async def complete(self, found: Object, claim: DraClaim) -> DraClaim:
        """Of a pod that KAI-Scheduler placed. What its reservation pod was charged by our own device plugin goes first."""
        await self._plugins.collect()
        return await KaiClaims(client=self._client, read_devices=self._hardware.read_devices).complete(found, claim)

    async def renew(self) -> None:
        self._publisher.forget()

    def _lacks(self) -> tuple[str, ...]:
        return ()

    async def _slices(self, survey: Survey) -> list[dict[str, Any]]:
        return build_seat_slices(survey.devices, self._options.node)


class PluginOffer:
    """Replicas and partitions as extended resources. Without a configuration it offers none, and gives back those of before."""

    alone = True

    def __init__(
        self, options: Options, client: Client, plugins: DevicePlugins, objects: NodeObjects, wake: Callable[[], None]
    ) -> None:
        self._plugins = plugins
        self._objects = objects
        self._wake = wake
        self._configured = options.device_plugin is not None  # else from the first configuration that can be used
        self._followed: FollowedConfig | None = None
        if options.device_plugin_config:
            self._followed = FollowedConfig(client, options.namespace, options.device_plugin_config)
        self._mixed: dict[str, str] = {}  # vendors that are left out

    async def start(self) -> Sequence["asyncio.Future[None]"]:
        if self._followed is None:
            return ()
        watching = asyncio.ensure_future(self._followed.watch(self._wake))
        try:
            await self._followed.listed()
            await self._choose_config()
        except BaseException:
            watching.cancel()
            raise
        return (watching,)

    async def serve(self, _look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The kubelet is registered with when something is offered."""

    async def publish(self, survey: Survey) -> None:
        await self._choose_config()
        if self._configured or self._followed is not None:
            self._find_mixed(survey)
            await self._plugins.update(self._resources(survey), survey.devices)
        await self._plugins.collect()

    def report(self, survey: Survey) -> OfferReport:
        held = self._plugins.held
        found = self._resources(survey)
        return OfferReport(
            resources=resource_statuses(found, survey.devices, self._plugins.config),
            held=None if held is None else held_statuses(held),
            unoffered=sorted(self._mixed.values()),
            sharing=plugin_sharing(found, self._plugins.config),
            names=frozenset(resource.name for resource in found),
        )

    async def renew(self) -> None:
        """Nothing of it is on the server."""

    async def stop(self) -> None:
        await self._plugins.stop()

    def _resources(self, survey: Survey) -> tuple[NodeResource, ...]:
        """That are offered."""
        if not self._configured:
            return ()
        numa = {name: state.numa_node for name, state in survey.states.items()}
        unusable = {*survey.unhealthy, *survey.withheld}
        return list_resources(survey.devices, self._plugins.config, unhealthy=unusable, numa=numa)

    async def _choose_config(self) -> None:
        if self._followed is None:
            return
        node = await self._objects.node()
        chosen = self._followed.choose(node["metadata"].get("labels") or {})
        self._configured = chosen is not None
        if chosen is not None:
            self._plugins.config = chosen

    def _find_mixed(self, survey: Survey) -> None:
        mixed = mixed_layouts(survey.devices, self._plugins.config.strategy)
        found = {vendor.value: reason for vendor, reason in mixed.items()}
        for vendor, reason in found.items():
            if self._mixed.get(vendor) != reason:
                log.warning("plugin.not_offered", extra={"data": {"vendor": vendor, "reason": reason}})
        self._mixed = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Those of a node, in the order in which they publish. `complete`: what a claim does not say itself."""

    made: tuple[GpuOffer, ...]
    complete: Complete

    @property
    def alone(self) -> bool:
        """Whether nobody else may offer the same GPUs."""
        return all(offer.alone for offer in self.made)

    def report(self, survey: Survey) -> OfferReport:
        """Of all of them."""
        found = OfferReport()
        for offer in self.made:
            found = found.joined(offer.report(survey))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferParts:
    """What offers are made of."""

    options: Options
    client: Client
    hardware: Hardware
    grants: NodeGrants
    preparation: Preparation
    publisher: Publisher
    objects: NodeObjects
    wake: Callable[[], None]


def make_offers(parts: OfferParts) -> Offers:
    """As the options say. The device plugin's is always there: replicas may be held from before, when there was one."""
    options, client = parts.options, parts.client
    plugins = DevicePlugins(
        kubelet=options.kubelet,
        config=SharingConfig() if options.device_plugin is None else read_config(options.device_plugin),
        grants=parts.grants,
        specs=SpecFolder(CDI_REPLICA_KIND, options.cdi),
        turn=parts.preparation.turn,
    )
    plugin = PluginOffer(options, client, plugins, parts.objects, parts.wake)
    if not options.dra:
        return Offers(made=(plugin,), complete=as_it_is)
    claims = (options, client, parts.preparation, parts.publisher, parts.wake)
    driver = KaiOffer(*claims, hardware=parts.hardware, plugins=plugins) if options.kai else DraOffer(*claims)
    return Offers(made=(driver, plugin), complete=driver.complete)
