"""`--simulated PART`: look at a GPU that is not there."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.hardware.simulated import find_product, known_products

Function = TypeVar("Function", bound=Callable[..., Any])


def simulated_option(function: Function) -> Function:
    """Add `--simulated`; the command gets a GpuChoice, or None."""
    names = ", ".join(part.name for part in known_products())
    option = click.option("--simulated", metavar="PRODUCT", callback=_choice, help=f"GPUs that are not here: {names}.")
    return option(function)


def _choice(_context: click.Context, _parameter: click.Parameter, value: str | None) -> GpuChoice | None:
    return GpuChoice(simulated=find_product(value).name) if value is not None else None
