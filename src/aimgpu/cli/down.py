"""`aimgpu down`: give back what runs."""

import click

from aimgpu.cli.client import connect
from aimgpu.cli.daemon import DaemonOptions, start_daemon, wait_until_gone
from aimgpu.cli.home import Home, find_home
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.running_names import complete_running
from aimgpu.engines.launchers.process import ProcessLauncher


@click.command(
    epilog=examples("aimgpu down            # everything, and the daemon", "aimgpu down chat code  # these two; the rest stays")
)
@click.argument("names", nargs=-1, shell_complete=complete_running)
@json_option
def down(names: tuple[str, ...], as_json: bool) -> None:
    """Stop models and give back what they held. Without NAMES: all of them, and the daemon."""
    home = find_home()
    if names:
        connect(home).release(list(names))
        _tell(as_json=as_json, released=list(names), daemon_stopped=False)
        return
    stopped = _stop_everything(home)
    _tell(as_json=as_json, released=None, daemon_stopped=stopped)


def _stop_everything(home: Home) -> bool:
    """Whether there was something to stop. A daemon that was killed left its models: a new one takes them over, then stops."""
    record = home.read_daemon()
    if record is not None:
        connect(home).stop()
        wait_until_gone(record)
        return True
    if not home.daemon_file.exists() and not ProcessLauncher(home.path).find_started():
        return False
    start_daemon(home, DaemonOptions(port=0)).stop()
    home.daemon_file.unlink(missing_ok=True)
    return True


def _tell(*, as_json: bool, released: list[str] | None, daemon_stopped: bool) -> None:
    if as_json:
        print_json({"released": released, "daemon_stopped": daemon_stopped})
    elif released is not None:
        click.echo(f"Released {', '.join(released)}.")
    else:
        click.echo("Stopped." if daemon_stopped else "Nothing runs.")
