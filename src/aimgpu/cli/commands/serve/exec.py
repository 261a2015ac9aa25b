"""`aimgpu exec`: get a grant from the daemon, then become the program. Nothing of ours stands between it and its caller."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from aimgpu import procfs
from aimgpu.cli.client import DaemonClient, error_from_json
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.errors import AimGpuError, Conflict, DaemonUnreachable, EngineFailed, InvalidInput
from aimgpu.home import Home, find_home
from aimgpu.secret_variables import split_secrets
from aimgpu.units import parse_bytes, parse_duration_ms, parse_ppm

_JOINED = {"LD_LIBRARY_PATH", "LD_PRELOAD"}  # ours first, then the caller's
_GIVEN = frozenset({"PATH", "VIRTUAL_ENV", "LANG", "TZ"})  # with --detach: what finds programs and words
_GIVEN_PREFIXES = ("LC_", "PYTHON", "CONDA_")
_FOR_EVER = "for ever"
_FOR_EVER_SECONDS = 10**9
_LAST_PORT = 65_535
_NOT_STARTED = 126  # as shells report a program that cannot be run
_MARK = "AIMGPU_INSTANCE"  # in the environment of every program that has a grant
_WINNER_SECONDS = 30.0
_SHARES = ("--memory", "--fraction", "--partition", "--whole")
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOptions:
    memory: str | None
    fraction: str | None
    partition: str | None
    whole: int | None
    devices: int | None
    compute: str | None
    priority: str | None
    isolation: str | None
    software: str | None
    name: str | None
    env: tuple[str, ...]
    launcher: str | None
    image: str | None
    wait: str | None
    detach: bool
    as_json: bool


@click.command(
    "exec",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "aimgpu exec --memory 10GiB -- python train.py",
        "aimgpu exec --fraction 0.25 --compute 30% --priority low -- ./simulate --steps 1000",
        "aimgpu exec --memory 8GiB -- bash                # a shell whose programs share the grant",
        "aimgpu exec --memory 8GiB --wait 10m -- python train.py   # wait for room",
        "aimgpu exec --memory 8GiB --devices 2 -- torchrun --nproc-per-node 2 train.py",
        "aimgpu exec --memory 8GiB --detach --name train -- python train.py && aimgpu logs -f train",
        "aimgpu exec --memory 8GiB --detach --launcher docker --image python:3.12 -- python train.py",
    ),
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--memory", metavar="SIZE", help="Of one GPU, such as 10GiB.")
@click.option("--fraction", metavar="PART", help="Of one GPU's memory, such as 0.25.")
@click.option("--partition", metavar="KIND", help="A partition of this kind, such as cpx.")
@click.option("--whole", type=click.IntRange(1, 64), metavar="N", help="So many whole GPUs.")
@click.option("--devices", type=click.IntRange(1, 64), metavar="N", help="The same share of each of N GPUs.")
@click.option("--compute", metavar="PERCENT", help="Of the GPU's compute, such as 30%.")
@click.option("--priority", type=click.Choice(("high", "medium", "low")), help="[medium]")
@click.option("--isolation", type=click.Choice(("hardware", "enforced", "advisory", "none")), help="The least to accept.")
@click.option("--name", metavar="NAME", help="In `ps`, `top` and `down`. [that of the program]")
@click.option("--wait", is_flag=False, flag_value=_FOR_EVER, metavar="[DURATION]", help="Wait for room, so long or for ever.")
@click.option("--detach", "-d", is_flag=True, help="Give the program to the daemon and return; `logs` has its output.")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="With --detach: pass this variable on too.")
@click.option("--launcher", type=click.Choice(("process", "docker")), help="docker: in a container, with --detach.")
@click.option("--image", metavar="IMAGE", help="With --launcher docker: the image to run it in.")
@click.option("--software", metavar="PRODUCT", help="Where no daemon runs: start one with a software GPU, such as MI300X.")
@json_option
def exec_command(command: tuple[str, ...], **options: object) -> None:
    """Run COMMAND in a share of a GPU, capped and gated like a model of its priority.

    The program is this very process: it has your terminal, directory, environment and exit code. It sees only its GPU, and
    what it starts counts to it. Without a daemon one is started, which stays until `aimgpu down`. What does not fit is refused
    with the reasons, or waits with --wait: higher priority first, then in the order of coming.
    """
    asked = ExecOptions(**options)  # type: ignore[arg-type]  # click's names and types are those of the dataclass
    if _MARK in os.environ:
        raise Conflict("this shell has a share of a GPU already", hint="Run the program without `aimgpu exec`, or leave it.")
    if asked.launcher == "docker" and not (asked.detach and asked.image):
        raise InvalidInput("a container is the daemon's and runs an image", hint="Add --detach and --image IMAGE.")
    program = command[0] if asked.launcher == "docker" else shutil.which(command[0])
    if program is None:
        hint = "Write its path, or install it."
        if " " in command[0] and len(command) == 1:  # a line of a shell, quoted
            hint = f"Without the quotes: `{_line_for(('--memory', asked.memory or '8GiB', *command[0].split()))}`."
        raise InvalidInput(f"{command[0]!r} is not a program", hint=hint)
    if asked.env and not asked.detach:
        raise InvalidInput("--env is for --detach: here the program has your whole environment", hint="Leave it out.")
    body = _request(command, asked)
    home = find_home()
    granted = _ask(_find_daemon(home, asked), body, asked)
    if not asked.detach:
        if _MARK not in granted["environment"]:  # never without its limits
            raise EngineFailed("the grant was given up before the program started", hint="Another command ended it; try again.")
        _become(program, command, granted["environment"])
    if asked.as_json:
        print_json({"name": granted["deployment"], "instance": granted["instance"]})
    else:
        name = granted["deployment"]
        click.echo(f"{name} runs. `aimgpu logs -f {name}` follows it, `aimgpu down {name}` ends it.")


def _request(command: tuple[str, ...], asked: ExecOptions) -> dict[str, Any]:
    share = {"memory": asked.memory, "fraction": asked.fraction, "partition": asked.partition, "whole": asked.whole}
    if all(value is None for value in share.values()):
        hint = f"Say how much it gets: --memory, --fraction, --partition or --whole. For example `{_line_for(command)}`."
        raise InvalidInput("nobody can size a program", hint=hint)
    for text, parse in ((asked.memory, parse_bytes), (asked.fraction, parse_ppm), (asked.compute, parse_ppm)):
        if text is not None:
            parse(text)  # before a daemon is started for it
    gpu = {**share, "devices": asked.devices, "compute": asked.compute}
    fields = {
        "command": "program",  # stands for the words below, which are no YAML
        "gpu": {key: value for key, value in gpu.items() if value is not None},
        "priority": asked.priority,
        "isolation": asked.isolation,
        "launcher": asked.launcher,
        "image": asked.image,
    }
    name = asked.name or _UNNAMEABLE.sub("-", Path(command[0]).name).strip("._-")[:50] or "program"
    stack: dict[str, Any] = {"programs": {name: {key: value for key, value in fields.items() if value is not None}}}
    if asked.software is not None:
        stack["gpus"] = {"software": asked.software}
    wait = 0.0
    if asked.wait is not None:
        wait = _FOR_EVER_SECONDS if asked.wait == _FOR_EVER else parse_duration_ms(asked.wait) / 1000
    return {
        "stack": json.dumps(stack),
        "base_directory": str(Path.cwd()),
        "named": asked.name is not None,
        "argv": list(command),
        "environment": _environment_to_give(asked) if asked.detach else {},
        "asker": _this_process(),
        "detach": asked.detach,
        "wait_seconds": wait,
    }


def _line_for(command: tuple[str, ...]) -> str:
    """The share first, also where it was written behind the program."""
    places = (place for place, word in enumerate(command[:-1]) if word in _SHARES)
    place = next(places, None)
    share = ("--memory", "8GiB") if place is None else command[place : place + 2]
    program = command if place is None else command[:place] + command[place + 2 :]
    return shlex.join(["aimgpu", "exec", *share, "--", *program])


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "start_ticks": procfs.read_start_ticks(pid), "boot_id": procfs.read_boot_id()}


def _environment_to_give(asked: ExecOptions) -> dict[str, str]:
    plain, _ = split_secrets({} if asked.launcher == "docker" else os.environ)  # an image has its own
    given = {name: value for name, value in plain.items() if name in _GIVEN or name.startswith(_GIVEN_PREFIXES)}
    for item in asked.env:
        name, equals, value = item.partition("=")
        if not equals and name not in os.environ:
            raise InvalidInput(f"--env {name}: there is no such variable", hint=f"For example --env {name}=VALUE.")
        if name not in split_secrets({name: ""})[0]:
            hint = f"In a stack file: programs, env: {{{name}: {{from_file: PATH}}}}; then `aimgpu up`."
            raise InvalidInput(f"--env {name}: the daemon would keep this secret in clear", hint=hint)
        given[name] = value if equals else os.environ[name]
    return given


def _find_daemon(home: Home, asked: ExecOptions) -> DaemonClient:
    """The one that runs, else one that is started for it and stays."""
    record = home.read_daemon()
    if record is not None:
        return DaemonClient(record.url, home.read_token())
    from aimgpu.cli.daemon_process import wait_for_daemon  # noqa: PLC0415 -- seldom, and slow

    try:
        _start_apart(home, asked.software)
        record = home.read_daemon()
    except Conflict:  # another command was faster, or another program has the port
        record = wait_for_daemon(home, _WINNER_SECONDS)
        if record is None:
            raise
    else:
        if record is None:
            raise DaemonUnreachable("the daemon ended at once", hint=f"Its log is {home.log_file}.")
        click.echo(f"Started a daemon (pid {record.pid}); `aimgpu down` ends it.", err=True)
    return DaemonClient(record.url, home.read_token())


def _start_apart(home: Home, software: str | None) -> None:
    """From a process that ends, so that the daemon is not a child of the program which this one becomes."""
    from aimgpu.cli.daemon_process import DaemonOptions, start_daemon  # noqa: PLC0415 -- seldom, and slow

    port = os.environ.get("AIMGPU_PORT", "8080")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidInput(f"AIMGPU_PORT is {port[:50]!r}, which is no port", hint="`unset AIMGPU_PORT` returns to 8080.")
    options = DaemonOptions(port=int(port), simulate=software, software=software is not None)
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        said: dict[str, Any] = {}
        try:
            start_daemon(home, options).keep()
        except AimGpuError as error:
            said = error.to_json()
        except BaseException as error:  # noqa: BLE001 -- nothing of the command runs on here
            said = EngineFailed(f"the daemon was not started: {error!r}").to_json()
        finally:
            os.write(answer, json.dumps(said).encode())
            os._exit(0)
    os.close(answer)
    with os.fdopen(answers, "rb") as stream:
        told = json.loads(stream.read() or b"{}")
    os.waitpid(child, 0)
    if told:
        raise error_from_json(told)


def _ask(client: DaemonClient, body: Mapping[str, Any], asked: ExecOptions) -> Mapping[str, Any]:
    """What was granted. Raises why nothing was."""
    for event in client.exec(body):
        match event.get("event"):
            case "granted":
                return event
            case "error":
                raise error_from_json(event)
            case "plan":
                raise _refusal(event, client)
            case "step" if not asked.as_json:
                click.echo(event.get("text"), err=True)
    raise DaemonUnreachable("the daemon stopped answering", hint="Look at its log: `aimgpu doctor` says where it is.")


def _refusal(event: Mapping[str, Any], client: DaemonClient) -> AimGpuError:
    from aimgpu.cli.progress import show_progress  # noqa: PLC0415 -- only where it is refused
    from aimgpu.cli.views.apply import follow_apply, refusal_error  # noqa: PLC0415

    with show_progress() as display:
        return refusal_error(follow_apply([event], display, client.read_status()), alone="program")


def _become(program: str, command: tuple[str, ...], given: Mapping[str, str]) -> NoReturn:
    """The process stays the same: its caller notices nothing but the GPU."""
    environment = {**os.environ, **given}
    for name in given.keys() & os.environ.keys() & _JOINED:
        environment[name] = ":".join(dict.fromkeys((given[name], os.environ[name])))
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and exec would pass on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, command, environment)  # noqa: S606 -- the user's own program
    except OSError as error:
        click.echo(f"error: cannot run {program}: {error.strerror}", err=True)
        os._exit(_NOT_STARTED)
