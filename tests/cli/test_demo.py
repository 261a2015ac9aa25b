"""`aimgpu demo`: the scenes, with real processes on the software GPU; a limit that does not hold is reported as broken."""

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
FOLDER = Path(__file__).parents[2]


def play(*arguments: str, **environment: str) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "aimgpu", "demo", "--json", *arguments]
    here = {**os.environ, "PYTHONPATH": str(FOLDER / "src"), **environment}
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_a_share_a_partition_change_and_a_crash_hold_to_the_byte() -> None:
    status, report, progress = play("--scene", "cap", "--scene", "partitions", "--scene", "crash")
    assert status == 0, (report, progress)
    assert report["gpu"]["software"]
    assert report["gpu"]["measured_by"] == "the software GPU"
    cap, partitions, crash = (report["scenes"][name] for name in ("cap", "partitions", "crash"))
    share = cap["figures"]["share_bytes"]
    assert share == cap["figures"]["held_bytes"] == cap["figures"]["measured_bytes"] == cap["figures"]["charged_bytes"]
    assert "1 process in the way" in partitions["figures"]["refusal"]
    assert partitions["figures"]["partitions"] == 8
    assert sum(partitions["figures"]["measured_bytes"].values()) == partitions["figures"]["held_bytes"]
    assert crash["figures"]["charged_bytes"] == {"third": share}
    assert crash["figures"]["counted_bytes"] == crash["figures"]["measured_bytes"] == share
    assert crash["figures"]["left_bytes"] == 0
    assert "scene 3 of 3" in progress


def fetch(url: str, **headers: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)) as connection:
        connection.request("GET", urlsplit(url).path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_page_shows_the_scenes_while_they_play() -> None:
    command = [sys.executable, "-m", "aimgpu", "demo", "--scene", "partitions"]
    here = {**os.environ, "PYTHONPATH": str(FOLDER / "src")}
    with subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        url = next(line.split()[-1] for line in demo.stderr if "to watch it" in line)
        _, page = fetch(url)
        state = json.loads(fetch(url + "state")[1])
        refused, _ = fetch(url + "state", Host="evil.example")
        demo.communicate()
    assert "<h1>aimgpu demo</h1>" in page
    assert "software GPU" in state["gpu"]
    assert [scene["state"] for scene in state["scenes"]] in (["to come"], ["plays"])
    assert state["memory_bytes"] > 0
    assert refused == 403
    assert demo.returncode == 0


def test_the_gate_is_shown_beside_a_run_without_it() -> None:
    _, report, progress = play("--scene", "gate")
    runs = report["scenes"]["gate"]["figures"]
    assert runs["gate_off"]["p50_ms"] > runs["alone"]["p50_ms"], progress
    assert runs["gate_on"]["p50_ms"] < runs["gate_off"]["p50_ms"], progress
    assert runs["gate_on"]["tokens_per_second"] > runs["gate_off"]["tokens_per_second"]
    assert report["scenes"]["gate"]["measured_by"]["hog_percent"] == "the software GPU"


def test_an_interposer_that_does_nothing_is_shown_as_broken(tmp_path: Path) -> None:
    """The verdict comes from the meter of the driver, not from what should have held."""
    idle = tmp_path / "libidle.so"
    subprocess.run(["cc", "-shared", "-o", idle, "-x", "c", os.devnull], check=True)
    status, report, _ = play("--scene", "cap", AIMGPU_INTERPOSER=str(idle))
    assert status == 1
    cap = report["scenes"]["cap"]
    assert cap["verdict"] == "broken"
    assert cap["figures"]["measured_bytes"] > cap["figures"]["share_bytes"]


def test_without_a_gpu_the_demo_on_one_says_so() -> None:
    status, report, errors = play("--gpu")
    if report is not None:
        pytest.skip("this machine has a GPU")
    assert status != 0
    assert json.loads(errors.splitlines()[-1])["error"]["message"] == "this machine has no GPU"
