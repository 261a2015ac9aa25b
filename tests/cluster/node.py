"""One node: containerd and a kubelet in network and mount namespaces of their own.

Inside the mount namespace ``/run`` is empty and private, ``/var/lib/kubelet`` is the node's own folder and ``/dev`` can have
device nodes that the machine does not have, so programs of a node are started with the paths that they have in production.
The namespaces live as long as a sleeping process; when the cluster's processes are killed, every mount goes with them.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.certificates import Authority
from tests.cluster.images import container_mounts
from tests.cluster.processes import LEASH, Process, Processes
from tests.cluster.requirements import Programs
from tests.cluster.waiting import wait_until

KUBELET_ROOT = Path("/var/lib/kubelet")
CDI_FOLDER = Path("/var/run/cdi")
CONTAINERD = "/run/containerd/containerd.sock"

# $1: folder of the node. Device nodes of the machine that containers, kubelet and runc expect are bound into a new /dev.
PREPARE = """
set -e
mount --make-rprivate /
mkdir -p "$1/dev"
mount -t tmpfs -o mode=755 dev "$1/dev"
for name in null zero full random urandom tty kmsg fuse; do
    [ -e /dev/$name ] || continue
    touch "$1/dev/$name" && mount --bind /dev/$name "$1/dev/$name"
done
for name in pts shm mqueue; do
    [ -d /dev/$name ] || continue
    mkdir "$1/dev/$name" && mount --rbind /dev/$name "$1/dev/$name"
done
ln -s pts/ptmx "$1/dev/ptmx"; ln -s /proc/self/fd "$1/dev/fd"
mount --move "$1/dev" /dev
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/netns /run/cdi /run/lock /var/lib/kubelet "$1/kubelet"
mount --bind "$1/kubelet" /var/lib/kubelet
mount --make-rshared /
ip link set lo up
touch "$1/prepared"
exec sleep infinity
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node's things are."""

    name: str
    number: int  # 1, 2
    folder: Path
    control_group: str
    gates: Mapping[str, bool] = field(default_factory=dict)  # Kubernetes feature gates

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number}"

    @property
    def pods(self) -> str:
        return f"10.{88 + self.number}.0.0/16"


class Node:
    """Starts, restarts and kills the two programs of a node, and runs others beside them."""

    def __init__(self, place: Place, programs: Programs, processes: Processes) -> None:
        self.place = place
        self._programs = programs
        self._processes = processes
        (place.folder / "cni").mkdir(parents=True)
        holder = ["unshare", "--mount", "--net", "sh", "-c", PREPARE, "sh", str(place.folder)]
        self._holder = processes.start(f"{place.name}-namespaces", holder)
        prepared = place.folder / "prepared"
        wait_until(prepared.exists, f"namespaces of {place.name}", lambda: processes.check([self._holder.name]))

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def address(self) -> str:
        return self.place.address

    @property
    def inside(self) -> list[str]:
        """Prefix of a command line that runs the rest of it on this node, and ends it with this Python process."""
        return [*LEASH, "nsenter", f"--net=/proc/{self._holder.pid}/ns/net", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]

    @property
    def pid(self) -> int:
        """A process in the node's namespaces; ``/proc/PID/root`` is the node's file system."""
        return self._holder.pid

    def path(self, inside: str | Path) -> Path:
        """A path of the node as it is reached from outside its mount namespace."""
        return Path(f"/proc/{self._holder.pid}/root{inside}")

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program on the node and return what it prints."""
        answer = subprocess.run(
            [*self.inside, *command], capture_output=True, text=True, check=False, env=self._programs.environment()
        )
        if check and answer.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} on {self.name}: {answer.stderr.strip() or answer.stdout.strip()}")
        return answer.stdout

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a program on the node; its log is ``LOGS/NODE-NAME.log``."""
        return self._processes.start(f"{self.name}-{name}", command, inside=self.inside, env=env)

    def process(self, name: str) -> Process:
        """``containerd``, ``kubelet``, or what ``start`` was given."""
        return self._processes.started[f"{self.name}-{name}"]

    def import_image(self, archive: Path) -> None:
        self.ctr("images", "import", str(archive))

    def ctr(self, *arguments: str) -> str:
        return self.run(self._programs.find("ctr"), "--address", CONTAINERD, "--namespace", "k8s.io", *arguments)

    def start_containerd(self) -> None:
        configuration = self.place.folder / "containerd.toml"
        if not configuration.exists():
            configuration.write_text(_containerd_configuration(self.place, self._programs, self._base_runtime_spec()))
            (self.place.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_network(self.place)))
        self.start("containerd", [self._programs.find("containerd"), "--config", str(configuration)])

    def containerd_answers(self) -> bool:
        command = [*self.inside, self._programs.find("ctr"), "--address", CONTAINERD, "version"]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0

    def start_kubelet(self, authority: Authority | None = None, server: str = "") -> None:
        """Start the kubelet; only the first start needs the authority and the API server."""
        folder = self.place.folder
        if authority is not None:
            own = authority.issue(self.name, f"system:node:{self.name}", "system:nodes", (self.address, self.name))
            authority.kubeconfig(folder / "kubelet.kubeconfig", own, server)
            configuration = _kubelet_configuration(self.place, authority, str(own.certificate), str(own.key))
            (folder / "kubelet.json").write_text(json.dumps(configuration))
        command = [
            self._programs.find("kubelet"),
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={folder}/kubelet.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--root-dir={KUBELET_ROOT}",
        ]
        self.start("kubelet", command)

    def restart_kubelet(self, *, kill: bool = False) -> None:
        self._restart("kubelet", kill=kill)
        self.start_kubelet()

    def restart_containerd(self, *, kill: bool = False) -> None:
        """Containers keep running: their shims do not end with containerd."""
        self._restart("containerd", kill=kill)
        self.start_containerd()
        check = f"{self.name}-containerd"
        wait_until(self.containerd_answers, f"containerd of {self.name}", lambda: self._processes.check([check]))

    def _restart(self, name: str, *, kill: bool) -> None:
        process = self.process(name)
        if kill:
            process.kill()
        else:
            process.stop()

    def _base_runtime_spec(self) -> Path:
        spec = json.loads(subprocess.run([self._programs.find("ctr"), "oci", "spec"], capture_output=True, check=True).stdout)
        spec["mounts"] += container_mounts(self.place.folder)
        path = self.place.folder / "base_runtime_spec.json"
        path.write_text(json.dumps(spec))
        return path


def _containerd_configuration(place: Place, programs: Programs, base_spec: Path) -> str:
    return f"""version = 3
root = "{place.folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:test"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  cdi_spec_dirs = ["/etc/cdi", "{CDI_FOLDER}"]
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["{programs.plugins}"]
  conf_dir = "{place.folder}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{base_spec}"
"""


def _network(place: Place) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": place.pods}]],
        "dataDir": "/run/cni",
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def _kubelet_configuration(place: Place, authority: Authority, certificate: str, key: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": place.control_group,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": certificate,
        "tlsPrivateKeyFile": key,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "podLogsDir": str(place.folder / "pod-logs"),
        "resolvConf": "",
        "maxPods": 600,
        "serializeImagePulls": False,
        "syncFrequency": "10s",
        # Tests wait for resources of device plugins to appear and to go; without a change nothing is written.
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "5m",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "featureGates": dict(place.gates),
    }
