"""Write the go.mod of a module that only builds commands of another module.

``go install path@version`` refuses modules with ``replace`` lines, and Kubernetes requires its own staging modules at
v0.0.0. A wrapper module with the wrapped module's own requirements and replacements selects the same versions and builds.
Run once for each new version and commit go.mod and go.sum, or let ``kubernetes_versions`` do it when a cluster is built:

    python -m tests.cluster.wrapper_module k8s.io/kubernetes v1.36.4 tests/cluster/programs/kubernetes
"""

import re
import shutil
import sys
from pathlib import Path

from tests.cluster.go_programs import complete_module, module_folder

STAGED = re.compile(r"^\s*(?:replace\s+)?(k8s\.io/[\w-]+) => \./staging\S*$", re.MULTILINE)


def wrapper(text: str, module: str, version: str) -> str:
    """The wrapper's go.mod, from the wrapped module's go.mod."""
    staged = set(STAGED.findall(text))
    published = "v0" + version.removeprefix("v1")
    for name in staged:
        text = re.sub(rf"^(\s*(?:require\s+)?{re.escape(name)}) v0\.0\.0", rf"\1 {published}", text, flags=re.MULTILINE)
    text = STAGED.sub(lambda found: found.group(0).split("=>")[0] + f"=> {found.group(1)} {published}", text)
    text = re.sub(r"\A(//[^\n]*\n)+\n", "", text)
    text = re.sub(r"^module \S+", "module aimgpu.test/programs", text, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\nrequire {module} {version}\n"


def write_wrapper(module: str, version: str, folder: Path) -> None:
    """go.mod and go.sum, complete for the main package that the folder holds already."""
    source = module_folder(module, version)
    (folder / "go.mod").write_text(wrapper((source / "go.mod").read_text(), module, version))
    # Some requirements have no entry in the checksum database; the wrapped module's own go.sum carries them.
    if (source / "go.sum").exists():
        shutil.copyfile(source / "go.sum", folder / "go.sum")
    complete_module(folder)


if __name__ == "__main__":
    write_wrapper(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
