"""What the node agent is started with: command line options, each with an environment variable for the chart."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aimgpu.errors import InvalidInput
from aimgpu.kubernetes.node.layout_rights import LayoutRights
from aimgpu.kubernetes.vocabulary.names import LABEL_PLUGIN_CONFIG
from aimgpu.units import parse_ppm


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    node: str
    kubelet: Path = Path("/var/lib/kubelet")
    cdi: Path = Path("/var/run/cdi")
    state: Path = Path("/var/lib/aimgpu")  # on the node's disk: ledger, interposer
    run: Path = Path("/run/aimgpu")  # in the node's memory: regions that containers map
    simulated: tuple[tuple[str, int], ...] = ()  # products and how many; empty: the GPUs of this machine
    sysfs: Path = Path("/sys")
    dev: Path = Path("/dev")
    dra: bool = True
    device_plugin: Path | None = None  # its configuration; None: not run
    device_plugin_config: str | None = None  # or the ConfigMap in `namespace` that has one configuration per key
    namespace: str = "aim-gpu-sharing"
    kai: bool = False  # KAI-Scheduler places the pods of this node; what it granted them is enforced
    layouts: LayoutRights = LayoutRights.MEMORY  # that may be changed
    repartition: bool = False
    default_share_ppm: int = 250_000
    single_device: bool | None = None  # one device for a whole GPU and its shares; None: as kube-scheduler needs it
    labels: bool = True
    metrics_port: int = 9400  # 0: none
    interval_seconds: float = 5.0


def parse_options(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Raises InvalidInput for options that exclude each other."""
    given = _parser(environment).parse_args(arguments)
    _check(given)
    return Options(
        node=given.node_name,
        kubelet=given.kubelet,
        cdi=given.cdi,
        state=given.state,
        run=given.run,
        simulated=parse_simulated(given.simulated),
        sysfs=given.sysfs,
        dev=given.dev,
        dra=given.dra,
        device_plugin=given.device_plugin,
        device_plugin_config=given.device_plugin_config,
        namespace=given.namespace,
        kai=given.kai,
        layouts=LayoutRights(given.layouts),
        repartition=given.repartition,
        default_share_ppm=parse_ppm(given.default_share),
        single_device=given.single_device,
        labels=given.labels,
        metrics_port=given.metrics_port,
        interval_seconds=given.interval,
    )


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aimgpu-node-agent", description="Shares the GPUs of a Kubernetes node.")
    default = Options(node=environment.get("NODE_NAME") or socket.gethostname())
    parser.add_argument("--node-name", default=default.node, help="name of the Node object (default: $NODE_NAME)")
    for name, path, meaning in (
        ("kubelet", default.kubelet, "root folder of the kubelet"),
        ("cdi", default.cdi, "folder of CDI files that the container runtime reads"),
        ("state", default.state, "folder on the node's disk for the ledger"),
        ("run", default.run, "folder in the node's memory for what containers map"),
        ("sysfs", default.sysfs, "where sysfs is mounted"),
        ("dev", default.dev, "where device nodes are"),
    ):
        parser.add_argument(f"--{name}", type=Path, default=path, help=f"{meaning} (default: {path})")
    parser.add_argument(
        "--simulated",
        default=environment.get("AIMGPU_SIMULATED", ""),
        help="simulated GPUs instead of real ones: MI300X:2,H200:1",
    )
    parser.add_argument("--no-dra", dest="dra", action="store_false", help="do not run the DRA driver")
    parser.add_argument("--device-plugin", type=Path, metavar="FILE", help="run the device plugin with this configuration")
    parser.add_argument(
        "--device-plugin-config",
        metavar="CONFIGMAP",
        help=f"run the device plugin with a key of this ConfigMap, chosen by the node's label {LABEL_PLUGIN_CONFIG}",
    )
    parser.add_argument("--namespace", default=environment.get("POD_NAMESPACE") or default.namespace, help="of the ConfigMap")
    parser.add_argument(
        "--kai",
        action="store_true",
        help="enforce what KAI-Scheduler grants, beside the device plugin it uses; place nothing",
    )
    parser.add_argument(
        "--layouts",
        choices=[one.value for one in LayoutRights],
        default=default.layouts.value,
        help="which layouts may be changed; vendor: by the vendor's own manager only (default: %(default)s)",
    )
    parser.add_argument("--repartition", action="store_true", help="let claims change the layout of idle GPUs")
    parser.add_argument("--default-share", default="25%", help="memory of a share that names none (default: 25%%)")
    parser.add_argument(
        "--single-device",
        action=argparse.BooleanOptionalAction,
        help="offer a GPU as one device, whole where a request names no memory: for kube-scheduler 1.36 on many nodes "
        "(default: where kube-scheduler is older than 1.36.2, which counts shares wrongly)",
    )
    parser.add_argument("--no-labels", dest="labels", action="store_false", help="do not label the node")
    parser.add_argument("--metrics-port", type=int, default=default.metrics_port, help="0: no metrics (default: 9400)")
    parser.add_argument("--interval", type=float, default=default.interval_seconds, help="seconds between looks at the GPUs")
    return parser


def _check(given: argparse.Namespace) -> None:
    if given.repartition and given.layouts in (LayoutRights.NONE, LayoutRights.VENDOR):
        raise InvalidInput(
            f"claims cannot change layouts where the agent may not (--layouts={given.layouts})",
            hint="Leave --repartition out, or pass --layouts=compute.",
        )
    if given.kai and not given.dra:
        raise InvalidInput("pods that KAI-Scheduler places are enforced by claims", hint="Leave --no-dra out beside --kai.")
    if given.dra and not given.kai and (given.device_plugin is not None or given.device_plugin_config):
        raise InvalidInput(
            "the DRA driver and the device plugin would give the same GPUs away twice",
            hint="Pass --no-dra beside --device-plugin.",
        )


def parse_simulated(text: str) -> tuple[tuple[str, int], ...]:
    """Products and counts of "MI300X:2,H200"."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        product, _, count = part.partition(":")
        if not (count or "1").isdecimal() or int(count or 1) < 1:
            raise InvalidInput(f"{part!r} is not a product and a number", hint="Write --simulated MI300X:2,H200:1.")
        found.append((product.strip(), int(count or 1)))
    return tuple(found)
