"""A real Kubernetes cluster for tests: etcd, the API server, controllers, scheduler, and one or two nodes with a kubelet.

    with Cluster(nodes=1) as cluster:
        cluster.apply({"apiVersion": "v1", "kind": "Pod", ...})        # dict, list of dicts, YAML text, or a path
        cluster.wait("pod/web", "condition=Ready")
        print(cluster.kubectl("get", "pods", "--output=wide"))
        pod = cluster.get("pod", "web")                                # a dict
        cluster.exec("web", "env")                                     # inside its container
        node = cluster.nodes[0]
        node.start("agent", [sys.executable, "-m", "aimgpu.kubernetes.node.agent"], env={"KUBECONFIG": str(cluster.kubeconfig)})
        node.restart_kubelet(kill=True)

In tests use the fixture ``cluster`` (``tests/cluster/fixtures.py``), which all tests of a session share, and a namespace of
your own (fixture ``namespace``). Clusters do not see each other, so that parallel sessions and workers may have one each.

- Everything runs in namespaces and control groups of this cluster. ``kubeconfig`` is for programs inside them (``start``,
  ``Node.start``), ``outside_kubeconfig`` for those outside, such as a client in the test's own process.
- Images: ``localhost/busybox:test``, and ``localhost/aimgpu:test``, in which ``python`` has this checkout's ``aimgpu``
  (read-only mounts, no image build). ``add_image(name)`` offers the same image by the name that a chart uses.
- ``certificate`` signs what a webhook serves; ``authority.bundle`` goes into its configuration. The API server reaches
  webhooks by URL (address ``10.99.0.1``), and by Service without kube-proxy. ``proxy=True`` adds kube-proxy for ClusterIPs.
- Other programs built from Go modules: describe them with ``GoProgram``, get their folder from ``go_programs.build`` and
  start them with ``cluster.start``.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from tests.cluster import control_plane, network
from tests.cluster.certificates import Authority, Certificate
from tests.cluster.control_groups import ControlGroups
from tests.cluster.guard import Guard
from tests.cluster.images import SLEEP, write_busybox_image, write_program_image, write_python_image
from tests.cluster.kubernetes_versions import default_gates
from tests.cluster.node import Node, Place
from tests.cluster.processes import Process, Processes
from tests.cluster.requirements import missing, programs
from tests.cluster.situation import situation
from tests.cluster.stale import mark, remove, remove_stale
from tests.cluster.waiting import TIMEOUT_SECONDS, wait_until

SERVER = f"https://{network.ADDRESS}:443"
PREFIX = "aimgpu-cluster-"
PYTHON_IMAGE = "localhost/aimgpu:test"
BUSYBOX_IMAGE = "localhost/busybox:test"
HIGHEST_PRIORITY = -20
ASK_SECONDS = 60.0
_API = ("etcd", "kube-apiserver")


class Cluster:
    """Up when entered, and gone without a trace when left or when this process ends, in whatever way (``Guard``)."""

    def __init__(self, nodes: int = 1, *, proxy: bool = False, feature_gates: Mapping[str, bool] | None = None) -> None:
        reason = missing()
        if reason is not None:
            raise RuntimeError(reason)
        self._count = nodes
        self._proxy = proxy
        self._gates = default_gates() | dict(feature_gates or {})
        self._programs = programs()
        remove_stale(PREFIX)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/var/tmp"))
        mark(self.folder)
        (self.folder / "logs").mkdir()
        self._guard = Guard(self.folder, self.folder / "logs" / "guard.log")
        names = tuple(f"node{number}" for number in range(1, nodes + 1))
        self._groups = ControlGroups(self.folder.name, names)
        self._processes = Processes(
            logs=self.folder / "logs", prefix=self._groups.join_command(), environment=self._programs.environment()
        )
        self.authority = Authority(self.folder / "certificates")
        self._admin: Certificate | None = None
        self.nodes: list[Node] = []
        self.shown_logs: set[str] = set()  # programs whose log ``situation`` shows the end of
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.outside_kubeconfig = self.folder / "outside.kubeconfig"

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException as error:
            if isinstance(error, TimeoutError):
                self.shown_logs |= {"kube-apiserver", *(f"{node.name}-kubelet" for node in self.nodes)}
                error.add_note(self.situation("kube-system"))
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What tests do with it.

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints; its error message is raised unless ``check`` is off."""
        answer = subprocess.run(self._kubectl(arguments), input=stdin, capture_output=True, text=True, check=False)
        if check and answer.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {answer.stderr.strip()}")
        return answer.stdout

    def apply(self, manifest: object, namespace: str = "default") -> None:
        """Server-side apply of a dict, a list of dicts, YAML text, or the file at a path."""
        if isinstance(manifest, Path):
            text = manifest.read_text()
        elif isinstance(manifest, str):
            text = manifest
        else:
            text = yaml.safe_dump_all(manifest if isinstance(manifest, list) else [manifest])
        self.kubectl("apply", "--server-side", "--force-conflicts", f"--namespace={namespace}", "--filename=-", stdin=text)

    def make_namespace(self, name: str) -> None:
        """With its default service account: until the controller manager has made that, pods are refused."""
        self.kubectl("create", "namespace", name)
        wait_until(partial(self._default_account, name), f"service account of {name}")

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, f"--namespace={namespace}", "--output=json"))
        return found

    def get_all(self, kind: str, namespace: str = "default", selector: str = "") -> list[dict[str, Any]]:
        answer = self.kubectl("get", kind, f"--namespace={namespace}", f"--selector={selector}", "--output=json")
        found: list[dict[str, Any]] = json.loads(answer)["items"]
        return found

    def wait(self, target: str, condition: str, namespace: str = "default", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """As ``kubectl wait``: conditions ``condition=Ready``, ``delete``, ``jsonpath={.status.phase}=Failed``.

        The error says what the cluster looks like (``situation``).
        """
        limit = f"--timeout={timeout_seconds:.0f}s"
        try:
            self.kubectl("wait", target, f"--for={condition}", f"--namespace={namespace}", limit)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.situation(namespace, target)}") from None

    def situation(self, namespace: str = "default", target: str = "") -> str:
        """Why something may not have come, in about 6 kB; tests with the fixture ``cluster`` show it when they fail."""
        if not self.nodes or not self.folder.exists():
            return ""
        shown = {name: self._processes.started[name] for name in self.shown_logs if name in self._processes.started}
        return situation(self._ask, namespace, target, {name: process.written() for name, process in shown.items()})

    def wait_until_served(self, *kinds: str) -> None:
        """Until objects of these definitions can be applied and listed: ``gpunodes.aim.amd.com``.

        The API server calls a definition established a moment before it offers its kind to clients.
        """

        def are_listed() -> bool:
            try:
                self.kubectl("get", ",".join(kinds), "--all-namespaces", "--output=name")
            except RuntimeError:
                return False
            return True

        wait_until(are_listed, f"the definitions {', '.join(kinds)}", self._check_api)

    def exec(self, pod: str, *command: str, namespace: str = "default", container: str | None = None) -> str:
        chosen = [f"--container={container}"] if container else []
        return self.kubectl("exec", pod, f"--namespace={namespace}", *chosen, "--", *command)

    def delete(self, kind: str, *names: str, namespace: str = "default") -> None:
        limits = ["--ignore-not-found", "--grace-period=1", f"--timeout={TIMEOUT_SECONDS:.0f}s"]
        self.kubectl("delete", kind, *names, f"--namespace={namespace}", *limits)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a program on the first node's network; ``kubeconfig`` reaches the API server from there."""
        return self._processes.start(name, command, inside=self.nodes[0].inside, env=env)

    def process(self, name: str) -> Process:
        """``etcd``, ``kube-apiserver``, ``kube-scheduler``, ..., ``node1-kubelet``, or what ``start`` was given."""
        return self._processes.started[name]

    def prioritise(self) -> None:
        """Let what runs of it go before other work of this machine: for measurements. Linux groups processes by session."""
        for process in self._processes.started.values():
            if process.running:
                os.setpriority(os.PRIO_PROCESS, process.pid, HIGHEST_PRIORITY)
                group = Path(f"/proc/{process.pid}/autogroup")
                if group.exists():
                    group.write_text(str(HIGHEST_PRIORITY))

    def restart(self, name: str) -> None:
        """Start a component of the control plane again, as it was started; wait until the API answers."""
        self._processes.restart(name)
        # Not all that was ever started: agents and webhooks of earlier tests have ended, as they should.
        wait_until(self._answers, "API server", lambda: self._processes.check([*_API, name]))

    def program(self, name: str) -> str:
        """The path of a program of the cluster, such as kubectl."""
        return self._programs.find(name)

    def certificate(self, name: str, hosts: tuple[str, ...]) -> Certificate:
        """A serving certificate for a webhook: hosts such as ``("10.99.0.1", "aimgpu-admission.aimgpu.svc")``."""
        return self.authority.issue(name, name, hosts=hosts)

    def user_kubeconfig(self, name: str, user: str, group: str = "") -> Path:
        """A kubeconfig for another user, to test what RBAC lets it do (``system:serviceaccount:NAMESPACE:NAME`` works)."""
        client = self.authority.issue(name, user, group)
        return self.authority.kubeconfig(self.folder / f"{name}.kubeconfig", client, SERVER)

    def forward(self, port: int, address: str = network.ADDRESS) -> int:
        """A port on this machine's loopback that leads to a port inside the cluster (a node's, a pod's, a Service's)."""
        return network.forward(self._processes, self.nodes[0].inside, address, port)

    def add_image(
        self,
        *names: str,
        programs: dict[str, str] | None = None,
        command: Sequence[str] = SLEEP,
        entrypoint: Sequence[str] = (),
    ) -> None:
        """Offer the Python image by other names, on every node; `programs`: commands that run modules of this repository.

        `command` is what its containers run where their pod does not say; `entrypoint` gets the arguments of the pod.
        """
        archive = self.folder / "named.tar"
        write_python_image(archive, names, programs, command, entrypoint)
        for node in self.nodes:
            node.import_image(archive)

    def add_program_image(self, name: str, program: Path) -> None:
        """An image with one static program, on every node."""
        archive = self.folder / "program.tar"
        write_program_image(archive, name, program)
        for node in self.nodes:
            node.import_image(archive)
        archive.unlink()

    # How it comes and goes.

    def close(self) -> None:
        """Remove everything. May be called at any point of the start, and twice; what fails of it is left to the guard."""
        try:
            self._groups.kill()
            self._processes.reap()
            kept = os.environ.get("AIMGPU_CLUSTER_LOGS")
            if kept and self.folder.exists():
                shutil.copytree(self.folder / "logs", kept, dirs_exist_ok=True)
            remove(self.folder)
        finally:
            self._guard.release()

    def leftovers(self) -> list[str]:
        """What is still there after ``close``: processes, control groups, mounts, folders, the guard."""
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.folder) in line]
        groups = [str(path) for path in self._groups.leftovers()]
        processes = [f"process {pid}" for pid in self._groups.processes()] + ["guard"] * self._guard.running
        return mounts + groups + processes + ([str(self.folder)] if self.folder.exists() else [])

    def _up(self) -> None:
        self._groups.create()
        for number in range(1, self._count + 1):
            place = Place(
                name=f"node{number}",
                number=number,
                folder=self.folder / f"node{number}",
                control_group=f"/{self._groups.name}/node{number}",
                gates=self._gates,
            )
            self.nodes.append(Node(place, self._programs, self._processes))
        network.connect(self.nodes)
        first = self.nodes[0]
        admin = self.authority.issue("admin", "admin", "system:masters")
        self.authority.kubeconfig(self.kubeconfig, admin, SERVER)
        plane = control_plane.ControlPlane(
            folder=self.folder, programs=self._programs, processes=self._processes, node=first, gates=self._gates
        )
        plane.start_api(self.authority)
        for node in self.nodes:
            node.start_containerd()
        for node in self.nodes:
            wait_until(node.containerd_answers, f"containerd of {node.name}", self._check)
        self._import_images()
        self._admin = admin
        wait_until(self._answers, "API server", self._check)
        plane.start_controllers(self.authority, proxy=self._proxy)
        for node in self.nodes:
            node.start_kubelet(self.authority, SERVER)
        self.authority.kubeconfig(self.outside_kubeconfig, admin, f"https://127.0.0.1:{self.forward(443)}")
        wait_until(self._nodes_ready, "nodes Ready", self._check)
        wait_until(partial(self._default_account, "default"), "default service account", self._check)

    def _kubectl(self, arguments: Sequence[str]) -> list[str]:
        return [*self.nodes[0].inside, self._programs.find("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]

    def _ask(self, *arguments: str) -> str:
        """What kubectl prints, or why it cannot: for messages of failures, which it must not replace by its own."""
        try:
            answer = subprocess.run(self._kubectl(arguments), capture_output=True, text=True, check=False, timeout=ASK_SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer in {ASK_SECONDS:.0f} s"
        return answer.stdout.strip() or answer.stderr.strip()

    def _answers(self) -> bool:
        return self._admin is not None and network.answers(self.nodes[0].inside, self.authority, self._admin)

    def _check_api(self) -> None:
        self._processes.check(_API)

    def _check(self) -> None:
        self._processes.check(list(self._processes.started))

    def _import_images(self) -> None:
        busybox, python = self.folder / "busybox.tar", self.folder / "python.tar"
        write_busybox_image(busybox, ("localhost/pause:test", BUSYBOX_IMAGE), Path(self._programs.find("busybox")))
        write_python_image(python, (PYTHON_IMAGE,))
        for node in self.nodes:
            node.import_image(busybox)
            node.import_image(python)

    def _nodes_ready(self) -> bool:
        ready = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status} {end}'
        answer = self.kubectl("get", "nodes", f"--output=jsonpath={ready}", check=False)
        return answer.split() == ["True"] * self._count

    def _default_account(self, namespace: str) -> bool:
        answer = self.kubectl("get", "serviceaccount", "default", f"--namespace={namespace}", "--output=name", check=False)
        return "default" in answer
