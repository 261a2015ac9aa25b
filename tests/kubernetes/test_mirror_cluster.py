"""A Mirror against the real API server: the contract of `test_mirror.py`, with a server that is restarted in the gap."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import pytest
from tests.cluster.cluster import Cluster
from tests.kubernetes import mirror_contract as contract

from aimgpu.kubernetes.api import client as api_client
from aimgpu.kubernetes.api.access import read_kubeconfig
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import DEFINITIONS

# asyncio ends TLS in steps, and a loop that ends with the test leaves the last one out.
_LEFT_OPEN = ".*(_SelectorTransport.__del__|<socket.socket )"
pytestmark = pytest.mark.filterwarnings(f"ignore:{_LEFT_OPEN}:pytest.PytestUnraisableExceptionWarning")

WIDGETS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.mirror.example.com"},
    "spec": {
        "group": "mirror.example.com",
        "names": {"kind": "Widget", "plural": "widgets", "singular": "widget", "listKind": "WidgetList"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


@dataclass
class Relay:
    """Passes connections on to the API server, until it is cut."""

    host: str
    port: int
    is_cut: bool = False
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        self._open |= {writer, far_writer}
        if self.is_cut:
            self.cut()
        with contextlib.suppress(OSError):
            await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*self._serving, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def relayed(cluster: Cluster) -> AsyncIterator[tuple[Client, Relay]]:
    access = read_kubeconfig(cluster.outside_kubeconfig)
    place = urlsplit(access.server)
    relay = Relay(str(place.hostname), place.port or 443)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Client(replace(access, server=f"https://127.0.0.1:{port}")) as client:
        yield client, relay
    server.close()
    await relay.close()


def play(cluster: Cluster, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as client:
            await scenario(client)

    asyncio.run(main())


def test_it_follows_what_its_selectors_name(cluster: Cluster, namespace: str) -> None:
    cluster.make_namespace(f"{namespace}-other")
    play(cluster, lambda client: contract.check_follows(client, namespace, f"{namespace}-other"))


def test_what_cannot_be_read_is_left_out(cluster: Cluster, namespace: str) -> None:
    play(cluster, lambda client: contract.check_unreadable(client, namespace))


@pytest.mark.parametrize("restarted", [False, True])
def test_after_a_gap_it_knows_what_went_came_and_changed(cluster: Cluster, namespace: str, *, restarted: bool) -> None:
    """A server that was restarted does not know what was before, and refuses the old version of the watch."""

    async def main() -> None:
        async with Client(read_kubeconfig(cluster.outside_kubeconfig)) as direct, relayed(cluster) as (client, relay):

            async def interrupt() -> None:
                relay.cut()
                await contract.change_in_gap(direct, namespace)
                if restarted:
                    cluster.process("kube-apiserver").kill()
                    cluster.restart("kube-apiserver")  # from this thread: it would die with another one
                relay.is_cut = False

            await contract.check_gap(client, namespace, interrupt)

    asyncio.run(main())


def test_a_kind_that_comes_later_is_waited_for(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "_LONGEST_ABSENCE_SECONDS", 1.0)

    async def scenario(client: Client) -> None:
        async def install() -> None:
            await client.create(DEFINITIONS, WIDGETS)
            await asyncio.to_thread(cluster.wait_until_served, "widgets.mirror.example.com")

        try:
            await contract.check_kind_that_comes_later(client, namespace, install)
        finally:
            await client.delete(DEFINITIONS, "widgets.mirror.example.com")

    play(cluster, scenario)
