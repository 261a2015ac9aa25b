"""What a test cluster is built from: the cache of all checkouts, other versions of Kubernetes, clusters that were killed."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster import go_programs, kubernetes_versions
from tests.cluster.cache import cache_folder, cached
from tests.cluster.go_programs import PROGRAMS, GoProgram, _digest, is_built
from tests.cluster.kubernetes_versions import (
    COMMITTED,
    VARIABLE,
    api_flags,
    chosen_version,
    counts_shares,
    default_gates,
    kubernetes,
)
from tests.cluster.stale import OWNER, mark, remove_stale
from tests.cluster.waiting import wait_for, wait_until
from tests.cluster.wrapper_module import wrapper
from tests.downloads import DownloadFailed

GO_MOD = """// This is a generated file.

module k8s.io/kubernetes

go 1.24.0

godebug default=go1.24

require (
	github.com/google/cadvisor v0.52.1
	k8s.io/api v0.0.0
	k8s.io/kubelet v0.0.0
)

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kubelet => ./staging/src/k8s.io/kubelet
)
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one, and no version chosen."""
    monkeypatch.setenv("AIMGPU_CLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    kubernetes.cache_clear()
    return tmp_path / "cache"


def test_a_folder_is_filled_once_whoever_asks_and_the_others_wait_for_it() -> None:
    filled: list[Path] = []
    begun = threading.Event()

    def fill(folder: Path) -> None:
        filled.append(folder)
        assert begun.wait(300)
        (folder / "program").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(cached, "tool-1", fill) for _ in range(4)]
        wait_until(lambda: bool(filled), "one of them builds")
        assert not any(one.done() for one in asked)
        begun.set()
        assert {one.result() for one in asked} == {cache_folder() / "tool-1"}
    assert len(filled) == 1
    assert (cache_folder() / "tool-1" / "program").read_text() == "whole"


def test_a_build_that_fails_or_was_killed_leaves_nothing_that_looks_finished(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        cached("tool-1", fail)
    assert not (cache / "tool-1").exists()
    (cache / "tool-1.unfinished").mkdir(exist_ok=True)
    (cache / "tool-1.unfinished" / "of-a-killed-build").write_text("")

    folder = cached("tool-1", lambda fresh: (fresh / "program").touch())

    assert [path.name for path in folder.iterdir()] == ["program"]


def test_a_file_that_cannot_be_downloaded_is_named_in_one_line_and_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zip_file = "https://proxy.example/k8s.io/kubernetes/@v/v1.37.2.zip"
    compiler = tmp_path / "go"
    compiler.write_text(
        f"#!/bin/sh\necho $1 >> '{tmp_path}/calls'\n"
        f"echo 'main.go:5:2: k8s.io/kubernetes@v1.37.2: reading {zip_file}: 403 Forbidden' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(go_programs, "go", lambda: str(compiler))
    source = tmp_path / "source"
    source.mkdir()
    program = GoProgram(name="tool", source=source)

    for _ in range(3):
        with pytest.raises(DownloadFailed) as caught:
            go_programs.build(program)
        assert str(caught.value) == f"cannot download {zip_file}: 403 Forbidden"

    assert (tmp_path / "calls").read_text() == "build\n"
    with pytest.raises(DownloadFailed, match=r"v1\.37\.2\.zip: 403 Forbidden$"):
        go_programs.module_folder("k8s.io/kubernetes", "v1.37.2")


def test_any_change_of_a_program_is_another_build(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "go.mod").write_text("module a\n")

    def program(**changes: object) -> GoProgram:
        return GoProgram(**{"name": "tool", "source": source, **changes})  # type: ignore[arg-type]

    cached(f"tool-{_digest(program())}", lambda _: None)
    assert is_built(program())
    assert not is_built(program(ldflags="-s"))
    assert not is_built(program(links=("other",)))
    assert not is_built(program(cgo=True))
    assert not is_built(program(linker="-Wl,x"))
    (source / "go.sum").write_text("x")
    assert not is_built(program())


def test_without_the_variable_the_committed_module_is_built_with_all_gates_as_they_are() -> None:
    assert chosen_version() == COMMITTED
    assert kubernetes().folder == PROGRAMS / "kubernetes"
    assert f"gitVersion={COMMITTED} " in kubernetes().ldflags
    assert (default_gates(), api_flags()) == ({}, {})
    assert f"require k8s.io/kubernetes {COMMITTED}\n" in (PROGRAMS / "kubernetes" / "go.mod").read_text()


@pytest.mark.parametrize(("version", "alpha"), [("v1.34.4", True), ("v1.35.4", True), ("v1.37.0", False)])
def test_another_version_gets_a_module_of_its_own_and_its_alpha_features(
    version: str, *, alpha: bool, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def write(module: str, asked: str, folder: Path) -> None:
        assert (module, asked) == ("k8s.io/kubernetes", version)
        assert (folder / "main.go").read_text() == (PROGRAMS / "kubernetes" / "main.go").read_text()
        (folder / "go.mod").write_text(wrapper(GO_MOD, module, asked))

    monkeypatch.setattr(kubernetes_versions, "write_wrapper", write)
    monkeypatch.setenv(VARIABLE, version)
    program = kubernetes()
    assert program.folder == cache / f"kubernetes-module-{version}"
    minor = version.split(".")[1]
    assert f"gitMinor={minor} " in program.ldflags
    assert set(default_gates().values()) == ({True} if alpha else set())
    assert ("DRAConsumableCapacity" in default_gates()) == bool(api_flags()) == alpha
    assert counts_shares() != alpha
    published = version.replace("v1", "v0", 1)
    text = (program.folder / "go.mod").read_text()
    assert text.count(f"k8s.io/kubelet {published}\n") == 2
    assert "github.com/google/cadvisor v0.52.1\n" in text
    assert "./staging" not in text


@pytest.mark.parametrize("text", ["1.34.9", "v1.34", "v2.0.0", "latest", "v1.34.4-rc.1"])
def test_a_version_that_is_no_release_is_refused_with_one_that_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=r"write a release such as v1\.34\.4"):
        chosen_version()


def test_folders_of_killed_clusters_go_and_those_of_running_ones_and_fresh_ones_stay(tmp_path: Path) -> None:
    prefix = f"aimgpu-stale-{tmp_path.parent.name}-{tmp_path.name}-"
    dead, alive, fresh = (Path("/var/tmp") / f"{prefix}{name}" for name in ("dead", "alive", "fresh"))  # noqa: S108
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    try:
        for folder in (dead, alive, fresh):
            folder.mkdir()
        for folder in (dead, alive):
            (folder / "logs").mkdir()
        mark(alive)
        (dead / OWNER).write_text(f"{ended.pid} 12345")

        remove_stale(prefix)

        assert [folder.exists() for folder in (dead, alive, fresh)] == [False, True, True]
        (alive / OWNER).write_text((alive / OWNER).read_text() + "0")  # the pid belongs to another process by now
        remove_stale(prefix)
        assert not alive.exists()
    finally:
        for folder in (dead, alive, fresh):
            subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_waiting_ends_with_what_was_waited_for_or_with_the_reason_that_it_cannot_come() -> None:
    with pytest.raises(TimeoutError, match="rain: not after 0 s"):
        wait_until(lambda: False, "rain", timeout_seconds=0.0)

    def ended() -> None:
        raise RuntimeError("etcd ended with status 1")

    with pytest.raises(RuntimeError, match="etcd ended"):
        wait_until(lambda: False, "rain", ended)
    wait_until(lambda: True, "rain", ended)


def test_what_is_waited_for_is_returned_as_it_held_and_shown_as_it_was_last_where_it_never_does() -> None:
    pods = iter([[], ["old"], ["old", "new"], ["new"], ["other"]])

    def read() -> list[str]:
        return next(pods)

    assert wait_for(read, lambda found: found[0] == "new", "the new pod alone") == ["new"]
    with pytest.raises(TimeoutError, match=r"two pods: not after 0 s; last seen: \['other'\]"):
        wait_for(read, lambda found: found[1], "two pods", timeout_seconds=0.0)
