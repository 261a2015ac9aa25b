"""tools/uv.sh: what it fetches is what was pinned, or nothing runs; it trusts whom the system trusts."""

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = "/usr/local/bin:/usr/bin:/bin"


def test_a_uv_with_another_hash_is_not_run(tmp_path: Path) -> None:
    """An index that was taken over offers the version that is wanted, with other contents."""
    python = shutil.which("python3", path=PATH)
    if shutil.which("uv", path=PATH) or python is None:
        pytest.skip("the system has a uv of its own, or no Python")
    (tmp_path / "tools").mkdir()
    for name in ("uv.sh", "uv-requirements.txt"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    found = re.search(r"^uv==(\S+)", (ROOT / "tools" / "uv-requirements.txt").read_text(), re.MULTILINE)
    assert found
    _make_wheel(tmp_path / "offered", found[1])
    environment = {"PATH": PATH, "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "offered")}
    done = subprocess.run(
        [str(tmp_path / "tools" / "uv.sh"), "--version"], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / ".tools" / "uv" / "bin" / "uv").exists()


@pytest.mark.parametrize(("given", "seen"), [({}, "true"), ({"UV_SYSTEM_CERTS": "false"}, "false")])
def test_the_certificates_of_the_system_count_unless_something_else_is_set(
    tmp_path: Path, given: dict[str, str], seen: str
) -> None:
    """Those of the authority of a proxy are there, and not among those that uv brings along."""
    if not any(Path(name).is_file() for name in ("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem")):
        pytest.skip("this system has no certificates")
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$UV_SYSTEM_CERTS"\n')
    uv.chmod(0o755)
    command = [str(ROOT / "tools" / "uv.sh"), "sync"]
    environment = {"PATH": f"{tmp_path}:{PATH}", **given}
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout == f"{seen}\n"


def _make_wheel(folder: Path, version: str) -> None:
    folder.mkdir()
    info = f"uv-{version}.dist-info"
    files = {
        f"uv-{version}.data/scripts/uv": f"#!/bin/sh\ntouch {folder.parent}/ran\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: uv\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = [*files, f"{info}/RECORD"]
    with zipfile.ZipFile(folder / f"uv-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
