"""Options of several commands: `--gpu PRODUCT`, a GPU that is not there, and numbers that are some."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from aimgpu.control.stack.stack_file import GpuChoice

Function = TypeVar("Function", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range without "nan", which is below and above nothing, and "inf", which cannot be waited for or kept."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be used", param, ctx)
        return number


INTERVAL = FiniteRange(min=0.1, max=86_400.0)  # seconds between two looks


def gpu_option(help_text: str) -> Callable[[Function], Function]:
    """Add `--gpu PRODUCT`; the command gets `gpu`, as typed. `--simulated` is the same option."""
    return click.option("--gpu", "--simulated", "gpu", metavar="PRODUCT", help=help_text)


def simulated_option(function: Function) -> Function:
    """Add `--gpu PRODUCT` to a command that reads GPUs; it gets a GpuChoice, or None, as `simulated`."""
    text = 'A GPU that is not here, such as MI300X or "RTX 4090"; `aimgpu gpus --known` lists them.'
    option = click.option("--gpu", "--simulated", "simulated", metavar="PRODUCT", callback=_choice, help=text)
    return option(function)


def _choice(_context: click.Context, _parameter: click.Parameter, value: str | None) -> "GpuChoice | None":
    from aimgpu.control.stack.stack_file import GpuChoice  # noqa: PLC0415 -- most commands read no GPUs
    from aimgpu.hardware.simulated import find_product  # noqa: PLC0415

    return GpuChoice(simulated=find_product(value).name) if value is not None else None
