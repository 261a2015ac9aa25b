import asyncio
import base64
import json
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.cluster import Cluster

from aimgpu.errors import ClusterConflict, ClusterFailed, InvalidQuantity, NotFoundInCluster
from aimgpu.kubernetes.api.access import read_access, read_kubeconfig
from aimgpu.kubernetes.api.client import Client, Resource, WatchEvent
from aimgpu.kubernetes.api.exec_credential import read_plugin
from aimgpu.kubernetes.api.quantities import format_quantity, parse_quantity

EXEC_VERSION = "client.authentication.k8s.io/v1"
MAPS = Resource(version="v1", plural="configmaps", namespaced=True)


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Client]:
    client = Client(read_kubeconfig(cluster.outside_kubeconfig))
    try:
        yield client
    finally:
        await client.close()


def with_client(cluster: Cluster, use: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            await use(client)

    asyncio.run(main())


def test_objects_are_created_read_patched_listed_and_deleted(cluster: Cluster, namespace: str) -> None:
    async def use(client: Client) -> None:
        assert (await client.version())[:2] == (1, 36)
        assert await client.serves("resource.k8s.io/v1")
        assert not await client.serves("resource.k8s.io/v9")
        await client.create(MAPS, config_map("one", a="1"), namespace)
        with pytest.raises(ClusterConflict) as exists:
            await client.create(MAPS, config_map("one"), namespace)
        assert exists.value.reason == "AlreadyExists"
        await client.patch(MAPS, "one", {"data": {"b": "2"}}, namespace)
        await client.patch(MAPS, "two", config_map("two", c="3"), namespace, kind="apply")
        found, _ = await client.list(MAPS, namespace)
        assert {item["metadata"]["name"]: item["data"] for item in found if item["metadata"]["name"] in ("one", "two")} == {
            "one": {"a": "1", "b": "2"},
            "two": {"c": "3"},
        }
        stale = await client.get(MAPS, "one", namespace)
        await client.patch(MAPS, "one", {"data": {"b": "4"}}, namespace)
        with pytest.raises(ClusterConflict):
            await client.replace(MAPS, stale, namespace)
        assert await client.delete(MAPS, "one", namespace)
        assert not await client.delete(MAPS, "one", namespace)
        assert await client.find(MAPS, "one", namespace) is None
        with pytest.raises(NotFoundInCluster):
            await client.get(MAPS, "one", namespace)

    with_client(cluster, use)


def test_a_watch_lists_then_follows_and_bridges_a_gap(cluster: Cluster, namespace: str) -> None:
    async def use(client: Client) -> None:
        label = {"marked": uuid.uuid4().hex[:8]}
        selector = f"marked={label['marked']}"
        for name in ("kept", "lost"):
            body = config_map(name)
            body["metadata"]["labels"] = label
            await client.create(MAPS, body, namespace)
        events: asyncio.Queue[WatchEvent] = asyncio.Queue()

        async def follow() -> None:
            async for event in client.watch(MAPS, namespace, labels=selector):
                events.put_nowait(event)

        task = asyncio.create_task(follow())
        first = [await asyncio.wait_for(events.get(), 300) for _ in range(3)]
        assert [event.type for event in first] == ["ADDED", "ADDED", "SYNCED"]
        await client.patch(MAPS, "kept", {"data": {"a": "1"}}, namespace)
        assert (await asyncio.wait_for(events.get(), 300)).object["data"] == {"a": "1"}
        # The API server is gone for a while, as in an upgrade; what happens in the end is reported all the same.
        cluster.process("kube-apiserver").kill()
        cluster.restart("kube-apiserver")
        await client.delete(MAPS, "lost", namespace)
        seen = await asyncio.wait_for(events.get(), 300)
        while seen.type == "SYNCED":
            seen = await asyncio.wait_for(events.get(), 300)
        assert (seen.type, seen.object["metadata"]["name"]) == ("DELETED", "lost")
        task.cancel()

    with_client(cluster, use)


def test_a_server_that_is_not_there_is_named(tmp_path: Path, cluster: Cluster) -> None:
    text = cluster.outside_kubeconfig.read_text()
    server = text.partition('server: "')[2].partition('"')[0]
    path = tmp_path / "config"
    path.write_text(text.replace(server, "https://127.0.0.1:1"))

    async def ask() -> None:
        async with Client(read_kubeconfig(path)) as client:
            await client.version()

    with pytest.raises(ClusterFailed, match=r"cannot reach the Kubernetes API server at https://127\.0\.0\.1:1"):
        asyncio.run(ask())


def login_config(cluster: Cluster, folder: Path, *credentials: dict[str, str]) -> Path:
    """A kubeconfig whose program prints one of these after the other, and notes what it was given."""
    for number, status in enumerate(credentials):
        answer = {"apiVersion": EXEC_VERSION, "kind": "ExecCredential", "status": status}
        (folder / f"answer-{number}").write_text(json.dumps(answer))
    program = folder / "login"
    program.write_text(
        f"""#!/bin/sh
cd {folder}
echo "$1 $REGION $KUBERNETES_EXEC_INFO" >> asked
cat answer-$(( $(wc -l < asked) - 1 ))
"""
    )
    program.chmod(0o755)
    config = yaml.safe_load(cluster.outside_kubeconfig.read_text())
    variables = [{"name": "REGION", "value": "here"}]
    entry = {
        "apiVersion": EXEC_VERSION,
        "command": "./login",
        "args": ["--role=x"],
        "env": variables,
        "provideClusterInfo": True,
    }
    config["users"][0]["user"] = {"exec": entry}
    path = folder / "config"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_kubeconfig_gets_its_token_from_a_program_and_a_new_one_when_it_is_refused(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    # Of its own: the controllers of a busy machine may take a while to make those of a new namespace.
    for words in (
        ("serviceaccount", "reader"),
        ("configmap", "known", "--from-literal=a=1"),
        ("rolebinding", "view", "--clusterrole=view", f"--serviceaccount={namespace}:reader"),
    ):
        cluster.kubectl("create", *words, f"--namespace={namespace}")
    token = cluster.kubectl("create", "token", "reader", f"--namespace={namespace}").strip()
    soon = {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"}
    path = login_config(cluster, tmp_path, {"token": "withdrawn"}, soon, {"token": token})

    async def use() -> None:
        async with Client(read_kubeconfig(path)) as client:
            for _ in range(3):
                assert (await client.get(MAPS, "known", namespace))["data"]

    asyncio.run(use())
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3  # refused, then expired, then kept
    argument, region, given = asked[0].split(" ", 2)
    assert (argument, region) == ("--role=x", "here")
    spec = json.loads(given)["spec"]
    assert spec["cluster"]["server"].startswith("https://127.0.0.1")
    assert spec["cluster"]["certificate-authority-data"]


def test_a_program_may_print_a_client_certificate(cluster: Cluster, tmp_path: Path) -> None:
    user = yaml.safe_load(cluster.outside_kubeconfig.read_text())["users"][0]["user"]
    certificate, key = (base64.b64decode(user[f"client-{name}-data"]).decode() for name in ("certificate", "key"))
    path = login_config(cluster, tmp_path, {"clientCertificateData": certificate, "clientKeyData": key})

    async def use() -> None:
        async with Client(read_kubeconfig(path)) as client:
            assert await client.get(MAPS, "kube-root-ca.crt", "kube-system")

    asyncio.run(use())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'log in first' >&2; exit 3", r"status 3\): log in first"),
        ("echo hello", "printed no ExecCredential"),
        (f"""echo '{{"apiVersion": "{EXEC_VERSION}", "status": {{}}}}'""", "neither a token nor a certificate"),
        ("""echo '{"apiVersion": "other/v1", "status": {"token": "t"}}'""", "of another version"),
        (None, "is not installed"),
    ],
)
def test_a_program_that_gives_no_credentials_is_named(tmp_path: Path, script: str | None, words: str) -> None:
    if script is not None:
        (tmp_path / "login").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "login").chmod(0o755)
    plugin = read_plugin({"apiVersion": EXEC_VERSION, "command": "./login", "installHint": "install it"}, {}, tmp_path)
    with pytest.raises(ClusterFailed, match=words):
        plugin.run()


def test_without_a_cluster_the_error_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterFailed) as missing:
        read_access({}, tmp_path / "none")
    assert "KUBECONFIG" in str(missing.value.hint)


def split_config(cluster: Cluster, folder: Path) -> str:
    """The cluster's kubeconfig in three files in three folders, and others around them: a value for `$KUBECONFIG`."""
    config = yaml.safe_load(cluster.outside_kubeconfig.read_text())
    files: dict[str, dict[str, Any]] = {
        "contexts": {"contexts": [{"name": "mine", "context": {"cluster": "here", "user": "me", "namespace": "work"}}]},
        "clusters": {"current-context": "mine", "clusters": [{"name": "here", "cluster": config["clusters"][0]["cluster"]}]},
        "users": {"current-context": "other", "users": [{"name": "me", "user": config["users"][0]["user"]}]},
        "later": {
            "clusters": [{"name": "here", "cluster": {"server": "https://127.0.0.1:1"}}],
            "contexts": [{"name": "mine", "context": {"cluster": "none", "user": "none", "namespace": "play"}}],
        },
    }
    certificate = base64.b64decode(files["users"]["users"][0]["user"].pop("client-certificate-data"))
    files["users"]["users"][0]["user"]["client-certificate"] = "certificates/me.pem"
    names = [""]
    for name, content in files.items():
        (folder / name / "certificates").mkdir(parents=True)
        (folder / name / "certificates" / "me.pem").write_bytes(certificate if name == "users" else b"")
        (folder / name / "config").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config"} | content))
        names.append(str(folder / name / "config"))
    return ":".join([*names, str(folder / "absent")])


def test_several_kubeconfig_files_are_merged_as_kubectl_does(cluster: Cluster, tmp_path: Path) -> None:
    given = split_config(cluster, tmp_path)
    access = read_access({"KUBECONFIG": given})
    words = [cluster.program("kubectl"), "config", "view", "--minify", "--output=json"]
    seen = json.loads(subprocess.check_output(words, env=os.environ | {"KUBECONFIG": given}))
    assert access.server == seen["clusters"][0]["cluster"]["server"]
    assert access.namespace == seen["contexts"][0]["context"]["namespace"] == "work"

    async def ask() -> tuple[int, int, int]:
        async with Client(access) as client:
            return await client.version()

    assert asyncio.run(ask())[:2] == (1, 36)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- 1", "is not a kubeconfig file"),
        ("a: [", "is not a kubeconfig file"),
        ("contexts: [{}]", "an entry has no name"),
        ("{}", "has no current context"),
        ("current-context: gone", "has no context 'gone'"),
        (
            "{current-context: a, contexts: [{name: a, context: {cluster: b, user: c}}]}",
            "context 'a' in .* names the cluster 'b'",
        ),
        (
            "{current-context: a, contexts: [{name: a, context: {cluster: b}}], clusters: [{name: b, cluster: {}}]}",
            "without a server",
        ),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(ClusterFailed, match=words):
        read_access({"KUBECONFIG": f"{tmp_path / 'absent'}:{tmp_path / 'config'}"})


def test_a_list_of_absent_kubeconfig_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match="none of the kubeconfig files exists"):
        read_access({"KUBECONFIG": f"{tmp_path / 'one'}:{tmp_path / 'two'}"})


@pytest.mark.parametrize(
    ("text", "count"),
    [("96Gi", 96 << 30), ("60000000000", 60_000_000_000), ("1.5Ki", 1536), ("500m", 1), ("2e3", 2000), ("1k", 1000), ("0", 0)],
)
def test_quantities_are_exact_and_rounded_up(text: str, count: int) -> None:
    assert parse_quantity(text) == count


@pytest.mark.parametrize("text", ["", "12 GiB", "1Gib", "abc", "1.2.3", "Gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InvalidQuantity):
        parse_quantity(text)


@given(st.integers(min_value=0, max_value=1 << 62))
def test_a_printed_quantity_can_be_read_back(count: int) -> None:
    assert parse_quantity(format_quantity(count)) == count
