"""The queue's settings: in the ledger for the next start, and in the gateway that runs."""

import asyncio

from aimgpu.domain import QueueSettings
from aimgpu.gateway.application import Gateway
from aimgpu.ledger import Ledger
from aimgpu.qos.queueing.policy import policy_for


class QueueSettingsStore:
    """Made in the gateway's loop; changed from any thread."""

    def __init__(self, ledger: Ledger, gateway: Gateway) -> None:
        self._ledger = ledger
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()

    def read(self) -> QueueSettings:
        """As the ledger has them."""
        return self._ledger.queue()

    def change(self, settings: QueueSettings) -> None:
        """Nothing that runs or waits is lost: what waits keeps the bound that it was given."""
        self._ledger.keep_queue(settings)
        self._loop.call_soon_threadsafe(self._gateway.slots.change_policy, policy_for(settings))
