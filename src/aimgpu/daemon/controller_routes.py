"""What the gateway may send to: a picture of the controller's instances, taken anew whenever one changes."""

import logging
import threading
import time
from collections.abc import Iterable

from aimgpu.control.controller import Controller
from aimgpu.control.runs.run_files import read_api_key
from aimgpu.daemon.model_cards import ModelCards
from aimgpu.domain import Deployment, Instance, InstanceState
from aimgpu.gateway.routes import Backend, ServedModel

log = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 1.0
_ORDER = (
    InstanceState.READY,
    InstanceState.LOADING,
    InstanceState.QUEUED,
    InstanceState.SLEEPING,
    InstanceState.DRAINING,
    InstanceState.FAILED,
)


class ControllerRoutes:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._models: dict[str, ServedModel] = {}
        self._cards = ModelCards(controller)
        self._created = int(time.time())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="directory", daemon=True)

    def start(self) -> None:
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._controller.changed:
            self._controller.changed.notify_all()
        self._thread.join()

    def find(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def list(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    def refresh(self) -> None:
        simulated = any(device.simulated for device in self._controller.devices())
        instances = self._controller.instances()
        self._models = {
            item.name: self._served(item, [i for i in instances if i.deployment == item.name], simulated=simulated)
            for item in self._controller.deployments()
        }

    def _follow(self) -> None:
        while not self._stopped.is_set():
            with self._controller.changed:
                self._controller.changed.wait(_LONGEST_WAIT_SECONDS)
            if not self._stopped.is_set():
                self._refresh_or_tell()

    def _refresh_or_tell(self) -> None:
        """What was known stays known while the books or the devices cannot be read; the next look comes in any case."""
        try:
            self.refresh()
        except Exception:
            log.exception("directory.failed")

    def _served(self, deployment: Deployment, instances: Iterable[Instance], *, simulated: bool) -> ServedModel:
        instances = list(instances)
        ready = [instance for instance in instances if instance.state is InstanceState.READY and instance.endpoint]
        backends = tuple(
            Backend(
                instance_id=i.id,
                url=i.endpoint or "",
                api_key=self._key(i),
                slots=i.concurrency or deployment.concurrency or 1,
                device_id=i.grants[0].device_id if i.grants else None,
                takes_priority=self._takes_priority(i),
            )
            for i in ready
        )
        states = [instance.state for instance in instances]
        state = next((state for state in _ORDER if state in states), InstanceState.QUEUED)
        reason = next((instance.reason for instance in instances if instance.reason), None)
        if not instances:
            reason = next((item.reason for item in self._controller.waiting() if item.deployment == deployment.name), None)
        return ServedModel(
            name=deployment.name,
            model=deployment.model,
            state=state.value,
            reason=reason,
            simulated=simulated,
            backends=backends,
            created=self._created,
            priority=deployment.ask.priority,
            objective=deployment.objective,
            card=self._cards.make(deployment, instances),
        )

    def _takes_priority(self, instance: Instance) -> bool:
        engine = self._controller.parts.engines.get(instance.engine)
        return engine is not None and engine.takes_priority

    def _key(self, instance: Instance) -> str:
        return read_api_key(self._controller.parts.runs, instance.id) or ""
