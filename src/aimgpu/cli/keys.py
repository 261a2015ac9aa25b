from datetime import UTC, datetime

import click

from aimgpu.cli.home import find_home
from aimgpu.cli.keystore import KeyStore, StoredKey
from aimgpu.cli.output import examples, json_option, print_json, print_table


@click.group(epilog=examples("aimgpu keys add alice", "aimgpu keys list", "aimgpu keys remove alice"))
def keys() -> None:
    """API keys for callers from other machines. Only hashes are kept."""


@keys.command(epilog=examples("aimgpu keys add alice", "aimgpu keys add bot --model chat --model code"))
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model that the key may use; again for more. [all]")
@json_option
def add(name: str, models: tuple[str, ...], as_json: bool) -> None:
    """Make a key for NAME and show it, once. A running daemon knows it after its next start."""
    key = _store().add(name, models or None)
    if as_json:
        print_json({"name": name, "key": key, "models": models or None})
        return
    click.echo(key)
    click.echo("This is the only time it is shown. Callers send it as: Authorization: Bearer KEY", err=True)


@keys.command("list", epilog=examples("aimgpu keys list", "aimgpu keys list --json"))
@json_option
def list_keys(as_json: bool) -> None:
    """Whose keys there are; the keys themselves are not kept."""
    stored = _store().read()
    if as_json:
        print_json({"keys": [{"name": key.name, "created": _date(key), "models": key.models} for key in stored]})
        return
    rows = [(key.name, _date(key), ", ".join(key.models) if key.models else "all") for key in stored]
    print_table(["NAME", "CREATED", "MODELS"], rows)


@keys.command(epilog=examples("aimgpu keys remove alice"))
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Forget the key of NAME."""
    _store().remove(name)
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"Removed {name}. A running daemon forgets it at its next start.")


def _store() -> KeyStore:
    return KeyStore(find_home().keys_file)


def _date(key: StoredKey) -> str:
    return datetime.fromtimestamp(key.created, tz=UTC).isoformat()
