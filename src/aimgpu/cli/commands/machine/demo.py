"""`aimgpu demo`: limits that are seen to hold, without a GPU or on one. Needs no daemon."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from aimgpu import wiring
from aimgpu.cli.demo.manager import DemoManager
from aimgpu.cli.demo.page import DemoPage
from aimgpu.cli.demo.scenes import SCENES, DemoStage, SceneResult, SceneVerdict
from aimgpu.cli.output import examples, json_option, print_json
from aimgpu.control.stack.stack_file import DEFAULT_SIMULATED_PRODUCT
from aimgpu.domain import Vendor
from aimgpu.hardware.software.state import NAME

_SIGNS = {
    SceneVerdict.HELD: ("held", "green"),
    SceneVerdict.BROKEN: ("BROKEN", "red"),
    SceneVerdict.SKIPPED: ("skipped", "yellow"),
}


@click.command(
    epilog=examples(
        "aimgpu demo                  # four scenes on a software GPU, under a minute",
        "aimgpu demo --scene gate     # one of them",
        "aimgpu demo --gpu            # on this machine's GPU: allocates memory and runs kernels, changes no setting",
        "aimgpu demo --json",
    )
)
@click.option("--scene", "names", multiple=True, type=click.Choice([scene.name for scene in SCENES]), help="Only this scene.")
@click.option("--gpu", "real", is_flag=True, help="Use this machine's GPU. Its modes, clocks and MIG settings are left alone.")
@json_option
def demo(names: tuple[str, ...], real: bool, as_json: bool) -> int:
    """See limits hold: a byte cap, a gate for latency, a partition change, a crash.

    Real processes run under the interposer as shipped. Without --gpu they use the software GPU: a driver of ours that needs no
    hardware, in which memory and device time are real. It has a meter of its own, which the interposer does not know.
    """
    begun = time.monotonic()
    results: dict[str, SceneResult] = {}
    chosen = [scene for scene in SCENES if not names or scene.name in names]
    product = None if real else DEFAULT_SIMULATED_PRODUCT
    with tempfile.TemporaryDirectory(prefix="aimgpu-demo-") as folder:
        _note("preparing the interposer" + ("" if real else f" and the {NAME}"))
        manager = DemoManager.open(Path(folder), wiring.demo_hardware(product, Path(folder)))
        device = manager.device()
        meter = f"the {NAME}" if device.software else "NVML" if device.vendor is Vendor.NVIDIA else "the AMD driver"
        stage = DemoStage(manager=manager, meter=meter, product=product)
        page = DemoPage(manager, _describe(device.product, device.id, software=device.software), chosen)
        _note(f"to watch it: {page.url}")
        try:
            for number, scene in enumerate(chosen, 1):
                _note(f"scene {number} of {len(chosen)}: {scene.title.lower()}")
                page.begins(scene)
                results[scene.name] = scene.play(stage)
                page.ended(scene, results[scene.name])
        finally:
            page.close()
            manager.close()
    seconds = time.monotonic() - begun
    described = {"product": device.product, "id": device.id, "software": device.software, "measured_by": meter}
    if as_json:
        print_json({"gpu": described, "seconds": round(seconds, 1), "scenes": {name: asdict(r) for name, r in results.items()}})
    else:
        _print_screen(described, results, seconds)
    return int(any(result.verdict is SceneVerdict.BROKEN for result in results.values()))


def _print_screen(gpu: dict[str, Any], results: dict[str, SceneResult], seconds: float) -> None:
    what = _describe(gpu["product"], gpu["id"], software=gpu["software"])
    click.echo(f"On {what}, in {seconds:.0f} s:")
    for scene in SCENES:
        if scene.name not in results:
            continue
        result = results[scene.name]
        word, colour = _SIGNS[result.verdict]
        click.echo(f"\n{click.style(word.ljust(7), fg=colour, bold=True)}  {click.style(scene.title, bold=True)}")
        for line in result.lines:
            click.echo(f"         {line}")
    click.echo(f"\nMeasured by {gpu['measured_by']}, apart from the interposer. `aimgpu demo --json` has every figure.")


def _describe(product: str, device_id: str, *, software: bool) -> str:
    return f"a {NAME} ({product}; no card is involved)" if software else f"{product} ({device_id})"


def _note(text: str) -> None:
    click.echo(text, err=True)
