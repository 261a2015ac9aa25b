"""Another build of the same schema takes over from a daemon under load, and gives back. No engine is lost or restarted."""

import http.client
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daemon.running import ROOT, TestDaemon, apply, stack, wait_for, wait_until_settled

FIELD = "    resized_bytes: int | None = None"
CALLERS = 4
ASKED_BETWEEN = 20


def copy_build(folder: Path, *, newer: bool = False) -> Path:
    """The source as a build of its own; the newer one has a field more in what the ledger keeps."""
    shutil.copytree(ROOT / "src" / "aimgpu", folder / "src" / "aimgpu", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "native").symlink_to(ROOT / "native")
    if newer:
        file = folder / "src" / "aimgpu" / "domain" / "deployment.py"
        text = file.read_text()
        assert text.count(FIELD) == 1
        file.write_text(text.replace(FIELD, f'{FIELD}\n    mood: str = "calm"'))
    return folder / "src"


class Callers:
    """Ask without a pause. An answer with an error is a failure; a daemon that does not listen is asked again."""

    def __init__(self, port: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CALLERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self) -> None:
        wanted = self.answered + ASKED_BETWEEN
        wait_for(lambda: self.answered >= wanted, "callers are answered")

    def _ask(self) -> None:
        body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
        while not self._stop.is_set():
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            try:
                answer = urllib.request.urlopen(request)
            except urllib.error.HTTPError as error:
                with error:
                    self.failures.append(f"{error.code}: {error.read()[:300]!r}")
                continue
            except http.client.HTTPException as error:
                self.failures.append(f"no answer: {error!r}")
                continue
            except (urllib.error.URLError, ConnectionResetError):
                # Not listening, or the kernel resets what the old one had not accepted when it closed its socket.
                self._stop.wait(0.01)
                continue
            with answer:
                try:
                    if not json.load(answer)["choices"]:
                        self.failures.append("an answer without choices")
                    self.answered += 1
                except (http.client.HTTPException, ConnectionError) as error:
                    self.failures.append(f"cut off: {error!r}")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TestDaemon]:
    made = TestDaemon(tmp_path / "home")
    made.set(AIMGPU_TEST_PATIENCE="600")  # for the answers that the old one still gives
    with socket.create_server(("127.0.0.1", 0)) as probe:
        made.port = str(probe.getsockname()[1])
    yield made
    made.stop()


def test_another_build_of_the_same_schema_takes_over_under_load_and_gives_back(daemon: TestDaemon, tmp_path: Path) -> None:
    builds = [copy_build(tmp_path / "one"), copy_build(tmp_path / "two", newer=True)]
    daemon.set(PYTHONPATH=f"{builds[0]}:{ROOT}")
    apply(daemon.start(), stack(chat={"replicas": 2, "concurrency": 4}, code={}))
    engines, (instances, grants) = daemon.launcher.find_started(), daemon.books()
    assert len(engines) == 3
    callers = Callers(int(daemon.port))
    callers.start()
    try:
        callers.wait_for_answers()
        for build in reversed(builds):  # to the newer one, and back
            old = daemon.process
            assert old is not None
            old.terminate()
            assert old.wait(300) == 0
            daemon.set(PYTHONPATH=f"{build}:{ROOT}")
            client = daemon.start()
            assert runs_from(daemon) == build
            wait_until_settled(client)
            callers.wait_for_answers()
            if build is builds[1]:
                apply(client, stack(chat={"replicas": 2, "concurrency": 4}, code={}, more={}))
    finally:
        callers.stop()
    assert callers.failures == []
    assert daemon.launcher.find_started().items() >= engines.items(), "every engine was adopted, none started again"
    after_instances, after_grants = daemon.books()
    assert {one.id for one in instances} < {one.id for one in after_instances}
    assert set(grants) < set(after_grants)
    assert sorted(daemon.launcher.find_started()) == sorted(one.id for one in after_instances)


def runs_from(daemon: TestDaemon) -> Path:
    """The source of the running daemon, by its environment."""
    assert daemon.process is not None
    environment = Path(f"/proc/{daemon.process.pid}/environ").read_bytes().split(b"\0")
    (paths,) = [value for value in environment if value.startswith(b"PYTHONPATH=")]
    return Path(paths.decode().removeprefix("PYTHONPATH=").split(":")[0])
