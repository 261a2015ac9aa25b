"""Options of several commands: `--simulated PRODUCT`, a GPU that is not there, and numbers that are some."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.hardware.simulated import find_product, known_products

Function = TypeVar("Function", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range without "nan", which is below and above nothing, and "inf", which cannot be waited for or kept."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be used", param, ctx)
        return number


INTERVAL = FiniteRange(min=0.1, max=86_400.0)  # seconds between two looks


def simulated_option(function: Function) -> Function:
    """Add `--simulated`; the command gets a GpuChoice, or None."""
    names = ", ".join(part.name for part in known_products())
    option = click.option("--simulated", metavar="PRODUCT", callback=_choice, help=f"GPUs that are not here: {names}.")
    return option(function)


def _choice(_context: click.Context, _parameter: click.Parameter, value: str | None) -> GpuChoice | None:
    return GpuChoice(simulated=find_product(value).name) if value is not None else None
