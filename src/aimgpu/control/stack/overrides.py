"""What a stack file passes to the engine: `args`, `env` and `image`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Deployment, EngineOverrides, SecretKind, SecretSource
from aimgpu.errors import InvalidInput

MASKED = "***"  # shown for the value of a variable; sent back, it stands for the value that is deployed
OVERRIDE_KEYS = ("args", "env", "image")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,100}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._/:@-]{0,300}", re.ASCII)
_SOURCES = {"from_file": SecretKind.FILE, "from_variable": SecretKind.VARIABLE}
_MOST = 100


def read_overrides(fields: dict[str, YamlNode], base_directory: Path | None) -> EngineOverrides:
    """Paths of secret files count from `base_directory`, the folder of the stack file."""
    environment, secrets = _read_environment(fields.get("env"), base_directory)
    return EngineOverrides(
        arguments=read_arguments(fields.get("args")),
        environment=environment,
        secrets=secrets,
        image=_read_image(fields.get("image")),
    )


def unmask(deployments: Iterable[Deployment], known: Iterable[Deployment]) -> list[Deployment]:
    """With the values of the deployments that these replace where a stack was read from us. Raises InvalidInput."""
    values = {one.name: dict(one.overrides.environment) for one in known}
    return [_unmask(one, values.get(one.name, {})) for one in deployments]


def _unmask(one: Deployment, values: dict[str, str]) -> Deployment:
    given = one.overrides.environment
    if all(value != MASKED for _, value in given):
        return one
    for name, value in given:
        if value == MASKED and name not in values:
            raise InvalidInput(f"{one.name}: the value of {name} is masked", hint=f"Write the value of {name} in `env`.")
    environment = tuple((name, values[name] if value == MASKED else value) for name, value in given)
    return replace(one, overrides=replace(one.overrides, environment=environment))


def read_arguments(node: YamlNode | None) -> tuple[tuple[str, ...], ...]:
    """In the order of the file. `true` makes a flag stand alone, `false` leaves it out, a list gives several values."""
    found: list[tuple[str, ...]] = []
    for name, value in _entries(node, "a mapping such as {enable-prefix-caching: true}").items():
        flag = name.lstrip("-").replace("_", "-")
        if not _FLAG.fullmatch(flag):
            raise value.complaint(f"{name[:60]!r} cannot be a flag", "For example: args: {enable-prefix-caching: true}")
        if any(flag == known for known, *_ in found):
            raise value.complaint(
                f"{name[:60]!r} is here twice: the flag is --{flag}", "Keep one of them; a list gives several values."
            )
        values = tuple(item.text("true") for item in value.items())
        if values != ("false",):
            found.append((flag, *(() if values == ("true",) else values)))
    return tuple(found)


def _read_environment(
    node: YamlNode | None, base_directory: Path | None
) -> tuple[tuple[tuple[str, str], ...], tuple[SecretSource, ...]]:
    plain: list[tuple[str, str]] = []
    secrets: list[SecretSource] = []
    for name, value in _entries(node, "a mapping such as {VLLM_LOGGING_LEVEL: DEBUG}").items():
        if not _VARIABLE.fullmatch(name):
            raise value.complaint(f"{name[:60]!r} cannot be a variable", "For example: env: {VLLM_LOGGING_LEVEL: DEBUG}")
        if value.is_mapping:
            secrets.append(_read_secret(name, value, base_directory))
        else:
            plain.append((name, value.text("DEBUG")))
    return tuple(plain), tuple(secrets)


def _read_secret(name: str, node: YamlNode, base_directory: Path | None) -> SecretSource:
    fields = node.fields(tuple(_SOURCES))
    if len(fields) != 1:
        raise node.complaint(
            f"{name!r} must say where its value is",
            f"For example: {name}: {{from_file: ./token}}, or {{from_variable: {name}}}",
        )
    key, value = next(iter(fields.items()))
    source = value.text("./token")
    if _SOURCES[key] is SecretKind.FILE:
        source = str(((base_directory or Path.cwd()) / Path(source).expanduser()).absolute())
    elif not _VARIABLE.fullmatch(source):
        raise value.complaint(f"{source[:60]!r} cannot be a variable", f"For example: {name}: {{from_variable: {name}}}")
    return SecretSource(name=name, kind=_SOURCES[key], source=source)


def _read_image(node: YamlNode | None) -> str | None:
    if node is None:
        return None
    image = node.text("vllm/vllm-openai:v0.26.0")
    if not _IMAGE.fullmatch(image) or not node.is_text:
        raise node.complaint(f"{image[:60]!r} cannot be an image", "For example: image: vllm/vllm-openai:v0.26.0")
    return image


def _entries(node: YamlNode | None, expected: str) -> dict[str, YamlNode]:
    entries = node.entries(expected) if node is not None else {}
    if node is not None and len(entries) > _MOST:
        raise node.complaint(f"{node.key!r} has {len(entries)} entries", f"At most {_MOST} are read.")
    return entries
