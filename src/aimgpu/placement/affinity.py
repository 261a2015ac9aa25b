"""The order of a batch: by name, but an ask comes after the deployments that it must run with."""

from collections.abc import Iterable, Sequence

from aimgpu.domain import Ask


def affinity_first(asks: Sequence[Ask]) -> list[Ask]:
    """The same asks in the same order, but that an ask that wants to be with others of the batch comes after one of each."""
    if not any(ask.with_deployments for ask in asks):
        return list(asks)
    names = {ask.deployment or ask.name for ask in asks}
    waiting, ordered, there = list(asks), list[Ask](), set[str]()
    while waiting:
        ready = next((ask for ask in waiting if not _missing(ask, names) - there), waiting[0])  # a circle is broken anywhere
        waiting.remove(ready)
        ordered.append(ready)
        there.add(ready.deployment or ready.name)
    return ordered


def by_name(ask: Ask) -> tuple[str, int, str]:
    """Sorts asks by deployment, and the replicas of one by number: chat-3 before chat-20."""
    return ask.deployment or ask.name, len(ask.name), ask.name


def anti_affinity(running: Iterable[Ask]) -> dict[str, frozenset[str]]:
    """By deployment, those that do not want to be on one device with it."""
    found: dict[str, frozenset[str]] = {}
    for ask in [ask for ask in running if ask.not_with_deployments]:
        for name in ask.not_with_deployments:
            found[name] = found.get(name, frozenset()) | {ask.deployment or ask.name}
    return found


def _missing(ask: Ask, names: set[str]) -> frozenset[str]:
    return (ask.with_deployments & names) - {ask.deployment or ask.name}
