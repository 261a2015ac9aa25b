"""A `llama-server` of this machine: where it is, which build, and whether it can use a GPU."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from aimgpu.engines.endpoint import choose_port, write_endpoint
from aimgpu.engines.llamacpp.arguments import LEAST_BUILD, QUIET, server_arguments
from aimgpu.engines.protocols import Command, LaunchRequest
from aimgpu.errors import InvalidInput

VARIABLE = "AIMGPU_LLAMA_SERVER"
NAME = "llama-server"
_BUILD = re.compile(
    r"^version: (?:\S+ \(build )?(\d+)\b", re.MULTILINE
)  # "version: 0.7.0 (build 11669, ...", "version: 9410 (..."
_DEVICE = re.compile(r"^ +([A-Za-z]+)\d+: .+ \(\d+ MiB, \d+ MiB free\)", re.MULTILINE)
_FLAG = re.compile(r"--([a-z][a-z0-9-]+)")
_HELD = ("CUDA", "ROCm", "HIP")  # others see GPUs that the grant's environment hides from them, and no limit holds them
_ASK_SECONDS = 60.0  # it starts the GPU's runtime, which takes seconds on a machine with many GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A `llama-server` that can be used."""

    path: str
    build: int  # 0: it does not know its own, as builds from an archive

    @property
    def version(self) -> str | None:
        """As users write it, such as "b9272"; None: it does not say."""
        return f"b{self.build}" if self.build else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoProgram:
    """`reason` ends the sentence "runs on the CPU: ..."; `named`: the user asked for this very program."""

    reason: str
    named: bool = False


def find_program() -> Program | NoProgram:
    """The one that AIMGPU_LLAMA_SERVER names, else the first on PATH."""
    named = os.environ.get(VARIABLE)
    path = shutil.which(named or NAME)
    if path is None:
        return (
            NoProgram(reason=f"{VARIABLE} names {named}, which is not a program", named=True)
            if named
            else NoProgram(reason=f"no {NAME} found")
        )
    found = _look_at(path)
    return found if isinstance(found, Program) else NoProgram(reason=found, named=bool(named))


def installed_program() -> str | None:
    """Its version, if there is one; whether it sees a GPU is another question, which takes longer to answer."""
    path = shutil.which(os.environ.get(VARIABLE) or NAME)
    match = _BUILD.search(_ask(path, "--version") or "") if path else None
    return f"b{match[1]}" if match and int(match[1]) >= LEAST_BUILD else None


def program_command(program: Program, request: LaunchRequest) -> Command:
    """The command line of the program for one instance."""
    if request.model_path is None:
        raise InvalidInput(f"{NAME} needs a GGUF file for {request.instance.model!r}")
    port = request.port or choose_port()
    write_endpoint(request.run_directory, port)
    return Command(
        argv=(program.path, *server_arguments(request, request.model_path, port, build=program.build)),
        environment={**QUIET, **request.environment},
        device_nodes=request.device_nodes,
        secrets={"LLAMA_API_KEY": request.api_key},
    )


def list_flags(path: str) -> frozenset[str] | None:
    """The long flags that its help names, without dashes; None: it does not say."""
    found = frozenset(_FLAG.findall(_ask(path, "--help") or ""))
    return found or None


def _look_at(path: str) -> Program | str:
    """What it is, or why it cannot be used."""
    version = _ask(path, "--version")
    match = _BUILD.search(version or "")
    if match is None:
        return f"{path} does not report its version"
    build = int(match[1])
    if build > 1 and build < LEAST_BUILD:
        return f"{path} is build {build}, and {LEAST_BUILD} or later is needed"
    kinds = dict.fromkeys(_DEVICE.findall(_ask(path, "--list-devices") or ""))
    if not kinds:
        return f"{path} sees no GPU"
    if not any(kind in _HELD for kind in kinds):
        return f"{path} was built for {', '.join(kinds)}, and only CUDA and ROCm can be held to a Grant"
    return Program(path=path, build=build if build >= LEAST_BUILD else 0)


def _ask(path: str, question: str) -> str | None:
    argv = [path, question]
    try:
        result = subprocess.run(argv, capture_output=True, timeout=_ASK_SECONDS, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - the engine itself
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (result.stdout + b"\n" + result.stderr).decode("utf-8", "replace") if result.returncode == 0 else None
