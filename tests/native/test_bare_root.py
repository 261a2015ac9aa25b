"""A wheel in a bare Debian: no compiler, no make, no git. Plain, it holds a cap to the byte; with the extra, it answers.

The engine's wheel needs libgomp1, the one package beside Python.

Needs root and debootstrap (Debian: apt-get install debootstrap), and minutes.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cluster.cache import cached
from tests.cluster.debian_packages import MIRROR
from tests.native.test_prebuilt import make_wheel

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="no debootstrap (Debian: apt-get install debootstrap)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for chroot"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the wheel that is made is for x86_64"),
]


def lay_out(folder: Path) -> None:
    """Debian 12 with nothing but Python."""
    command = [
        "debootstrap",
        "--variant=minbase",
        "--include=python3,python3-venv,ca-certificates,libgomp1",
        "bookworm",
        str(folder),
        MIRROR,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.fixture(scope="module")
def root() -> Path:
    return cached("bare-debian-12", lay_out)


@pytest.fixture(scope="module")
def index(root: Path) -> Path:
    """A folder of the root with our wheel and all that it needs."""
    folder = root / "index"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    wheel = make_wheel("x86_64", folder)
    platforms = [
        word for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28") for word in ("--platform", f"{name}_x86_64")
    ]
    kinds = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none")
    # An environment that uv made has no pip.
    pip = [str(Path(__file__).parents[2] / "tools" / "uv.sh"), "tool", "run", "--quiet", "pip"]
    command = [*pip, "download", "--quiet", "--only-binary", ":all:", *platforms, *kinds]
    done = subprocess.run([*command, "-d", folder, f"{wheel}[embedded]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run(root: Path, script: str) -> str:
    """In the root, with this machine's processes, devices, names and certificates, and nothing else of it."""
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    binds = " && ".join(f"mount --bind {place} {root}{place}" for place in ("/proc", "/dev", "/etc/ssl"))
    command = ["unshare", "--mount", "sh", "-c", f'{binds} && exec chroot {root} sh -c "$SCRIPT"']
    environment = {**os.environ, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "SCRIPT": f"set -e; {script}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def install(place: str, what: str) -> str:
    return f"rm -rf {place}; python3 -m venv {place}; {place}/bin/pip install -q --no-index --find-links /index '{what}'; "


def test_nothing_that_builds_is_there(root: Path) -> None:
    assert run(root, "for p in cc gcc clang make git; do command -v $p || true; done") == ""


@pytest.mark.usefixtures("index")
def test_without_a_compiler_a_cap_holds_to_the_byte(root: Path) -> None:
    said = run(root, install("/opt/plain", "aimgpu") + "/opt/plain/bin/aimgpu demo --json --scene cap")
    figures = json.loads(said)["scenes"]["cap"]["figures"]
    assert figures["held_bytes"] == figures["measured_bytes"] == figures["share_bytes"]


@pytest.mark.usefixtures("index")
def test_with_the_embedded_engine_a_model_answers(root: Path) -> None:
    place = "/opt/embedded"
    said = run(
        root, install(place, "aimgpu[embedded]") + f"{place}/bin/aimgpu run {MODEL} 'Say hello.'; {place}/bin/aimgpu down"
    )
    assert said.strip()
