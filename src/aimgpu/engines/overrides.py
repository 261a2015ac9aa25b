"""What users pass to an engine themselves: checked against what we set, joined to its command."""

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, runtime_checkable

from aimgpu.domain import Deployment, EngineOverrides, Footprint, SecretKind, SecretSource
from aimgpu.engines.protocols import Command, ServerEngine
from aimgpu.errors import InvalidInput
from aimgpu.files import read_bounded

_LARGEST_SECRET = 64 * 1024


@runtime_checkable
class TakesFlags(Protocol):
    """An engine whose command line users may add to."""

    flag_keys: Mapping[str, str]  # flags that follow from the stack file -> the key there that sets them

    def own_flags(self, footprint: Footprint) -> Mapping[str, str]:
        """Flags that it is started with in any case, without dashes; "..." where the value is known only at its start."""

    def known_flags(self) -> frozenset[str] | None:
        """All flags that the installed program takes; None: it cannot list them."""


def check_overrides(deployment: Deployment, engine: object, footprint: Footprint, *, installed: bool) -> None:
    """Raises InvalidInput for a flag that we set ourselves or that the engine does not take, before anything is started.

    `installed`: the program of this machine will run, so that its list of flags counts; else an image brings its own.
    """
    overrides = deployment.overrides
    if overrides.image is not None and installed:
        raise InvalidInput(
            f"{deployment.name}: 'image' is for containers, and the launcher is {deployment.launcher}",
            hint="Add `launcher: docker`, or remove the image.",
        )
    if isinstance(engine, ServerEngine):
        engine.check(deployment, installed=installed)
    for secret in overrides.secrets:
        read_secret(secret)
    if not overrides.arguments:
        return
    if not isinstance(engine, TakesFlags):
        name = getattr(engine, "name", "this engine")
        raise InvalidInput(f"{deployment.name}: {name} takes no flags", hint="Pass settings with `env:` instead of `args:`.")
    _check_conflicts(deployment, engine, footprint)
    known = engine.known_flags() if installed else None
    if known is not None:
        _check_known(deployment, getattr(engine, "name", "the engine"), known)


def with_overrides(command: Command, overrides: EngineOverrides) -> Command:
    """The command with the user's flags last. Raises InvalidInput for a variable that we set ourselves."""
    own = {**command.environment, **command.secrets}
    plain = dict(overrides.environment)
    secrets = {secret.name: read_secret(secret) for secret in overrides.secrets}
    for name in (*plain, *secrets):
        if name in own:
            shown = f" to {own[name]!r}" if name in command.environment and name in plain else ""
            raise InvalidInput(f"env has {name}, and aimgpu sets {name}{shown} itself", hint=f"Remove {name} from `env`.")
    added = [part for flag, *values in overrides.arguments for part in (f"--{flag}", *values)]
    return replace(
        command,
        argv=(*command.argv, *added),
        environment={**command.environment, **plain},
        secrets={**command.secrets, **secrets},
        image=overrides.image if overrides.image and command.image else command.image,
    )


def _check_conflicts(deployment: Deployment, engine: TakesFlags, footprint: Footprint) -> None:
    own = engine.own_flags(footprint)
    for flag, *values in deployment.overrides.arguments:
        positive = flag.removeprefix("no-")
        if positive not in own or " ".join(values) == own[positive]:
            continue
        given = " ".join([f"--{flag}", *values])
        ours = f"--{positive} {own[positive]}".strip()
        key = engine.flag_keys.get(positive)
        hint = f"Use the key `{key}` of the model." if key else f"Remove {flag!r} from `args`."
        raise InvalidInput(f"{deployment.name}: args has {given}, and aimgpu sets {ours} itself", hint=hint)


def _check_known(deployment: Deployment, engine: str, known: frozenset[str]) -> None:
    for flag, *_ in deployment.overrides.arguments:
        if flag.split(".", maxsplit=1)[0] in known or flag.removeprefix("no-") in known:
            continue
        near = get_close_matches(flag, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Remove {flag!r} from `args`."
        raise InvalidInput(f"{deployment.name}: {engine} does not take the flag --{flag}", hint=hint)


def read_secret(secret: SecretSource) -> str:
    """The value, which no message ever shows."""
    if secret.kind is SecretKind.VARIABLE:
        value = os.environ.get(secret.source)
        if value is None:
            raise InvalidInput(
                f"env {secret.name}: the daemon has no variable {secret.source}",
                hint=f"Export {secret.source} before `aimgpu up` starts the daemon, or use from_file.",
            )
        return value
    try:
        text = read_bounded(Path(secret.source), _LARGEST_SECRET).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"env {secret.name}: cannot read {secret.source}: {why}", hint="Check the path.") from None
    if not text or "\0" in text:
        raise InvalidInput(f"env {secret.name}: {secret.source} holds no secret", hint="One line of text is expected.")
    return text
