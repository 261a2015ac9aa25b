"""The container of a program, and how often its Job runs it. Pure."""

from collections.abc import Sequence
from typing import Any

from aimgpu.domain import Deployment, RestartPolicy, Sharing, UserProgram
from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.models.serving.engine_container import ServingImages, environment_of

_MOST_RETRIES = 6  # of a Job whose program fails; Kubernetes' own default


def program_container(
    deployment: Deployment, program: UserProgram, images: ServingImages, folder: str | None
) -> dict[str, Any]:
    """Raises InvalidInput for what a cluster cannot do. `folder`: where a program runs that names no directory."""
    name, image = deployment.name, deployment.overrides.image
    if image is None:
        raise InvalidInput(f"{name}: a program on a cluster needs an image", hint="For example: image: python:3.12")
    uncarried = {
        "directory": (program.directory not in (None, folder), "It runs in the working directory of its image."),
        "after": (program.after, "Let it wait itself for what it needs."),
        "preemptible": (deployment.keep_seconds is not None, "With priority: low it gets turns in the gaps of the others."),
        "sharing": (deployment.sharing is not Sharing.STRICT, ""),
    }
    for key, (given, instead) in uncarried.items():
        if given:
            raise InvalidInput(
                f"{name}: '{key}' of a program has no meaning on a cluster", hint=f"Remove it. {instead}".rstrip()
            )
    container: dict[str, Any] = {
        "name": "program",
        "image": image,
        "command": [_literal(word) for word in program.argv],
    }
    if environment := environment_of(deployment, {}):
        container["env"] = [{**one, "value": _literal(one["value"])} if "value" in one else one for one in environment]
    if images.pull_policy:
        container["imagePullPolicy"] = images.pull_policy
    return container


def job_fields(replicas: int, restart: RestartPolicy) -> tuple[dict[str, Any], str]:
    """Of the Job of a program that ends, and the restart policy of its pods."""
    again = restart is RestartPolicy.ON_FAILURE
    counts = {"parallelism": replicas, "completions": replicas}
    return {**counts, "backoffLimit": _MOST_RETRIES if again else 0}, "OnFailure" if again else "Never"


def refuse_unseen_neighbours(deployments: Sequence[Deployment]) -> None:
    """`with` and `not_with` select the pods of models."""
    programs = {one.name for one in deployments if one.overrides.program is not None}
    for one in deployments:
        if named := sorted(programs & {*one.ask.with_deployments, *one.ask.not_with_deployments}):
            raise InvalidInput(
                f"{one.name}: 'place' names {named[0]}, a program: on a cluster with and not_with are for models",
                hint="Remove it.",
            )


def _literal(text: str) -> str:
    """Kubernetes would replace $(NAME), and reads $$ as $."""
    return text.replace("$", "$$")
