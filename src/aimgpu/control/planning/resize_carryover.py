"""A share that was resized while its model ran is kept for as long as the model's entry in the stack file is. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from aimgpu.control.planning.plan import GONE
from aimgpu.domain import Deployment, Instance


def carry_over(
    deployments: Sequence[Deployment], wanted: Iterable[Deployment], running: Iterable[Instance]
) -> tuple[Deployment, ...]:
    """With the resized share of what runs and is wanted exactly so already. What changed, or does not run, is as written."""
    known = {deployment.name: deployment for deployment in wanted if deployment.resized_bytes is not None}
    live = {instance.deployment for instance in running if instance.state not in GONE}
    return tuple(_carried(item, known[item.name]) if item.name in known.keys() & live else item for item in deployments)


def _carried(new: Deployment, old: Deployment) -> Deployment:
    resized = replace(new, resized_bytes=old.resized_bytes)
    return resized if old.with_live_settings_of(new) == resized else new
