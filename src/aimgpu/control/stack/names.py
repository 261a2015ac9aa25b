"""The names that callers may use for a model: its own, its aliases, and none at all. No two models share one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from aimgpu.control.stack.yaml_nodes import YamlNode
from aimgpu.domain import Deployment

LATEST = ":latest"  # Ollama's clients add it to a name without a tag, so that it means nothing
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_MOST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Two models that a caller could not tell apart."""

    name: str  # of the later one
    text: str
    hint: str


def read_aliases(node: YamlNode | None, model: str) -> tuple[str, ...]:
    """Without Ollama's `:latest`, which every name takes."""
    found: list[str] = []
    for item in node.items() if node is not None else ():
        given = item.text("[gpt-4o-mini]")
        alias = read_name(item, given)
        if alias == model or alias in found:
            raise item.complaint(f"{given!r} is a name of {model!r} already", "Names are found with and without ':latest'.")
        found.append(alias)
    if node is not None and len(found) > _MOST:
        raise node.complaint(f"{len(found)} aliases", f"A model has at most {_MOST}.")
    return tuple(found)


def read_name(node: YamlNode, given: str) -> str:
    """Without Ollama's `:latest`."""
    name = given.removesuffix(LATEST)
    if not _NAME.fullmatch(name):
        raise node.complaint(f"{node.key!r}: {given[:70]!r} cannot be a name", "Use up to 128 letters, digits and . _ : / -.")
    return name


def find_clash(deployments: Iterable[Deployment]) -> Clash | None:
    """The first name that is given twice, or the second model that serves callers who name none."""
    owners: dict[str, Deployment] = {}
    default: Deployment | None = None
    for one in deployments:
        names = (one.name, *one.aliases, *(adapter.name for adapter in one.overrides.adapters))
        for position, name in enumerate(names):
            other = owners.setdefault(name, one)
            if other is not one or name in names[:position]:
                text = f"{name!r} is a name of both {other.name!r} and {one.name!r}"
                return Clash(name=one.name, text=text, hint="Rename the alias or the adapter.")
        if one.default and default is not None:
            text = f"both {default.name!r} and {one.name!r} have `default: true`"
            return Clash(name=one.name, text=text, hint="One model serves callers that name none.")
        default = one if one.default else default
    return None
