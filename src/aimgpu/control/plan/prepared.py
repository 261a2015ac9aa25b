"""A deployment that is ready to be planned, and the identity of what it runs."""

import hashlib
import json
from dataclasses import dataclass, replace

from aimgpu.domain import Ask, Auto, Deployment, Footprint, Memory
from aimgpu.domain.codec import encode

_REVISION_DIGITS = 12
_PLAIN = Deployment(name="", model="", ask=Ask(name="", deployment="", want=Auto()))  # with the default of each setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A deployment whose model was found and sized, and whose engine was chosen."""

    deployment: Deployment
    engine: str
    footprint: Footprint
    can_sleep: bool = True  # False: its engine could elsewhere, and cannot here

    @property
    def name(self) -> str:
        """Of the deployment."""
        return self.deployment.name


def revision_of(deployment: Deployment) -> str:
    """Changes with everything that a running instance depends on.

    Not with what can change while it runs, nor with a build that knows more fields: its daemon adopts what runs.
    """
    plain = encode(replace(deployment.with_live_settings_of(_PLAIN), resized_bytes=None), defaults=False)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:_REVISION_DIGITS]


def ask_for(item: Prepared, replica: int) -> Ask:
    """The ask of one replica, sized."""
    deployment = item.deployment
    ask = deployment.present_ask
    if deployment.resized_bytes is not None:  # it may have been made smaller than what it takes to start
        ask = replace(ask, want=Memory(memory_bytes=max(deployment.resized_bytes, item.footprint.total_bytes)))
    return replace(
        ask,
        name=f"{deployment.name}-{replica}",
        deployment=deployment.name,
        footprint_bytes=item.footprint.total_bytes,
        least_bytes=item.footprint.least_bytes,
        divided=item.footprint.divided,
    )
