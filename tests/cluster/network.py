"""The network of a test cluster: a bridge on the first node, a cable to each other node, routes between their pods."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.certificates import Authority, Certificate
from tests.cluster.node import Node
from tests.cluster.processes import Processes

ADDRESS = "10.99.0.1"  # of the first node, where the control plane listens
SERVICE_ADDRESS = "10.96.0.1"  # of the Service kubernetes
SERVICES = "10.96.0.0/16"
RELAY = Path(__file__).with_name("relay.py")


def connect(nodes: Sequence[Node]) -> None:
    first, *others = nodes
    first.run("ip", "link", "add", "nodes", "type", "bridge")
    first.run("ip", "link", "set", "nodes", "up")
    first.run("ip", "address", "add", f"{ADDRESS}/24", "dev", "nodes")
    # A bridge without a cable has no carrier, and the kubelet wants an address on an interface that is up.
    first.run("ip", "link", "add", "plug", "type", "veth", "peer", "name", "socket")
    first.run("ip", "link", "set", "plug", "master", "nodes", "up")
    first.run("ip", "link", "set", "socket", "up")
    first.run("ip", "route", "add", "default", "dev", "nodes")
    # Pods reach the API server at its Service address without kube-proxy.
    first.run("ip", "address", "add", f"{SERVICE_ADDRESS}/32", "dev", "lo")
    for node in others:
        cable = f"to-{node.name}"
        first.run("ip", "link", "add", cable, "type", "veth", "peer", "name", "uplink", "netns", str(node.pid))
        first.run("ip", "link", "set", cable, "master", "nodes", "up")
        node.run("ip", "link", "set", "uplink", "up")
        node.run("ip", "address", "add", f"{node.address}/24", "dev", "uplink")
        node.run("ip", "route", "add", "default", "via", ADDRESS)
        first.run("ip", "route", "add", node.place.pods, "via", node.address)
        node.run("ip", "route", "add", first.place.pods, "via", ADDRESS)
    for node in nodes:
        node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")


def forward(processes: Processes, inside: Sequence[str], address: str, port: int) -> int:
    """Listen on loopback outside, connect inside: a socket stays in the network namespace that it was opened in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        local: int = listener.getsockname()[1]
        command = [*inside, sys.executable, str(RELAY), "0", address, str(port)]
        processes.start(f"forward-{local}", command, stdin=listener.fileno())
    return local


def answers(inside: Sequence[str], authority: Authority, client: Certificate) -> bool:
    """Whether the API server is ready. curl, because kubectl takes a second of CPU time for each question."""
    files = ["--cacert", str(authority.certificate), "--cert", str(client.certificate), "--key", str(client.key)]
    command = [*inside, "curl", "--silent", "--max-time", "5", *files, f"https://{ADDRESS}/readyz"]
    return subprocess.run(command, capture_output=True, check=False).stdout == b"ok"
