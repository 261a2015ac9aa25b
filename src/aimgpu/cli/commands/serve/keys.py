import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TypeVar

import click

from aimgpu.cli.cluster_options import ClusterTarget, on_option
from aimgpu.cli.options import FiniteRange
from aimgpu.cli.output import examples, json_option, print_json, print_table
from aimgpu.home import find_home
from aimgpu.keyfile import KeyClass, KeyStore, StoredKey, read_last_used
from aimgpu.units import parse_bytes, parse_duration_ms

_Answer = TypeVar("_Answer")


@click.group(epilog=examples("aimgpu keys add alice", "aimgpu keys list", "aimgpu keys remove alice"))
def keys() -> None:
    """API keys for callers from other machines. Only hashes are kept."""


@keys.command(
    epilog=examples(
        "aimgpu keys add alice",
        "aimgpu keys add bot --model chat --priority low --rate 5",
        "aimgpu keys add alice --on kubernetes",
    )
)
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model that the key may use; again for more. [all]")
@click.option("--priority", type=click.Choice(["high", "medium", "low"]), help="The class of its requests. [the model's]")
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Requests a second. [no limit]")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once. [no limit]")
@click.option("--expires", metavar="DURATION", help="After so long it opens nothing, such as 30d or 12h. [never]")
@click.option("--answers", metavar="SIZE", help="The largest answer in one piece, such as 64MiB. [16MiB]")
@click.option("--cache-group", help="Share what engines keep of prompts with the keys of this group. [with no other key]")
@on_option
@json_option
def add(  # noqa: PLR0917 -- click passes them by name
    name: str,
    models: tuple[str, ...],
    priority: str | None,
    rate: float | None,
    concurrency: int | None,
    expires: str | None,
    answers: str | None,
    cache_group: str | None,
    as_json: bool,
    cluster: ClusterTarget | None,
) -> None:
    """Make a key for NAME and show it, once. A running daemon knows it at once; from the first key on it asks for one."""
    given = KeyClass(
        models=models or None,
        priority=priority,
        requests_per_second=rate,
        concurrency=concurrency,
        expires=None if expires is None else int(time.time()) + max(parse_duration_ms(expires) // 1000, 1),
        answer_bytes=None if answers is None else parse_bytes(answers),
        cache_group=cache_group,
    )
    first = not _change(cluster, lambda store: store.read())
    key = _change(cluster, lambda store: store.add(name, given))
    if as_json:
        print_json({"name": name, "key": key} | asdict(given))
        return
    click.echo(key)
    click.echo("This is the only time it is shown. Callers send it as: Authorization: Bearer KEY", err=True)
    shared = f"with the keys of the group {cache_group}" if cache_group else "with no other key (--cache-group)"
    click.echo(f"What engines keep of its prompts is shared {shared}.", err=True)
    if cluster is not None and concurrency is not None:
        from aimgpu.cli.commands.cluster.serving import describe_divided_concurrency  # noqa: PLC0415 -- as in `_change`

        if (note := describe_divided_concurrency(cluster, concurrency)) is not None:
            click.secho(f"note: {note}", fg="yellow", err=True)
    if first and cluster is None:
        click.echo(
            "From now on every caller needs a key, also on this machine: put one into AIMGPU_API_KEY for `aimgpu chat`. "
            f"`aimgpu keys remove {name}` and a restart of the daemon undo it.",
            err=True,
        )


@keys.command("list", epilog=examples("aimgpu keys list", "aimgpu keys list --json"))
@on_option
@json_option
def list_keys(as_json: bool, cluster: ClusterTarget | None) -> None:
    """Whose keys there are; the keys themselves are not kept."""
    stored = _change(cluster, lambda store: store.read())
    if as_json:
        used = {} if cluster is not None else _read_last_used()
        print_json({"keys": [_describe(key) | {"last_used": used.get(key.name)} for key in stored]})
        return
    used = {} if cluster is not None else _read_last_used()
    rows = [
        (
            key.name,
            _date(key),
            ", ".join(key.models) if key.models else "all",
            key.priority or "the model's",
            "-" if key.requests_per_second is None else f"{key.requests_per_second:g}/s",
            "-" if key.concurrency is None else str(key.concurrency),
            "never" if key.expires is None else _moment(key.expires) + (" (over)" if key.expires <= time.time() else ""),
            _moment(used[key.name]) if key.name in used else "-",
        )
        for key in stored
    ]
    if rows:
        print_table(["NAME", "CREATED", "MODELS", "PRIORITY", "RATE", "AT ONCE", "EXPIRES", "LAST USED"], rows)
    else:
        click.echo("There are no keys; `aimgpu keys add NAME` makes one.")


@keys.command(epilog=examples("aimgpu keys remove alice"))
@click.argument("name")
@on_option
@json_option
def remove(name: str, as_json: bool, cluster: ClusterTarget | None) -> None:
    """Forget the key of NAME."""

    def forget(store: KeyStore) -> int:
        store.remove(name)
        return len(store.read())

    left = _change(cluster, forget)
    if as_json:
        print_json({"removed": name, "left": left})
        return
    click.echo(f"Removed {name}. It opens nothing any more.")
    if not left:
        click.echo(
            "No key is left, and a running daemon goes on requiring one: `aimgpu keys add NAME` makes one that counts at once. "
            "A daemon on 127.0.0.1 that is started again (`aimgpu down`, `aimgpu up`) lets local callers in without a key."
        )


def _change(cluster: ClusterTarget | None, act: Callable[[KeyStore], _Answer]) -> _Answer:
    """On this machine's key file, or on the Secret of a cluster's gateway."""
    if cluster is None:
        return act(KeyStore(find_home().keys_file))
    from aimgpu.cli.commands.cluster.serving import change_cluster_keys  # noqa: PLC0415 -- a third of a second to import

    return change_cluster_keys(cluster, act)


def _describe(key: StoredKey) -> dict[str, object]:
    shown = {name: value for name, value in asdict(key).items() if name != "sha256"}
    return shown | {"created": _date(key)}


def _read_last_used() -> Mapping[str, int]:
    """By name; the daemon writes it every minute."""
    return read_last_used(find_home().keys_file)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="minutes")


def _date(key: StoredKey) -> str:
    return datetime.fromtimestamp(key.created, tz=UTC).isoformat()
