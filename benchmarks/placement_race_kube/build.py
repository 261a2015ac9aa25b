"""kube-scheduler's benchmarks and etcd, built from the Go module proxy and kept by version."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAGED = re.compile(r"^\s+(k8s\.io/[\w-]+) => \./staging", re.MULTILINE)
_PERF = "k8s.io/kubernetes/test/integration/scheduler_perf"
_SOURCE = Path(__file__).with_name("main.go")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What was built, and the folder of the Kubernetes module, where scheduler_perf has its workloads."""

    go: str
    module: Path
    etcd: Path
    misc: Path
    dra: Path
    algorithm: Path

    def folder(self, topic: str) -> Path:
        return self.module / "test" / "integration" / "scheduler_perf" / topic

    def algorithm_seconds(self, load: dict[str, Any], percent: int) -> dict[str, Any]:
        """Wall and CPU seconds for the timed pods of a load."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in load.items()]
        command = [str(self.algorithm), *flags, f"--percent={percent}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def build_tools(cache: Path, kubernetes: str, etcd: str) -> Tools:
    """Builds what is not there yet; the first time takes a quarter of an hour on two cores."""
    if shutil.which("go") is None:
        sys.exit("Go is not on the PATH")
    module = json.loads(_go(cache, "mod", "download", "-json", f"k8s.io/kubernetes@{kubernetes}"))
    source = Path(module["Dir"])
    kube, store = cache / kubernetes, cache / f"etcd-{etcd}"
    _module(store, f"require go.etcd.io/etcd/server/v3 {etcd}\n")
    _module(kube, _requirements(source, kubernetes))
    command = kube / "cmd" / "algorithm"
    command.mkdir(parents=True, exist_ok=True)
    shutil.copy(_SOURCE, command)
    tools = Tools(
        go=_go(cache, "env", "GOVERSION").strip(),
        module=source,
        etcd=store / "etcd",
        misc=kube / "misc.test",
        dra=kube / "dra.test",
        algorithm=kube / "algorithm",
    )
    _once(tools.etcd, store, "build", "-mod=mod", "-o", str(tools.etcd), "go.etcd.io/etcd/server/v3")
    _once(tools.misc, kube, "test", "-mod=mod", "-c", "-o", str(tools.misc), f"{_PERF}/misc")
    _once(tools.dra, kube, "test", "-mod=mod", "-c", "-o", str(tools.dra), f"{_PERF}/dra")
    _go(kube, "build", "-mod=mod", "-o", str(tools.algorithm), "./cmd/algorithm")
    return tools


def _requirements(source: Path, version: str) -> str:
    """The module's own replacements point into a staging folder that its zip lacks; the same code is published apart."""
    staged = _STAGED.findall((source / "go.mod").read_text())
    published = f"v0{version.removeprefix('v1')}"
    replaced = "".join(f"\t{name} => {name} {published}\n" for name in staged)
    return f"require k8s.io/kubernetes {version}\n\nreplace (\n{replaced})\n"


def _module(folder: Path, requirements: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "go.mod").exists():
        (folder / "go.mod").write_text(f"module race\n\ngo 1.26.0\n\n{requirements}")


def _once(target: Path, folder: Path, *arguments: str) -> None:
    if not target.exists():
        print("building", target)
        _go(folder, *arguments)


def _go(folder: Path, *arguments: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["go", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"go {' '.join(arguments)}: {done.stderr[-4000:]}")
    return done.stdout
