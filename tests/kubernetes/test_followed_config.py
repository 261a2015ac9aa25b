"""The device plugin's configuration, chosen by labels of the node from a ConfigMap that changes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from aimgpu.kubernetes.api.client import Client, WatchEvent
from aimgpu.kubernetes.cluster.timeslicing.sharing_manifest import SharingSettings, plugin_config
from aimgpu.kubernetes.node.device_plugin.followed_config import FollowedConfig


def shared(replicas: int) -> str:
    return plugin_config(SharingSettings(resource="nvidia.com/gpu", replicas=replicas))


class RecordedClient:
    """Plays events back, as the API server would send them."""

    def __init__(self, *events: WatchEvent) -> None:
        self._events = events

    async def watch(self, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
        for event in self._events:
            yield event


def follow(*states: dict[str, str] | None) -> FollowedConfig:
    """After a ConfigMap has had these contents, one after the other; None: it was deleted."""
    metadata = {"namespace": "ns", "name": "time-slicing-config"}
    synced = WatchEvent(type="SYNCED", object={})
    events = [
        WatchEvent(type="MODIFIED" if state is not None else "DELETED", object={"metadata": metadata, "data": state})
        for state in states
    ]
    client = cast("Any", RecordedClient(synced, *events))
    followed = FollowedConfig(cast("Client", client), "ns", "time-slicing-config")
    asyncio.run(followed.watch(lambda: None))
    return followed


def replicas(followed: FollowedConfig, **labels: str) -> int | None:
    keys = {"ours": "aim.amd.com/device-plugin.config", "nvidias": "nvidia.com/device-plugin.config"}
    config = followed.choose({keys[name]: value for name, value in labels.items()})
    return config.replicated[0].replicas if config else None


def test_our_label_wins_over_nvidias_and_the_default_key_is_for_nodes_without_one() -> None:
    data = {"two": shared(2), "four": shared(4), "default": shared(8)}
    assert replicas(follow(data), ours="two", nvidias="four") == 2
    assert replicas(follow(data), nvidias="four") == 4
    assert replicas(follow(data)) == 8


def test_what_cannot_be_used_leaves_the_former_configuration_in_force() -> None:
    followed = follow({"two": shared(2), "bad": "version: v9"})
    assert replicas(followed, ours="two") == 2
    assert replicas(followed, ours="bad") == 2
    assert replicas(followed, ours="not-there") == 2
    assert replicas(follow({"bad": "version: v9"}), ours="bad") is None
    assert replicas(follow({"two": shared(2)}, None), ours="two") is None


def test_a_node_that_is_given_no_configuration_any_more_has_none() -> None:
    followed = follow({"two": shared(2)})
    assert replicas(followed, ours="two") == 2
    assert replicas(followed) is None


def test_a_changed_text_is_used() -> None:
    assert replicas(follow({"two": shared(2)}, {"two": shared(3)}), ours="two") == 3
