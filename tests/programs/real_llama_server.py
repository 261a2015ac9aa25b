"""The real `llama-server` from Debian, unpacked into the cache with all that it needs; it has no backend for a GPU."""

import shutil
import subprocess
from pathlib import Path

from tests.hardware.emulation.tools import TOOL_SETS, ToolSet, unpack

_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES = ToolSet(name="llama.cpp", sources=TOOL_SETS[0].sources, packages=("llama.cpp-tools", "libggml0"), extras=())
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


def why_not() -> str | None:
    missing = [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]
    if missing:
        return f"missing programs: {', '.join(missing)}"
    return None if _KEYS.exists() else "no Debian archive keys"


def write_program(folder: Path) -> Path:
    """A script that runs it with its own C library. Raises DownloadFailed where the archive cannot be had."""
    libraries = unpack(_PACKAGES) / _LIBRARIES
    backend = libraries / "ggml" / "backends0" / "libggml-cpu-haswell.so"
    script = folder / "llama-server"
    script.write_text(
        "#!/bin/sh\n"
        f"export GGML_BACKEND_PATH='{backend}'\n"
        f"exec '{libraries}/ld-linux-x86-64.so.2' --library-path '{libraries}:{libraries}/llama' "
        f"'{libraries.parent.parent}/bin/llama-server' \"$@\"\n"
    )
    script.chmod(0o755)
    subprocess.run([script, "--version"], check=True, capture_output=True, timeout=60)
    return script
