"""The real Ollama server, built from Go modules once per version; without a GPU it computes on the CPU.

Module archives leave out folders named `vendor`, in which llama.cpp keeps three header libraries: they come from Debian.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.cache import cached
from tests.cluster.debian_packages import unpack
from tests.cluster.go_programs import GoProgram, build

VERSION = "0.20.0"
HEADERS = ("libminiaudio-dev/sid", "libstb-dev/bookworm", "nlohmann-json3-dev/bookworm")
OLLAMA = GoProgram(
    name="ollama",
    packages=("github.com/ollama/ollama",),
    source=Path(__file__).parent / "programs" / "ollama",
    ldflags=f"-s -w -X github.com/ollama/ollama/version.Version={VERSION}",
    cgo=True,
)


def build_ollama() -> Path:
    """The folder with the program `ollama` (about 7 CPU minutes the first time)."""
    with _variable("CPATH", str(_include())):
        return build(OLLAMA)


def _include() -> Path:
    """The headers under the names by which llama.cpp includes them."""
    return cached("ollama-include-1", _link_headers)


def _link_headers(folder: Path) -> None:
    found = unpack("ollama-headers-1", HEADERS) / "usr" / "include"
    (folder / "miniaudio").mkdir()
    miniaudio = next(found.rglob("miniaudio.h"))
    (folder / "miniaudio" / "miniaudio.h").symlink_to(miniaudio)
    (folder / "stb").symlink_to(found / "stb")
    (folder / "nlohmann").symlink_to(found / "nlohmann")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
