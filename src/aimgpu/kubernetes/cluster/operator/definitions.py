"""Brings our custom resource definitions up to date: Helm installs them once and never changes them again."""

import asyncio
import logging

from aimgpu.errors import AimGpuError
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEFINITIONS
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions

log = logging.getLogger(__name__)

_SOON_SECONDS, _LATER_SECONDS = 10.0, 600.0
_MANAGER = "aimgpu-operator"


async def keep_definitions(client: Client) -> None:
    """For ever: soon again where something was in the way, such as a role that an upgrade is about to change."""
    while True:  # noqa: ASYNC110 - the API server is asked, nothing here can be awaited
        await asyncio.sleep(_LATER_SECONDS if await update_definitions(client) else _SOON_SECONDS)


async def update_definitions(client: Client) -> bool:
    """Applies those that are there and differ. One that cannot be changed is logged: the operator works with the old one."""
    whole = True
    for wanted in custom_resource_definitions():
        name = wanted["metadata"]["name"]
        try:
            before = await client.find(DEFINITIONS, name)
            if before is None:
                log.warning("definition.missing", extra={"data": {"name": name}})
                whole = False
                continue
            after = await client.patch(DEFINITIONS, name, wanted, kind="apply", manager=_MANAGER)
            if after["metadata"].get("generation") != before["metadata"].get("generation"):
                log.info("definition.updated", extra={"data": {"name": name}})
        except AimGpuError as error:
            log.warning("definition.not_updated", extra={"data": {"name": name, "reason": error.message}})
            whole = False
    return whole


def definition_rules() -> dict[str, object]:
    """What that needs: these definitions and no others."""
    names = [one["metadata"]["name"] for one in custom_resource_definitions()]
    return {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "resourceNames": names,
        "verbs": ["get", "patch"],
    }
