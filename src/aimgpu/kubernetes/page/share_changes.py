"""Whether the share of a model that runs on a cluster can change. Pure.

It cannot: kube-scheduler charged it when it allocated the ResourceClaim of the pod, an allocation is immutable, and
kube-scheduler goes by nothing else when it places the next pod. A node that let a pod hold more would give the same bytes to
two; one that let it hold less would keep back what no other pod can be given. So a new share needs a new claim and a new pod.
"""

from typing import NoReturn

from aimgpu.control.observation import Observation
from aimgpu.errors import Conflict, InvalidInput, NotAllowed
from aimgpu.units import format_bytes


def refuse_resize(seen: Observation, name: str, memory_bytes: int) -> NoReturn:
    """Raises NotAllowed with what holds the share now; InvalidInput or Conflict where there is nothing to change."""
    if memory_bytes < 1:
        raise InvalidInput("a share of no memory", hint="Ask for more than 0 bytes.")
    held = [(one.id, grant) for one in seen.instances if one.deployment == name for grant in one.grants]
    if not held:
        raise Conflict(f"{name} has no share of a GPU now, so there is nothing to resize", hint="Edit it to give it another.")
    places = "; ".join(
        f"{pod} has {format_bytes(grant.memory_bytes, up=True)} of {grant.partition_id}" for pod, grant in held[:4]
    )
    more = f"; and {len(held) - 4} more" if len(held) > 4 else ""  # noqa: PLR2004 - as many as are named
    raise NotAllowed(
        f"the share of {name} cannot change while its pods run: {places}{more}. kube-scheduler charged it to the pod's"
        " ResourceClaim, and Kubernetes changes no claim that is allocated",
        hint="Edit the model instead: its pods are replaced one at a time, each with a new claim of the new size.",
    )
