"""The engine `program`: whatever the user names, run until it ends.

One that a caller brings becomes the program by itself, with the caller's terminal and environment. One that the daemon starts
runs below a shell of three lines that keeps its exit code, so that a later daemon knows it too.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aimgpu.domain import PROGRAM, Deployment, UserProgram
from aimgpu.engines.launch_environment import is_container
from aimgpu.engines.launchers.container import OWN_FOLDER
from aimgpu.engines.protocols import Availability, Command, Health, HealthState, LaunchRequest, Mount
from aimgpu.errors import EngineUnavailable, InvalidInput

_EXIT_CODE = "exit-code"
_NOTE = 'printf %s "$code" >"$out.new" && mv "$out.new" "$out"'
_KEEP_EXIT_CODE = f'out=$1; cd "$2" || exit 126; shift 2; "$@"; code=$?; {_NOTE}; exit "$code"'
# The signal of a stop reaches the first process alone, which passes it on. It lives for a while: Docker names the process of a
# container only while that runs, and one that ended at once would count as not started.
_KEEP_IN_CONTAINER = (
    'out=$1; cd "$2" || exit 126; shift 2; sleep 5 & nap=$!; "$@" & child=$!; trap \'kill "$child" "$nap"\' TERM; '
    f'wait "$child"; code=$?; while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done; {_NOTE}; wait; exit "$code"'
)


class ProgramEngine:
    """Nothing is known of the program but its command: what it takes is what it was granted."""

    name = PROGRAM
    takes_priority = False
    starts_alone = False
    runs_without_gpu = True
    fetches_models = True
    formats: frozenset[str] = frozenset()

    def availability(self) -> Availability:
        """Never chosen by itself."""
        return Availability(available=False, reason="it runs programs, and serves no model")

    def check(self, deployment: Deployment, *, installed: bool) -> None:
        """Raises EngineUnavailable or InvalidInput for what could not be started. `installed`: on this machine, in no image."""
        program = _program_of(deployment.overrides.program, deployment.name)
        if not installed:
            if deployment.overrides.image is None:
                raise InvalidInput(f"{deployment.name}: a container needs an `image`", hint="Name the image to run.")
            return
        if program.caller is not None:
            return  # it looked before it asked
        if program.directory is not None and not Path(program.directory).is_dir():
            raise InvalidInput(f"{deployment.name}: there is no folder {program.directory}", hint="Correct `directory`.")
        if _find(program, dict(deployment.overrides.environment)) is None:
            raise EngineUnavailable(
                f"{deployment.name}: {program.argv[0]!r} is not a program on this machine",
                hint="Install it, or write its whole path; a relative one counts from `directory`.",
            )

    def command(self, request: LaunchRequest) -> Command:
        """The user's, in its folder."""
        program = _program_of(request.overrides.program, request.instance.deployment)
        for folder in _exit_folders(request.run_directory):
            (folder / _EXIT_CODE).unlink(missing_ok=True)
        own = request.run_directory / OWN_FOLDER if is_container(request) else request.run_directory
        directory = program.directory or str(own)
        argv = program.argv
        if program.caller is None:
            found = None if is_container(request) else _find(program, dict(request.overrides.environment))
            kept = str(own / _EXIT_CODE)
            script = _KEEP_IN_CONTAINER if is_container(request) else _KEEP_EXIT_CODE
            argv = ("/bin/sh", "-c", script, "aimgpu-program", kept, directory, found or argv[0], *argv[1:])
        return Command(
            argv=argv,
            environment=request.environment,
            image=request.overrides.image,
            device_nodes=request.device_nodes,
            mounts=(Mount(path=program.directory, writable=True),) if program.directory else (),
            process=program.caller,
        )

    def check_health(self, run_directory: Path, api_key: str) -> Health:
        """It runs as soon as it is started."""
        del run_directory, api_key
        return Health(state=HealthState.READY, endpoint="")

    def failure_reason(self, last_lines: tuple[str, ...]) -> str | None:
        """Its last line says too little; its exit code says more."""
        del last_lines
        return None

    def served_models(self, run_directory: Path) -> tuple[str, ...]:
        """None."""
        del run_directory
        return ()

    def ready_seconds(self, run_directory: Path) -> float | None:
        """It is never waited for."""
        del run_directory
        return None

    def exit_code(self, run_directory: Path) -> int | None:
        """Of the run that ended; None: it is not known, as where a signal ended the shell too."""
        for folder in _exit_folders(run_directory):
            with suppress(OSError, ValueError):
                return int((folder / _EXIT_CODE).read_text(encoding="ascii"))
        return None


def _exit_folders(run_directory: Path) -> tuple[Path, Path]:
    """Where it is written: a container writes into a folder of its own."""
    return run_directory, run_directory / OWN_FOLDER


def _program_of(program: UserProgram | None, name: str) -> UserProgram:
    if program is None:
        raise InvalidInput(f"{name}: there is no program", hint="Write it under `programs:` in a stack file.")
    return program


def _find(program: UserProgram, environment: Mapping[str, str]) -> str | None:
    word = program.argv[0]
    if "/" in word and program.directory is not None:
        word = str(Path(program.directory) / Path(word).expanduser())
    return shutil.which(word, path=environment.get("PATH"))
