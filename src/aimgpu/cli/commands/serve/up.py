"""`aimgpu up`: start the daemon, give it the stack, show what came of it, and stay until Ctrl-C."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from aimgpu.cli.client import DaemonClient
from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.daemon_process import DaemonOptions, RunningDaemon, start_daemon, wait_for_daemon
from aimgpu.cli.foreground import wait_and_tell
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.progress import show_progress
from aimgpu.cli.running_models import check_none_left
from aimgpu.cli.signals import signals_as_interrupt
from aimgpu.cli.stack_source import StackText, choose_source
from aimgpu.cli.views.apply import ApplyOutcome, follow_apply, print_beside, print_plan, print_unlisted_failures, refusal_error
from aimgpu.cli.views.status import print_addresses, print_instances, print_simulated
from aimgpu.control.stack.stack_file import LAUNCHERS
from aimgpu.errors import (
    AimGpuError,
    Conflict,
    DaemonRunning,
    DaemonUnreachable,
    EngineFailed,
    InvalidInput,
    NotAllowed,
)
from aimgpu.home import DaemonRecord, Home, find_home
from aimgpu.keyfile import KeyStore

_WINNER_SECONDS = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    host: str
    port: int
    detach: bool
    attach: bool
    dry_run: bool
    as_json: bool
    make_room: bool = False
    prune: bool = False
    all_or_none: bool = False
    launcher: str | None = None
    with_key: bool = False  # callers must send one
    tls_cert: Path | None = None
    tls_key: Path | None = None


@click.command(
    epilog=examples(
        "aimgpu up                              # the stack of ./stack.yaml, until Ctrl-C",
        "aimgpu up --example                    # three small models, to try it; no GPU needed",
        "aimgpu up smollm2 code=./mine.gguf     # these models, each sized by itself",
        "aimgpu up -f stack.yaml --detach",
        "aimgpu up -f more.yaml --attach        # apply to the daemon that runs already",
        "aimgpu up -f stack.yaml --dry-run      # what would happen",
        "aimgpu up -f stack.yaml --attach --prune   # exactly these models, no others",
        "aimgpu up -f pair.yaml --detach --all-or-none   # both models, or neither",
        "aimgpu up -f urgent.yaml --attach --make-room --dry-run",
        "aimgpu up --launcher docker            # each model in a container that sees its own partition only",
        "aimgpu up --on kubernetes -f stack.yaml    # the same models in a cluster",
        "aimgpu up --host 0.0.0.0               # for other machines; needs a key from `aimgpu keys add`",
        "aimgpu up --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem",
    )
)
@click.argument("models", nargs=-1)
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="The stack file; '-' reads stdin. [./stack.yaml]")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, envvar="AIMGPU_PORT", show_default=True, show_envvar=True)
@click.option(
    "--host", default="127.0.0.1", envvar="AIMGPU_HOST", show_default=True, show_envvar=True, help="Address to listen on."
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    envvar="AIMGPU_TLS_CERT",
    help="Serve TLS with this certificate, and the authorities behind it, as PEM. Read again when it changes.",
)
@click.option("--tls-key", type=click.Path(path_type=Path), envvar="AIMGPU_TLS_KEY", help="Its key. [in the same file]")
@click.option("--example", is_flag=True, help="Serve the built-in example instead of a file.")
@click.option(
    "--detach", "-d", is_flag=True, help="Return once the models are ready (in a cluster: at once); they keep running."
)
@click.option("--attach", is_flag=True, help="If a daemon runs already, apply the stack to it.")
@click.option("--dry-run", is_flag=True, help="Show what would happen, change nothing.")
@click.option("--make-room", is_flag=True, help="Where a model does not fit: move others, change layouts, stop lower priority.")
@click.option("--prune", is_flag=True, help="Also remove models that run and are not in the stack.")
@click.option("--all-or-none", is_flag=True, help="Where a model fails to start, stop the others that this command started.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), help="Where every model runs, whatever the stack says.")
@click.option(
    "--api-key", envvar="AIMGPU_API_KEY", help="A key that callers must send; kept hashed. Better given as AIMGPU_API_KEY."
)
@click.option("--kind", type=click.Choice(("deployment", "inferenceservice")), help="In a cluster. [deployment]")
@click.option("--vendor", type=click.Choice(("amd", "nvidia")), help="In a cluster: whose images. [that of its GPUs]")
@click.option("--image", help="In a cluster: of the embedded engine. [that of the chart]")
@on_option
@json_option
def up(  # noqa: PLR0917 - click passes by name
    models: tuple[str, ...],
    file: Path | None,
    example: bool,
    api_key: str | None,
    cluster: ClusterTarget | None,
    kind: str | None,
    vendor: str | None,
    image: str | None,
    **options: object,
) -> int:
    """Serve the models of a stack file behind one endpoint for OpenAI's, Anthropic's and Ollama's clients.

    MODELS may be named instead of a file, as MODEL or NAME=MODEL; each is sized by itself. Without a GPU one MI300X is
    simulated, and the first line says so. Ctrl-C stops everything that was started.
    """
    chosen = UpOptions(**options)  # type: ignore[arg-type]  # click's names and types are those of the dataclass
    source = choose_source(file, models, example=example)
    if cluster is not None:
        return _up_in_cluster(cluster, source, chosen, ClusterImages(kind=kind, vendor=vendor, image=image))
    if kind or vendor or image:
        raise InvalidInput("--kind, --vendor and --image are for a cluster", hint="Add --on kubernetes.")
    if chosen.tls_key is not None and chosen.tls_cert is None:
        raise InvalidInput("--tls-key is the key of a certificate", hint="Name the certificate with --tls-cert.")
    home = find_home()
    if api_key and not chosen.dry_run:
        KeyStore(home.keys_file).put("environment", api_key)
    chosen = replace(chosen, with_key=bool(api_key) or bool(KeyStore(home.keys_file).read()))
    if chosen.host not in _LOOPBACK and not chosen.with_key:
        raise NotAllowed(
            f"listening on {chosen.host} lets other machines in, and there is no API key",
            hint="Make one with `aimgpu keys add NAME`, or listen on 127.0.0.1.",
        )
    running = home.read_daemon()
    if running is not None:
        return _apply_to_running(home, running, source, chosen)
    if chosen.dry_run:
        check_none_left(home, " `aimgpu plan` shows what the stack would get beside them.")
        return _plan_in_a_daemon_of_its_own(source, chosen)
    return _start_and_serve(home, source, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterImages:
    """What only a cluster is asked for."""

    kind: str | None
    vendor: str | None
    image: str | None


def _up_in_cluster(target: ClusterTarget, source: StackText, options: UpOptions, asked: ClusterImages) -> int:
    from aimgpu.cli.commands.cluster.serving import ClusterUp, up_in_cluster  # noqa: PLC0415 -- a third of a second to import

    if options.attach or options.make_room or options.launcher or options.all_or_none:
        raise InvalidInput(
            "--attach, --make-room, --all-or-none and --launcher are for this machine",
            hint="In a cluster kube-scheduler makes room.",
        )
    chosen = ClusterUp(
        dry_run=options.dry_run,
        prune=options.prune,
        detach=options.detach,
        as_json=options.as_json,
        as_inference_services=asked.kind == "inferenceservice",
        vendor=asked.vendor,
        image=asked.image,
        folder=str(source.base_directory.absolute()),
    )
    return up_in_cluster(target, source.stack, chosen)


def _apply_to_running(home: Home, record: DaemonRecord, source: StackText, options: UpOptions) -> int:
    if not (options.attach or options.dry_run):
        raise DaemonRunning(
            f"a daemon runs already (pid {record.pid}, {record.url})",
            hint="`aimgpu up --attach` applies the stack to it, `aimgpu down` stops it.",
        )
    client = DaemonClient(record.url, home.read_token())
    before = client.read_status()
    if not options.as_json:
        print_simulated(before)
    outcome = _apply(client, source, options, before)
    _raise_refusal(outcome)
    _show(client, outcome, options)
    _stop_the_others(client, outcome, before, options)
    return EngineFailed.exit_status if outcome.failed else 0


def _start_and_serve(home: Home, source: StackText, options: UpOptions) -> int:
    gpus = source.stack.gpus
    daemon_options = DaemonOptions(
        host=options.host,
        port=options.port,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        simulate=gpus.simulated,
        simulate_count=gpus.count,
        software=gpus.software,
    )
    with signals_as_interrupt():
        try:
            daemon = start_daemon(home, daemon_options)
        except Conflict:  # another `up` was faster, or another program has the port
            winner = wait_for_daemon(home, _WINNER_SECONDS) if options.attach else home.read_daemon()
            if winner is None:
                raise
            return _apply_to_running(home, winner, source, options)
        return _serve(daemon, source, options)


def _plan_in_a_daemon_of_its_own(source: StackText, options: UpOptions) -> int:
    """No daemon runs and none shall: one with a home of its own reads the hardware, plans, and is gone.

    It knows what the user entered, what was measured and how simulated GPUs are laid out: where a model goes, and what it
    takes there, must be the same as without --dry-run.
    """
    with TemporaryDirectory(prefix="aimgpu-dry-run-") as folder:
        home = Home(Path(folder))
        home.learn_from(find_home())
        return _start_and_serve(home, source, replace(options, port=0))


def _serve(daemon: RunningDaemon, source: StackText, options: UpOptions) -> int:
    """Whatever happens, what we started is stopped, unless it was to be left running."""
    try:
        return _serve_until_done(daemon, source, options)
    except KeyboardInterrupt:
        _say(options, "\nStopping...")
        daemon.stop()
        _say(options, "Stopped.")
        return 0
    finally:
        daemon.stop()


def _serve_until_done(daemon: RunningDaemon, source: StackText, options: UpOptions) -> int:
    before = daemon.client.read_status()
    if not options.as_json:
        print_simulated(before)
    try:
        outcome = _apply(daemon.client, source, options, before)
        _raise_refusal(outcome)
        status = _show_or_keep(daemon, outcome, options)
        _stop_the_others(daemon.client, outcome, before, options)
    except AimGpuError:
        if before.get("instances"):  # taken over from a daemon that was killed: not ours to stop
            daemon.leave_models()
        raise
    if options.dry_run:
        return 0
    if outcome.failed and not _any_ready(status):
        raise EngineFailed("no model became ready, everything was stopped", hint="The reasons stand above.")
    if options.detach:
        daemon.keep()
        _check_still_wanted(daemon, outcome)
        _say(options, f"Running in the background (pid {daemon.record.pid}). Stop with: aimgpu down")
        return EngineFailed.exit_status if outcome.failed else 0
    _say(options, "Ctrl-C stops it.")
    wait_and_tell(daemon, status, lambda text: _say(options, text))
    return 0


def _show_or_keep(daemon: RunningDaemon, outcome: ApplyOutcome, options: UpOptions) -> dict[str, object]:
    """Who reads the output may leave early, as `| head` does: what was to be left running is left running all the same."""
    try:
        return _show(daemon.client, outcome, options)
    except BrokenPipeError:
        if options.detach and not options.dry_run and not outcome.failed:
            daemon.keep()
        raise


def _check_still_wanted(daemon: RunningDaemon, outcome: ApplyOutcome) -> None:
    """Raises where `aimgpu down` came before this command had ended."""
    try:
        wanted = {str(item["name"]) for item in daemon.client.read_status()["deployments"]}
    except DaemonUnreachable:
        wanted = set()
    if outcome.applied and wanted.isdisjoint(outcome.applied):
        raise Conflict(
            "all of it was stopped meanwhile", hint="Another command did that, as `aimgpu down`; run `aimgpu up` again."
        )


def _apply(client: DaemonClient, source: StackText, options: UpOptions, before: Mapping[str, Any]) -> ApplyOutcome:
    with show_progress() as display:
        events = client.apply(
            source.text,
            str(source.base_directory),
            dry_run=options.dry_run,
            make_room=options.make_room,
            prune=options.prune,
            launcher=options.launcher,
        )
        outcome = follow_apply(events, display, before)
    if outcome.error is not None:
        raise outcome.error
    return outcome


def _raise_refusal(outcome: ApplyOutcome) -> None:
    if outcome.refusals:
        raise refusal_error(outcome)


def _stop_the_others(client: DaemonClient, outcome: ApplyOutcome, before: Mapping[str, Any], options: UpOptions) -> None:
    """With --all-or-none: what ran before goes on, what this call started does not outlive a failure."""
    if not (options.all_or_none and outcome.failed):
        return
    known = {item["name"] for item in before["deployments"]}
    failed = sorted({str(event.get("deployment")) for event in outcome.failed.values()})
    started = [name for name in outcome.applied if name not in known]
    if started:
        client.release(started)
    raise EngineFailed(
        f"{', '.join(failed)} failed to start; removed again: {', '.join(started) or 'nothing, all were deployed before'}",
        hint="The reasons stand above; without --all-or-none the others keep running.",
    )


def _show(client: DaemonClient, outcome: ApplyOutcome, options: UpOptions) -> dict[str, object]:
    status = client.read_status()
    if options.as_json:
        plan = {"steps": outcome.steps, "unchanged": outcome.unchanged, "queued": outcome.queued, "beside": outcome.beside}
        print_json({"plan": plan, "status": status})
        sys.stdout.flush()
    elif options.dry_run:
        print_plan(outcome)
    else:
        print_instances(status)
        print_beside(outcome)
        print_addresses(status, page=_link(client, status), with_key=options.with_key, applied=outcome.applied)
    print_unlisted_failures(outcome, status)
    return status


def _link(client: DaemonClient, status: dict[str, object]) -> str:
    """To the page; without it the models run all the same."""
    try:
        return client.make_link()
    except AimGpuError:
        return str(status.get("page_url"))


def _any_ready(status: dict[str, object]) -> bool:
    instances = status.get("instances")
    return isinstance(instances, list) and any(i.get("state") in ("ready", "sleeping") for i in instances)


def _say(options: UpOptions, text: str) -> None:
    click.echo(text, err=options.as_json)
