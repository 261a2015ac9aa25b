"""Chooses concrete backends; the only module that names them."""

import functools
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aimgpu.control.stack.stack_file import DEFAULT_SIMULATED_PRODUCT, GpuChoice, Stack
from aimgpu.domain import Device, Partition
from aimgpu.engines.command.engine import CommandEngine
from aimgpu.engines.launchers.docker import DockerLauncher
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.llamacpp.engine import LlamaCppEngine, installed_llamacpp
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.ollama.engine import OllamaEngine
from aimgpu.engines.program.engine import ProgramEngine
from aimgpu.engines.protocols import Engine, Launcher
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.errors import AimGpuError, Conflict, HardwareUnavailable, UnknownProduct
from aimgpu.files import cache_directory
from aimgpu.hardware.amd import ServingAmdHardware
from aimgpu.hardware.combined import CombinedHardware
from aimgpu.hardware.nvidia import NvidiaHardware
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.protocols import Finding, Hardware
from aimgpu.hardware.simulated import SimulatedHardware, find_product
from aimgpu.hardware.software import SoftwareHardware
from aimgpu.home import Home
from aimgpu.isolation.boundaries import EngineFlags, HardwareBoundary
from aimgpu.isolation.building import find_software_gpu
from aimgpu.isolation.chooser import MechanismChooser
from aimgpu.isolation.cu_masks import CuMasks
from aimgpu.isolation.dmem import DmemLimits
from aimgpu.isolation.interposer import Interposer, read_gate_bounds, regions_directory
from aimgpu.isolation.mps_limits import MpsMechanism
from aimgpu.isolation.protocols import Isolator, Mechanism, Offer
from aimgpu.ledger import Ledger

if TYPE_CHECKING:
    from aimgpu.control.dependencies import Dependencies

_ASK_FOR_SIMULATED = (
    f"`--simulated {DEFAULT_SIMULATED_PRODUCT}`, or in a stack file `gpus: {{simulated: {DEFAULT_SIMULATED_PRODUCT}}}`"
)


def choose_hardware(choice: GpuChoice, home: Home) -> Hardware:
    """The GPUs of this machine; simulated ones when asked for, or when there are none.

    Raises HardwareUnavailable where there is a GPU that cannot be used: a simulated one in its place would be a lie.
    """
    if choice.simulated is None:
        real = CombinedHardware(real_backends())
        if real.read_devices():
            return real
        refuse_in_place_of(real.inspect())
    product = choice.simulated or DEFAULT_SIMULATED_PRODUCT
    if choice.software:
        return SoftwareHardware([(product, choice.count)], home.simulated_file, find_software_gpu)
    return SimulatedHardware([(product, choice.count)], home.simulated_file)


def demo_hardware(product: str | None, folder: Path) -> Hardware:
    """A software GPU of a product, with its state in a folder; without a product this machine's real GPUs."""
    if product is not None:
        return SoftwareHardware([(product, 1)], folder / "software-gpu.json", find_software_gpu)
    real = CombinedHardware(real_backends())
    if not real.read_devices():
        refuse_in_place_of(real.inspect())
        raise HardwareUnavailable("this machine has no GPU", hint="Without --gpu the demo uses a software GPU.")
    return real


def refuse_in_place_of(findings: Sequence[Finding]) -> None:
    """`findings`: why no GPU of this machine could be read. None: it has no GPU."""
    if findings:
        ways = dict.fromkeys(finding.hint for finding in findings if finding.hint)
        raise HardwareUnavailable(
            "this machine has a GPU that cannot be used: " + "; ".join(finding.text for finding in findings),
            hint=" ".join([*ways, f"To go on without it, ask for a simulated one: {_ASK_FOR_SIMULATED}."]),
        )


def reopen_hardware(devices: Sequence[Device], home: Home) -> Hardware:
    """The backends behind devices that a daemon of this home reported."""
    if any(device.simulated for device in devices):
        products = Counter(device.product for device in devices)
        if any(device.software for device in devices):
            return SoftwareHardware(list(products.items()), home.simulated_file, find_software_gpu)
        return SimulatedHardware(list(products.items()), home.simulated_file)
    return choose_hardware(GpuChoice(), home)


def find_device(product: str | None) -> Device:
    """A device to size for: of the product named, read from the machine where it has one; without a name its first."""
    real = [device for backend in real_backends() for device in backend.read_devices()]
    if product is None and real:
        return real[0]
    wanted = find_product(product or DEFAULT_SIMULATED_PRODUCT).name
    own = next((device for device in real if device.product == wanted), None)
    return own or SimulatedHardware([(wanted, 1)]).read_devices()[0]


def devices_of_product(product: str, count: int) -> tuple[Device, ...]:
    """Empty simulated devices of a product, in the layout they come with. Raises UnknownProduct."""
    return SimulatedHardware([(find_product(product).name, count)]).read_devices()


@functools.cache
def real_backends() -> tuple[Hardware, ...]:
    """One of each per process: they remember what they read. Without GPUs of its vendor a backend has no devices."""
    return (ServingAmdHardware(), NvidiaHardware())


def make_engines(store: LocalModelStore, cache: Path, *, has_gpu: bool) -> dict[str, Engine]:
    """Best first."""
    probe = store.find("HuggingFaceTB/SmolLM2-135M-Instruct")
    llamacpp = LlamaCppEngine(cache_directory=cache, probe_model=probe.path if probe else None, has_gpu=has_gpu)
    engines: tuple[Engine, ...] = (VllmEngine(), llamacpp, OllamaEngine(), CommandEngine(), ProgramEngine())
    return {engine.name: engine for engine in engines}


def installed_versions(engines: Iterable[str]) -> dict[str, str | None]:
    """Of those of these engines that are installed, whether or not this machine can run them."""
    found: dict[str, str | None] = {}
    for name in engines:
        version = installed_llamacpp(has_gpu=has_gpu()) if name == LlamaCppEngine.name else _told_version(name)
        if version is not None:
            found[name] = version
    return found


def has_gpu() -> bool:
    """Whether this machine has a real one."""
    try:
        return any(backend.read_devices() for backend in real_backends())
    except AimGpuError:
        return False  # one that cannot be read is reported by `gpus`


def _told_version(engine: str) -> str | None:
    others: dict[str, Engine] = {VllmEngine.name: VllmEngine(), OllamaEngine.name: OllamaEngine()}
    return others[engine].availability().version if engine in others else None


def make_launchers(home: Home) -> dict[str, Launcher]:
    return {"process": ProcessLauncher(home.path), "docker": DockerLauncher(home.path)}


def make_interposer(home: Home) -> Interposer:
    return Interposer(regions_directory(home.path), bounds=read_gate_bounds(os.environ))


def make_mps(home: Home) -> MpsDaemons:
    return MpsDaemons(home.path / "mps")


def make_isolator(home: Home) -> Isolator:
    """Strongest first. MPS only where it is asked for: a fault of one of its tenants can end the others."""
    masks, interposer = CuMasks(home.path / "cu-masks.json"), make_interposer(home)
    mps = [MpsMechanism(make_mps(home))] if os.environ.get("AIMGPU_MPS") == "1" else []
    delegated = os.environ.get("AIMGPU_CGROUP")
    dmem = DmemLimits(parent=Path(delegated) if delegated else None)
    # These keep the memory, and know neither turns nor what a tenant should be shown: the interposer goes beside them.
    partners = {dmem.name: interposer, MpsMechanism.name: interposer}
    mechanisms: list[Mechanism] = [HardwareBoundary(), dmem, *mps, interposer, EngineFlags()]
    return MechanismChooser(mechanisms, companions=[masks], partners=partners)


def explain_isolation(home: Home, device: Device, partition: Partition) -> list[tuple[str, Offer]]:
    """What each mechanism gives a share of the partition, or why nothing: all that a machine or a node can use."""
    masks, mps = CuMasks(home.path / "cu-masks.json"), MpsMechanism(make_mps(home))
    mechanisms = (HardwareBoundary(), DmemLimits(), mps, make_interposer(home), masks)
    return [(one.name, one.offer(device, partition, exclusive=False)) for one in mechanisms]


def make_model_store() -> LocalModelStore:
    """Of this user."""
    return LocalModelStore(cache_directory())


def make_dependencies(home: Home, hardware: Hardware, in_flight: Callable[[str], int]) -> "Dependencies":
    """The caller holds the Owner lock of this home."""
    # Sizing needs numpy: half a second that commands which only look at GPUs do not wait for.
    from aimgpu.control.dependencies import Dependencies, learn_nothing, note_nothing, read_timing  # noqa: PLC0415
    from aimgpu.control.sizing_inputs.catalogue_file import CatalogueFile  # noqa: PLC0415
    from aimgpu.control.sizing_inputs.deployment_sizer import DeploymentSizer  # noqa: PLC0415
    from aimgpu.control.sizing_inputs.learning import MemoryLearner  # noqa: PLC0415
    from aimgpu.control.sizing_inputs.measurements import MeasurementFile  # noqa: PLC0415

    cache = cache_directory()
    store = make_model_store()
    simulated = all(device.simulated for device in hardware.read_devices())
    engines = make_engines(store, cache, has_gpu=not simulated)
    measurements = MeasurementFile(home.measurements_file)
    learner = MemoryLearner(measurements=measurements, usage=hardware)
    return Dependencies(
        hardware=hardware,
        ledger=Ledger.open(home.ledger_file),
        isolator=make_isolator(home),
        engines=engines,
        launchers=make_launchers(home),
        models=store,
        size=DeploymentSizer(
            catalogue=CatalogueFile(home.catalogue_file), measurements=measurements, devices=hardware, engines=engines
        ),
        runs=home.path / "runs",
        node=socket.gethostname(),
        in_flight=in_flight,
        timing=read_timing(os.environ),
        # What an engine takes on a CPU teaches nothing about a GPU.
        learn=learn_nothing if simulated else learner,
        note_shortfall=note_nothing if simulated else learner.note_shortfall,
        helpers=make_mps(home),
    )


def check_gpus(stack: Stack, hardware: Hardware) -> None:
    """Refuse a stack that wants other GPUs than those with which the daemon was started."""
    if stack.gpus.simulated is None:
        return
    devices = hardware.read_devices()
    have = sorted(device.product for device in devices)
    try:
        want = [find_product(stack.gpus.simulated).name] * stack.gpus.count
    except UnknownProduct as error:
        raise Conflict(error.message, hint=error.hint) from error
    same_kind = all(device.simulated and device.software == stack.gpus.software for device in devices)
    if not same_kind or have != want:
        kind = "software GPU" if stack.gpus.software else "simulated"
        raise Conflict(
            f"the daemon runs with {', '.join(have)}; the stack wants {', '.join(want)} ({kind})",
            hint="Stop it with `aimgpu down` first, or leave `gpus` out of the stack file.",
        )
