"""etcd, the API server, the controllers and the scheduler, on the network of the first node."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.certificates import Authority
from tests.cluster.kubernetes_versions import api_flags
from tests.cluster.node import Node
from tests.cluster.processes import Processes
from tests.cluster.requirements import Programs

ADDRESS = "10.99.0.1"
SERVER = f"https://{ADDRESS}:443"
NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    folder: Path
    programs: Programs
    processes: Processes
    node: Node
    gates: Mapping[str, bool]

    def start_api(self, authority: Authority) -> None:
        """etcd and the API server; the API server waits for etcd by itself."""
        etcd = "http://127.0.0.1:2379"
        flags = {"data-dir": self.folder / "etcd", "listen-client-urls": etcd, "advertise-client-urls": etcd}
        flags |= {"listen-peer-urls": "http://127.0.0.1:2380", "unsafe-no-fsync": "true", "log-level": "warn"}
        self._start("etcd", flags)
        serving = authority.issue("apiserver", "kube-apiserver", hosts=(ADDRESS, "10.96.0.1", "127.0.0.1", *NAMES))
        client = authority.issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        accounts = authority.signing_keys("service-accounts")
        flags = {
            "etcd-servers": etcd,
            "secure-port": "443",
            "bind-address": "0.0.0.0",
            "advertise-address": ADDRESS,
            "service-cluster-ip-range": "10.96.0.0/16",
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": authority.certificate,
            "service-account-key-file": accounts.certificate,
            "service-account-signing-key-file": accounts.key,
            "service-account-issuer": "https://kubernetes.default.svc",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "kubelet-client-certificate": client.certificate,
            "kubelet-client-key": client.key,
            "kubelet-certificate-authority": authority.certificate,
            "kubelet-preferred-address-types": "InternalIP",
            # Webhooks given by Service are called at their endpoints, so no kube-proxy is needed for them.
            "enable-aggregator-routing": "true",
            "cert-dir": self.folder / "apiserver",
        }
        self._start("kube-apiserver", flags | api_flags() | self._feature_gates())

    def start_controllers(self, authority: Authority, *, proxy: bool) -> None:
        managed: dict[str, object] = {
            "root-ca-file": authority.certificate,
            "service-account-private-key-file": self._key("service-accounts"),
        }
        managed |= {"use-service-account-credentials": "true", "cert-dir": self.folder / "controller-manager"}
        # Tests create and delete hundreds of objects at once; the default of 20 a second is for production clusters.
        rates = {"kube-api-qps": "300", "kube-api-burst": "600"}
        self._start_client("kube-controller-manager", authority, managed | rates)
        self._start_client("kube-scheduler", authority, rates)
        if proxy:
            configuration = authority.kubeconfig(
                self.folder / "proxy.kubeconfig", authority.issue("proxy", "system:kube-proxy"), SERVER
            )
            flags = {"kubeconfig": configuration, "proxy-mode": "nftables", "hostname-override": self.node.name}
            flags |= {"cluster-cidr": "10.88.0.0/13", "conntrack-max-per-core": "0"}
            flags |= {"conntrack-tcp-timeout-established": "0", "conntrack-tcp-timeout-close-wait": "0"}
            self._start("kube-proxy", flags)

    def _start_client(self, name: str, authority: Authority, flags: Mapping[str, object]) -> None:
        configuration = authority.kubeconfig(
            self.folder / f"{name}.kubeconfig", authority.issue(name, f"system:{name}"), SERVER
        )
        own = {f"{prefix}kubeconfig": configuration for prefix in ("", "authentication-", "authorization-")}
        self._start(name, own | {"leader-elect": "false"} | dict(flags) | self._feature_gates())

    def _start(self, name: str, flags: Mapping[str, object]) -> None:
        command = [self.programs.find(name), *(f"--{flag}={value}" for flag, value in flags.items())]
        self.processes.start(name, command, inside=self.node.inside)

    def _feature_gates(self) -> dict[str, object]:
        if not self.gates:
            return {}
        return {"feature-gates": ",".join(f"{gate}={str(on).lower()}" for gate, on in self.gates.items())}

    def _key(self, name: str) -> Path:
        return self.folder / "certificates" / f"{name}.key"
