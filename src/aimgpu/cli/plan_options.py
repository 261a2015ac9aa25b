"""What a plan may do to make room, as options."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from aimgpu.placement.preemption.eviction_sets import Limits


def limit_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add `--no-move`, `--no-stop`, `--no-layouts` and `--reload-driver`; the command gets `limits`."""

    @click.option("--move/--no-move", default=True, show_default=True, help="Whether running models may move.")
    @click.option("--stop/--no-stop", default=True, show_default=True, help="Whether models of lower priority may be stopped.")
    @click.option("--layouts/--no-layouts", default=True, show_default=True, help="Whether GPUs may be laid out differently.")
    @click.option("--reload-driver", is_flag=True, help="A change of layout may change the memory mode of a whole hive.")
    @wraps(function)
    def command(*, move: bool, stop: bool, layouts: bool, reload_driver: bool, **others: Any) -> None:  # noqa: ANN401 - passed on
        limits = Limits(may_move=move, may_stop=stop, may_change_layouts=layouts, may_reload_driver=reload_driver)
        function(limits=limits, **others)

    return command
