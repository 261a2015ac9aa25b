"""``python -m aimgpu.kubernetes.cluster.definitions``: the custom resource definitions of this build, before an upgrade to it.

Helm installs them once and never changes them again. Only an upgrade runs this: replicas of an earlier build, or a rollback,
would take fields away that objects have.
"""

import asyncio
import logging
import sys
from typing import Any

from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.program import run_program
from aimgpu.kubernetes.api.resources import DEFINITIONS
from aimgpu.kubernetes.vocabulary.custom_resources import custom_resource_definitions

log = logging.getLogger(__name__)


async def update_definitions(client: Client) -> None:
    """One that was deleted is made again. Raises what the server answers: the upgrade then stops before it begins."""
    for wanted in custom_resource_definitions():
        name = wanted["metadata"]["name"]
        after = await client.patch(DEFINITIONS, name, wanted, kind="apply", manager="aimgpu-operator")
        log.info("definition.applied", extra={"data": {"name": name, "generation": after["metadata"].get("generation")}})


def definition_rules() -> list[dict[str, Any]]:
    """What that needs: these definitions and no others. `create` cannot be limited to a name."""
    names = [one["metadata"]["name"] for one in custom_resource_definitions()]
    kind: dict[str, Any] = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"]}
    return [{**kind, "verbs": ["create"]}, {**kind, "resourceNames": names, "verbs": ["patch"]}]


if __name__ == "__main__":
    sys.exit(run_program(lambda client: asyncio.ensure_future(update_definitions(client))))
